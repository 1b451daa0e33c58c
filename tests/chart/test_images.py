"""Images, tested without a container engine: Dockerfiles are linted and their commands run locally."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from quire_client import Client
from quire_client.demo import demo_model_dir

from tests.chart.chart import ROOT, program, render
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
SERVICES = ("gateway", "scheduler", "worker")
PORTS = {"50051": "7151", "50052": "7152", "50061": "7161", "9090": "7190", "8000": "7180"}
every_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)

Image = tuple[str, list[tuple[str, str]]]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(FROM, python:3.11 AS build), ... of a Dockerfile."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in lines]


def stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name; the unnamed last stage is called image."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions(path):
        if word == "FROM":
            current = found.setdefault(rest.partition(" AS ")[2] or "image", [])
        else:
            current.append((word, rest))
    return found


@every_dockerfile
def test_the_linter_finds_nothing(path: Path) -> None:
    done = subprocess.run([program("hadolint"), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_has_a_dockerfile() -> None:
    assert {path.stem for path in DOCKERFILES} == set(SERVICES)


@every_dockerfile
def test_bases_are_pinned_and_no_image_runs_as_root(path: Path) -> None:
    names = set(stages(path))
    bases = {rest.partition(" ")[0] for word, rest in instructions(path) if word == "FROM"} - names
    assert all(re.search(r":\d+\.\d+\.\d+", base) for base in bases)
    images = [stage for stage in stages(path).values() if any(word == "CMD" for word, _ in stage)]
    assert images
    for stage in images:
        assert ("USER", "10001:10001") in stage
        assert [json.loads(rest) for word, rest in stage if word == "CMD"] == [[f"quire-{path.stem}"]]


@every_dockerfile
def test_images_have_labels(path: Path) -> None:
    (labels,) = (rest for word, rest in instructions(path) if word == "LABEL")
    about = yaml.safe_load((ROOT / "deploy" / "k8s" / "quire" / "Chart.yaml").read_text())
    assert dict(pair.split("=") for pair in shlex.split(labels)) == {
        "org.opencontainers.image.title": f"quire-{path.stem}",
        "org.opencontainers.image.version": about["appVersion"],
        "org.opencontainers.image.licenses": "Apache-2.0",
    }


def test_images_match_the_chart() -> None:
    built = set(re.findall(r"--tag (\S+)", "".join(path.read_text() for path in DOCKERFILES)))
    gpu = {"workers": [{"name": "gpu", "model": "demo", "gpuCount": 1}]}
    pods = [pod for values in ({}, gpu) for _, pod in render(values).pods()]
    used = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert {image for image in used if image.startswith("quire-")} == built


# -- clean environments, made by the Dockerfiles' own commands ---------------------------------------------------------


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `COPY . .` copies, according to .dockerignore."""
    folder = tmp_path_factory.mktemp("context")
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    dropped = shutil.ignore_patterns(*(rule.removeprefix("**/") for rule in rules if rule.startswith("**/")))
    for name in (rule.removeprefix("!") for rule in rules if rule.startswith("!")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=dropped)
        else:
            shutil.copy(ROOT / name, target)
    return folder


def wheels_at_hand() -> str:
    """The folder of wheels in pip's configuration; empty if there is none."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    found = subprocess.run(command, capture_output=True, text=True)
    return os.environ.get("PIP_FIND_LINKS") or found.stdout.strip()


def build(stage: list[tuple[str, str]], context: Path, home: Path) -> Path:
    """Runs the commands of a build stage with /opt/quire in `home`. Returns the folder of the environment."""
    environment = home / "quire"
    arguments = dict(rest.split("=", 1) for word, rest in stage if word == "ARG")
    if wheels := wheels_at_hand():
        # It may contain the CPU build of torch; then the index for torch is not needed.
        arguments |= {"UV_FIND_LINKS": wheels, "TORCH_INDEX": "https://pypi.org/simple"}
    for word, rest in stage:
        if word == "RUN":
            script = rest.replace("/opt/quire", str(environment))
            variables = os.environ | arguments | {"UV_PYTHON": sys.executable, "UV_LINK_MODE": "hardlink"}
            variables["UV_SYSTEM_CERTS"] = "1"  # trusts the same CAs as pip on this machine
            variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            done = subprocess.run(["bash", "-ec", script], cwd=context, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture(scope="module")
def environments(context: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clean environment per service, as in its image."""
    return {
        service: build(
            stages(DOCKER / f"{service}.Dockerfile")["build-cpu" if service == "worker" else "build"],
            context,
            tmp_path_factory.mktemp(service),
        )
        for service in SERVICES
    }


def packages(environment: Path) -> dict[str, str]:
    command = [program("uv"), "pip", "list", "--format=json", "--python", str(environment / "bin" / "python")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {package["name"]: package["version"] for package in json.loads(done.stdout)}


def test_only_the_worker_has_torch(environments: dict[str, Path]) -> None:
    assert {service for service, folder in environments.items() if "torch" in packages(folder)} == {"worker"}
    for service in ("gateway", "scheduler"):
        command = [str(environments[service] / "bin" / "python"), "-I", "-c", "import torch"]
        assert "No module named 'torch'" in subprocess.run(command, capture_output=True, text=True).stderr


def test_every_version_is_pinned(environments: dict[str, Path]) -> None:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    free = {"quire", "torch"}
    for folder in environments.values():
        installed = {name: version for name, version in packages(folder).items() if name not in free}
        assert installed.items() <= pinned.items()


@every_dockerfile
def test_images_have_an_sbom(path: Path, environments: dict[str, Path], tmp_path: Path) -> None:
    """The commands of the Dockerfile, with the script and Debian's list of packages in other places."""
    (tmp_path / "status").write_text(
        "Package: libssl3\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:3.0.17+b1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1.0\n"
    )
    (tmp_path / "release").write_text('ID=debian\nVERSION_ID="12"\n')
    for stage in stages(path).values():
        if not any(word == "CMD" for word, _ in stage):
            continue
        (command,) = (rest for word, rest in stage if word == "RUN" and "sbom" in rest)
        found = re.match(r"--mount=type=bind,source=(\S+),target=/build/sbom.py .* image (\S+) >/opt/quire/", command)
        assert found is not None, command
        python = str(environments[path.stem] / "bin" / "python")
        words = [python, str(ROOT / found[1]), "image", found[2], "--dpkg-status", str(tmp_path / "status")]
        done = subprocess.run([*words, "--os-release", str(tmp_path / "release")], capture_output=True, text=True)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(done.stdout) is None, done.stderr
        purls = {part["purl"] for part in json.loads(done.stdout)["components"]}
        installed = {f"pkg:pypi/{name}@{version}" for name, version in packages(environments[path.stem]).items()}
        assert {purl for purl in purls if purl.startswith("pkg:pypi/")} == installed
        assert {purl for purl in purls if purl.startswith("pkg:deb/")} == {
            "pkg:deb/debian/libssl3@1%3A3.0.17%2Bb1?arch=amd64&distro=debian-12"
        }
        assert found[2] in re.findall(r"--tag (\S+)", path.read_text())


def test_the_worker_image_contains_the_demo_model(environments: dict[str, Path]) -> None:
    there, here = environments["worker"] / "demo-model", demo_model_dir()
    assert sorted(path.name for path in there.iterdir() if path.suffix == ".safetensors") == ["model.safetensors"]
    assert (there / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives every process 127.0.0.0/8")
def test_compose_services_serve_and_are_healthy(environments: dict[str, Path], tmp_path: Path) -> None:
    """Runs the commands and health checks of the compose file, each in the clean environment of its image."""
    with RedisServer(tmp_path) as redis:
        machine = Machine(environments, redis.port)
        services = [
            Service(name, machine.command(name, compose()["services"][name]["command"]), "", tmp_path / f"{name}.log")
            for name in SERVICES
        ]
        try:
            for service in services:
                service.start()
            services[0].address = f"{machine.hosts['gateway']}:{PORTS['50051']}"
            services[0].wait_ready()  # the gateway is ready when a model has a worker
            with Client.connect(services[0].address, timeout_s=120.0) as client:
                result = client.chat("Who are you?", temperature=0)
            assert result.text == demo_answer("Who are you?")
            with urllib.request.urlopen(f"http://{machine.hosts['gateway']}:{PORTS['8000']}/v1/models") as models:
                assert json.load(models)["data"][0]["id"] == "demo"
            for name in SERVICES:
                _, *check = compose()["services"][name]["healthcheck"]["test"]
                done = subprocess.run(machine.command(name, check), capture_output=True, text=True, timeout=60)
                assert done.returncode == 0, f"{name}: {done.stderr}"
        finally:
            for service in filter(lambda service: service.is_running, services):
                service.kill()


class Machine:
    """Replaces compose's names and addresses by a loopback address per service, and its ports by free ports outside the
    ephemeral range.
    """

    def __init__(self, environments: dict[str, Path], redis_port: int) -> None:
        self._environments = environments
        first = f"127.{192 + os.getpid() % 60}.{os.getpid() // 60 % 250}"
        self.hosts = {name: f"{first}.{i + 2}" for i, name in enumerate(SERVICES)}
        self._peers = {f"{name}:": f"{ip}:" for name, ip in self.hosts.items()} | {
            "redis:6379": f"127.0.0.1:{redis_port}"
        }

    def command(self, service: str, words: list[str]) -> list[str]:
        """The environment of a service's container. Only the search path comes from this process."""
        clean = ["env", "-i", "HOME=/tmp", f"PATH={os.environ['PATH']}", f"QUIRE_CACHE_DIR={kernel_cache()}"]
        program = self._environments[service] / "bin" / words[0]
        return [*clean, str(program), *(self._translate(service, word) for word in words[1:])]

    def _translate(self, service: str, word: str) -> str:
        own = self.hosts[service]
        word = word.replace("0.0.0.0", own).replace("localhost", own)
        word = word.replace("/opt/quire/demo-model", str(self._environments["worker"] / "demo-model"))
        peers = "|".join(map(re.escape, self._peers))
        word = re.sub(rf"(?<=[=/])({peers})", lambda name: self._peers[name[0]], word)
        return re.sub(rf":({'|'.join(PORTS)})\b", lambda port: f":{PORTS[port[1]]}", word)


def kernel_cache() -> Path:
    """Shares compiled kernels between tests, as in the whole suite."""
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path.home() / ".cache" / "quire")


def demo_answer(question: str) -> str:
    pairs: Any = json.loads((demo_model_dir() / "pairs.json").read_text())["pairs"]
    return str(next(pair["answer"] for pair in pairs if question in pair.get("questions", ())))


# -- compose -----------------------------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


@pytest.mark.parametrize("service", SERVICES)
def test_services_accept_the_settings_of_compose(service: str) -> None:
    command, *flags = compose()["services"][service]["command"]
    done = subprocess.run([program(command), *flags, "--print-config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings = done.stdout.replace("# flag", "").replace(" ", "")
    assert all(flag.removeprefix("--").partition("=")[0] + "=" in settings for flag in flags)


def test_compose_builds_the_images_that_it_runs() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD"
        assert not service["image"].endswith(":latest")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert set(service.get("depends_on", [])) <= set(services)
        if name in SERVICES:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve() in DOCKERFILES
            drain = next(flag for flag in service["command"] if flag.startswith("--drain-timeout-s="))
            assert float(drain.partition("=")[2]) < float(service["stop_grace_period"].removesuffix("s"))
