"""A cluster of one node: Deployments, StatefulSets and Services of rendered objects, with pods as local processes.

    async with Cluster(folder) as cluster:
        await cluster.apply(objects)              # install; returns when everything is ready
        await cluster.apply(changed_objects)      # upgrade: rolls and scales changed workloads
        cluster.address("r-quire-gateway", 50051) # address of a Service

A pod of a StatefulSet keeps its address as long as the set exists, because the address represents its DNS name. Each
new pod of a Deployment gets a new address. The name of a headless Service has the addresses of its pods.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chart.chart import NAMESPACE, Manifest, Objects
from tests.chart.kubelet import Node, Pod
from tests.processes.port_proxy import PortProxy, Streams

DOMAIN = f"{NAMESPACE}.svc.cluster.local"


@dataclass(slots=True)
class Workload:
    """A Deployment or StatefulSet and its pods by name."""

    manifest: Manifest
    pods: dict[str, Pod] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def replicas(self) -> int:
        return int(self.manifest["spec"]["replicas"])

    @property
    def template(self) -> Manifest:
        return dict(self.manifest["spec"]["template"])


class Cluster:
    """Owns all pods and proxies, and stops them at the end of the block."""

    def __init__(self, folder: Path, secrets: dict[str, dict[str, str]] | None = None) -> None:
        self._node = Node(folder, secrets or {})
        self._workloads: dict[str, Workload] = {}
        self._proxies: dict[str, ServiceProxy] = {}
        self._headless: dict[str, Manifest] = {}  # specs of Services by name
        self._stable_addresses: dict[str, str] = {}
        self._addresses = (f"127.{64 + os.getpid() % 128}.{i // 250}.{i % 250 + 2}" for i in itertools.count())
        self._serial = itertools.count()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for proxy in self._proxies.values():
            await proxy.close()
        for pod in self.pods():
            pod.kill()

    async def lose_node(self, pod: Pod) -> None:
        """The node of this pod is lost: the pod ends without notice, and its controller makes another one."""
        pod.kill()
        workload = next(w for w in self._workloads.values() if pod.name in w.pods)
        del workload.pods[pod.name]
        self._publish_names()
        if workload.kind == "Deployment":  # a StatefulSet waits until the pod object is deleted
            await self._scale(workload)

    @property
    def problems(self) -> list[str]:
        """Problems that a cluster would report as events."""
        return self._node.problems

    def pods(self, part: str = "") -> list[Pod]:
        """All pods, or those whose name contains `part`."""
        return [pod for w in self._workloads.values() for pod in w.pods.values() if part in pod.name]

    def address(self, service: str, port: int) -> str:
        """The address of a Service."""
        return f"{self._node.dns[f'{service}.{DOMAIN}']}:{port}"

    def logs(self) -> str:
        return "\n".join(f"--- {pod.name}\n{pod.log()}" for pod in self.pods())

    async def apply(self, objects: Objects) -> None:
        """Applies the objects, all workloads concurrently."""
        for secret in objects.all("Secret"):
            entries = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
            self._node.secrets[secret["metadata"]["name"]] = entries
        for config in objects.all("ConfigMap"):
            self._node.config_maps[config["metadata"]["name"]] = config["data"]
        for service in objects.all("Service"):
            await self._apply_service(service)
        for manifest in (*objects.all("Deployment"), *objects.all("StatefulSet")):
            self._name_pods(manifest)
        async with asyncio.TaskGroup() as group:
            for manifest in (*objects.all("Deployment"), *objects.all("StatefulSet")):
                group.create_task(self._apply_workload(manifest))

    async def run_pod(self, manifest: Manifest) -> tuple[int, str]:
        """Runs a pod to completion. Returns its exit code and log."""
        pod = Pod(manifest["metadata"]["name"], next(self._addresses), manifest, self._node)
        return await pod.run_to_end(), pod.log()

    # -- services and names ------------------------------------------------------------------------------------------

    async def _apply_service(self, service: Manifest) -> None:
        name = service["metadata"]["name"]
        if service["spec"].get("clusterIP") == "None":
            self._headless[f"{name}.{DOMAIN}"] = service["spec"]
            self._publish_names()
        if service["spec"].get("clusterIP") == "None" or name in self._proxies:
            return
        proxy = ServiceProxy(service, self.pods)
        self._node.dns[f"{name}.{DOMAIN}"] = ip = next(self._addresses)
        self._proxies[name] = proxy
        await proxy.start(ip)

    def _publish_names(self) -> None:
        """Write the addresses of headless Services for the processes. A reader sees the old or the new file."""
        names = {
            name: [pod.ip for pod in self.pods() if self._is_in(pod, spec)] for name, spec in self._headless.items()
        }
        new = self._node.names_path.with_suffix(".new")
        new.write_text(json.dumps(names))
        new.replace(self._node.names_path)

    @staticmethod
    def _is_in(pod: Pod, spec: Manifest) -> bool:
        return pod.labels.items() >= spec["selector"].items() and (
            pod.is_ready or spec.get("publishNotReadyAddresses", False)
        )

    def _name_pods(self, manifest: Manifest) -> None:
        """Registers DNS names of StatefulSet pods before the pods exist."""
        if manifest["kind"] != "StatefulSet":
            return
        for i in range(manifest["spec"]["replicas"]):
            pod = f"{manifest['metadata']['name']}-{i}"
            if pod not in self._stable_addresses:
                self._stable_addresses[pod] = next(self._addresses)
            self._node.dns[f"{pod}.{manifest['spec']['serviceName']}.{DOMAIN}"] = self._stable_addresses[pod]

    # -- workloads ---------------------------------------------------------------------------------------------------

    async def _apply_workload(self, manifest: Manifest) -> None:
        workload = self._workloads.setdefault(manifest["metadata"]["name"], Workload(manifest))
        workload.manifest = manifest
        await self._scale(workload)
        for name, pod in sorted(workload.pods.items(), reverse=True):
            if pod.template != workload.template:
                await self._replace(workload, name)

    async def _scale(self, workload: Workload) -> None:
        """podManagementPolicy Parallel: all at once; the highest ordinals are removed."""
        names = list(workload.pods)
        missing = [self._new_name(workload, i) for i in range(len(names), workload.replicas)]
        async with asyncio.TaskGroup() as group:
            for name in missing:
                group.create_task(self._start(workload, name))
            for name in sorted(names)[workload.replicas :]:
                group.create_task(self._stop(workload, name))

    async def _replace(self, workload: Workload, name: str) -> None:
        """A Deployment starts the new pod first (maxSurge 1), a StatefulSet terminates the old one first."""
        if workload.kind == "Deployment":
            await self._start(workload, self._new_name(workload, 0))
            await self._stop(workload, name)
        else:
            await self._stop(workload, name)
            await self._start(workload, name)

    def _new_name(self, workload: Workload, ordinal: int) -> str:
        return f"{workload.name}-{ordinal if workload.kind == 'StatefulSet' else f'x{next(self._serial)}'}"

    async def _start(self, workload: Workload, name: str) -> None:
        ip = self._stable_addresses.get(name) or next(self._addresses)
        pod = workload.pods[name] = Pod(name, ip, workload.template, self._node)
        await pod.start()
        self._publish_names()
        await pod.wait_ready()
        self._publish_names()

    async def _stop(self, workload: Workload, name: str) -> None:
        await workload.pods[name].terminate()
        del workload.pods[name]
        self._publish_names()


class ServiceProxy:
    """kube-proxy for one Service: each new connection goes to the next ready pod and stays there."""

    def __init__(self, service: Manifest, pods: Callable[[], list[Pod]]) -> None:
        self._selector = service["spec"]["selector"].items()
        self._pods = pods
        self._turn = itertools.count()
        self._proxies = {
            int(port["port"]): PortProxy(functools.partial(self._dial, port["targetPort"]))
            for port in service["spec"]["ports"]
        }

    async def start(self, ip: str) -> None:
        for port, proxy in self._proxies.items():
            await proxy.start(ip, port)

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.close()

    async def _dial(self, port_name: str) -> Streams:
        endpoints = [pod for pod in self._pods() if pod.is_endpoint and pod.labels.items() >= self._selector]
        if not endpoints:
            raise ConnectionRefusedError("the Service has no endpoints")
        pod = endpoints[next(self._turn) % len(endpoints)]
        return await asyncio.open_connection(pod.ip, _port(pod, port_name))


def _port(pod: Pod, name: str) -> int:
    container = pod.template["spec"]["containers"][0]
    return next(int(port["containerPort"]) for port in container["ports"] if port["name"] == name)
