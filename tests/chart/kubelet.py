"""Runs pods as local processes, as a kubelet would from a manifest, but without containers.

    pod = Pod("r-quire-gateway-x", "127.80.0.7", template, node)
    await pod.start()        # init containers, containers, probes from now on
    await pod.wait_ready()
    await pod.terminate()    # preStop, SIGTERM, SIGKILL at the end of the grace period

Replacements:

    pod network              a loopback address per pod instead of 0.0.0.0; ports do not change
    cluster DNS              names ending in .svc.cluster.local are replaced by addresses from `Node.dns`; those after
                             dns:/// stay, and processes look them up in the file `Node.names_path`
    mounts                   a folder per volume; its mount path is replaced in arguments and variables
    images                   IMAGE_COMMANDS and IMAGE_PATHS; the environment has only our search paths

Probes run more often than in the manifest but fail no sooner, so a pod becomes ready as soon as possible.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire_client.demo import demo_model_dir

from tests.processes.children import start_child
from tests.processes.redis_server import redis_executable

Json = dict[str, Any]

PROBE_S = 0.1
EXIT_POLL_S = 0.02
ENDPOINT_LAG_S = 0.5  # time for which a terminating pod still gets new connections
IMAGE_PATHS = {"/opt/quire/demo-model": str(demo_model_dir())}
DNS_NAME = re.compile(r"(?P<kept>dns:///)?(?P<name>[a-z0-9.-]+\.svc\.cluster\.local)")
NAMES_FOLDER = Path(__file__).resolve().parents[1] / "processes" / "names"
VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(slots=True)
class Node:
    """Shared by all pods: DNS names, secrets, config maps, a folder, and the list of problems."""

    folder: Path
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    dns: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def names_path(self) -> Path:
        """The names that processes look up, with their addresses."""
        return self.folder / "names.json"


class Pod:
    """One pod, from its creation to its termination."""

    def __init__(self, name: str, ip: str, template: Json, node: Node) -> None:
        self.name, self.ip, self.template = name, ip, template
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.is_started = self.is_ready = False
        self.left_at: float | None = None
        self.was_killed = False
        self._spec: Json = template["spec"]
        self._node = node
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._became_ready = asyncio.Event()
        self._folder = node.folder / name
        self._folder.mkdir(exist_ok=True)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Runs init containers in order, then starts all containers. Raises RuntimeError if an init container fails."""
        for container in self._spec.get("initContainers", []):
            if code := await self._run(container):
                raise RuntimeError(f"{self.name}: init container exited with {code}\n{self.log()}")
        for container in self._spec["containers"]:
            self._processes[container["name"]] = self._launch(container)
        self._watch = asyncio.create_task(self._probe(self._spec["containers"][0]))

    async def run_to_end(self) -> int:
        """Runs all containers of a pod to completion. Returns the largest exit code."""
        return max(await asyncio.gather(*map(self._run, self._spec["containers"])))

    async def wait_ready(self) -> None:
        """Waits for readiness. Raises RuntimeError if the start failed."""
        assert self._watch is not None
        ready = asyncio.create_task(self._became_ready.wait())
        await asyncio.wait([ready, self._watch], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise RuntimeError(f"{self.name} did not become ready: {self._node.problems}\n{self.log()}")

    async def terminate(self) -> None:
        """Terminates as the kubelet does: the grace period begins before preStop and ends with SIGKILL."""
        loop = asyncio.get_running_loop()
        self.left_at = loop.time()
        deadline = self.left_at + self._spec["terminationGracePeriodSeconds"]
        if self._watch is not None:
            self._watch.cancel()
        for container in self._spec["containers"]:
            await asyncio.sleep(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self._processes.items():
            await _exit_of(process, deadline)
            if process.poll() is None:
                self.was_killed = True
                self._problem(f"{name} was still running at the end of its grace period")
            elif process.returncode:
                self._problem(f"{name} exited with {process.returncode}")
        self.kill()

    def kill(self) -> None:
        """Kills all processes."""
        if self._watch is not None:
            self._watch.cancel()
        self.is_ready = False
        for process in self._processes.values():
            process.kill()
            process.wait()

    @property
    def is_endpoint(self) -> bool:
        """Whether Services send new connections here. They see the termination of a pod with a delay."""
        if self.left_at is None:
            return self.is_ready
        return asyncio.get_running_loop().time() - self.left_at < ENDPOINT_LAG_S

    @property
    def pids(self) -> list[int]:
        """The processes of its containers."""
        return [process.pid for process in self._processes.values()]

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))

    def _problem(self, words: str) -> None:
        self._node.problems.append(f"{self.name}: {words}")

    # -- probes ------------------------------------------------------------------------------------------------------

    async def _probe(self, container: Json) -> None:
        """Runs the startup probe, then readiness and liveness. Returns when the container must restart."""
        async with self._channels(container) as ask:
            if not await self._holds_within(
                ask, container.get("startupProbe"), limit_of(container.get("startupProbe"))
            ):
                return self._problem("the startup probe failed")
            self.is_started = True
            last_alive = asyncio.get_running_loop().time()
            while True:
                now = asyncio.get_running_loop().time()
                if await ask(container["livenessProbe"]):
                    last_alive = now
                if self._has_exited(container) or now - last_alive > limit_of(container["livenessProbe"]):
                    self.is_ready = False
                    return self._problem("it exited or the liveness probe failed")
                self.is_ready = await ask(container["readinessProbe"])
                if self.is_ready:
                    self._became_ready.set()
                await asyncio.sleep(PROBE_S)

    async def _holds_within(self, ask: Callable[[Json], Awaitable[bool]], probe: Json | None, limit_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + limit_s
        while probe is not None and not await ask(probe):
            if self._has_exited(self._spec["containers"][0]) or asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(PROBE_S)
        return True

    def _has_exited(self, container: Json) -> bool:
        return self._processes[container["name"]].poll() is not None

    def _channels(self, container: Json) -> Prober:
        ports = {port["name"]: int(port["containerPort"]) for port in container["ports"]}
        return Prober(self.ip, ports)

    # -- processes ---------------------------------------------------------------------------------------------------

    async def _run(self, container: Json) -> int:
        process = self._launch(container)
        try:
            await _exit_of(process, math.inf)
        finally:
            process.kill()
        return int(process.returncode)

    def _launch(self, container: Json) -> subprocess.Popen[bytes]:
        mounts = self._mounts(container)
        variables = self._variables(container, mounts)
        words = [*container["command"], *container.get("args", [])]
        command = [self._translate(_expand(word, variables), mounts) for word in words]
        environment = [f"{name}={value}" for name, value in self._environment(variables).items()]
        command = ["env", "-i", *environment, image_command(command[0]), *command[1:]]
        return start_child(command, self._folder / f"{container['name']}.log")

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        search = ":".join(filter(None, (str(NAMES_FOLDER), os.environ.get("PYTHONPATH"))))
        names = {"PYTHONPATH": search, "QUIRE_TEST_NAMES": str(self._node.names_path)}
        return image_environment() | names | variables

    def _variables(self, container: Json, mounts: dict[str, str]) -> dict[str, str]:
        variables: dict[str, str] = {}
        for source in container.get("envFrom", []):
            variables |= self._node.secrets[source["secretRef"]["name"]]
        for item in container.get("env", []):
            value = item["value"] if "value" in item else self._value_from(item["valueFrom"], container)
            variables[item["name"]] = self._translate(_expand(value, variables), mounts)
        return variables

    def _value_from(self, source: Json, container: Json) -> str:
        if "fieldRef" in source:
            return {"metadata.name": self.name, "status.podIP": self.ip}[source["fieldRef"]["fieldPath"]]
        if "resourceFieldRef" in source:
            kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
            return str(cpus(container["resources"][kind][name]))
        reference = source["secretKeyRef"]
        return self._node.secrets[reference["name"]][reference["key"]]

    def _mounts(self, container: Json) -> dict[str, str]:
        volumes = {volume["name"]: volume for volume in self._spec.get("volumes", [])}
        mounts = dict(IMAGE_PATHS)
        for mount in container.get("volumeMounts", []):
            folder = self._folder / mount["name"]
            folder.mkdir(exist_ok=True)
            for path, text in self._files(volumes[mount["name"]]).items():
                (folder / path).write_text(text)
            mounts[mount["mountPath"]] = str(folder)
        return mounts

    def _files(self, volume: Json) -> dict[str, str]:
        """Contents by path of a volume from a Secret or ConfigMap: all entries, or its `items`."""
        if "configMap" in volume:
            return self._node.config_maps[volume["configMap"]["name"]]
        secret = volume.get("secret", {})
        entries = self._node.secrets.get(secret.get("secretName", ""), {})
        if "items" not in secret:
            return entries
        return {item["path"]: entries[item["key"]] for item in secret["items"]}

    def _translate(self, text: str, mounts: dict[str, str]) -> str:
        """Replaces addresses and paths of the cluster by local ones."""
        text = DNS_NAME.sub(lambda found: found[0] if found["kept"] else self._resolve(found["name"]), text)
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w/.-])({paths})(?![\w.-])", lambda path: mounts[path[0]], text)
        return re.sub(r"\b0\.0\.0\.0\b", self.ip, text)

    def _resolve(self, name: str) -> str:
        if name not in self._node.dns:
            raise LookupError(f"{self.name}: the cluster has no name {name}; it has {', '.join(self._node.dns)}")
        return self._node.dns[name]


class Prober:
    """Probes the ports of a pod."""

    def __init__(self, ip: str, ports: dict[str, int]) -> None:
        self._ip, self._ports = ip, ports
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Prober:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def __call__(self, probe: Json) -> bool:
        if "tcpSocket" in probe:
            return await self._connects(probe["tcpSocket"]["port"])
        return await self._is_serving(probe["grpc"]["port"], probe["grpc"]["service"], probe["timeoutSeconds"])

    async def _connects(self, port: int | str) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._ip, self._ports.get(str(port), port))
        except OSError:
            return False
        writer.close()
        return True

    async def _is_serving(self, port: int, service: str, timeout_s: float) -> bool:
        if port not in self._channels:
            self._channels[port] = grpc.aio.insecure_channel(f"{self._ip}:{port}", FAST_RECONNECT)
        stub: Any = health_pb2_grpc.HealthStub(self._channels[port])
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


FAST_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]


async def _exit_of(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Waits for the exit of a process, with a limit, by polling: asyncio did not start this child."""
    while process.poll() is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(EXIT_POLL_S)


def limit_of(probe: Json | None) -> float:
    """Seconds after which a probe that never succeeds has failed."""
    return 0.0 if probe is None else float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


def cpus(quantity: str) -> int:
    """Whole CPUs of `500m` or `2`, as resourceFieldRef rounds them."""
    text = str(quantity)
    return math.ceil(float(text[:-1]) / 1000 if text.endswith("m") else float(text))


def image_command(name: str) -> str:
    """The local program for a command of an image."""
    beside = Path(sys.executable).with_name(name)
    found = (
        redis_executable()
        if name in ("redis-server", "valkey-server")
        else str(beside)
        if beside.exists()
        else shutil.which(name)
    )
    if not found:
        raise LookupError(f"no image has a command {name}; add it to IMAGE_COMMANDS")
    return found


def image_environment() -> dict[str, str]:
    """The search path for programs. Containers inherit no other variables of this process."""
    return {name: os.environ[name] for name in ("PATH",) if name in os.environ}


def _expand(text: str, variables: dict[str, str]) -> str:
    return VARIABLE.sub(lambda name: variables.get(name[1], name[0]), text)
