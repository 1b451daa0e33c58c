"""Commands of the guides: run if they need no cluster, otherwise compared with the objects of the chart."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import values_from_yaml

from tests.chart.chart import CHART, ROOT, Values, loaded_chart, program, render, validate
from tests.chart.test_images import stages
from tests.chart.test_values import merged
from tests.processes.children import start_child
from tests.processes.ports import free_port
from tests.promql import names_in

PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("deployment", "operations", "capacity", "upgrade", "kubernetes")),
    CHART / "README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MY_VALUES = "my-values.yaml"
QUICK = {"--seconds": "1", "--num-prompts": "12", "--request-rate": "50", "--output-len": "8"}
# Commands that these tests cannot run or check.
ELSEWHERE = ("kind", "export")


def blocks(page: Path, kind: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language == kind]


def commands(*words: str, pages: list[Path] = PAGES) -> list[Any]:
    """Lines of the pages that begin with one of the words."""
    lines = [(page, line) for page in pages for block in blocks(page, "") for line in block.splitlines()]
    return [
        pytest.param(shlex.split(line, comments=True), id=f"{page.stem}: {line[:50]}")
        for page, line in lines
        if line.partition(" ")[0] in words
    ]


def option(words: list[str], name: str) -> list[str]:
    """Values of an option that may be repeated."""
    return [words[i + 1] for i, word in enumerate(words) if word == name]


def test_every_command_is_tested() -> None:
    known = {"helm", "kubectl", "docker", "python", "quire", "clients", *ELSEWHERE}
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    others = {line.partition(" ")[0] for line in lines if line and not line.startswith(" ")} - known
    assert others == set()


# -- helm --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", commands("helm", pages=[*PAGES, ROOT / "README.md"]))
def test_helm_accepts_the_values(words: list[str]) -> None:
    assert words[1] in ("template", "install", "upgrade", "test", "rollback", "history")
    assert "quire" in words
    if words[1] in ("template", "install", "upgrade") and not words[3].startswith("oci://"):
        assert (ROOT / words[words.index("quire") + 1]).resolve() == CHART
        values = reduce(merged, [read(name) for name in option(words, "--values")], settings(option(words, "--set")))
        assert render(values).manifests


def read(name: str) -> Values:
    """A file of the repository, or the values file in the deployment guide."""
    text = blocks(PAGES[0], "yaml")[0] if name == MY_VALUES else (ROOT / name).read_text()
    return dict(values_from_yaml(text))


def settings(pairs: list[str]) -> Values:
    """`workers[0].name=cpu` as --set has it."""
    first: dict[str, Any] = {}
    for pair in pairs:
        path, _, value = pair.partition("=")
        name = path.removeprefix("workers[0].")
        assert name != path, f"{pair}: not supported by this test"
        first[name] = yaml.safe_load(value)
    return {"workers": [first]} if first else {}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{page.stem}-{i}")
        for page in (*PAGES, ROOT / "docs/gpu.md")
        for i, text in enumerate(blocks(page, "yaml"))
    ],
)
def test_values_in_the_guides_render(text: str) -> None:
    for manifest in render(dict(values_from_yaml(text))).manifests:
        validate(manifest, "1.34")


def test_the_guide_limits_the_cpu_of_every_container() -> None:
    (text,) = [text for text in blocks(PAGES[0], "yaml") if "limits: {cpu:" in text and "test:" in text]
    download = {"command": ["get"]}
    stored = {"models": [{"name": "demo", "path": "/models/m", "storage": {"claimSize": "1Gi"}, "download": download}]}
    pods = [pod["spec"] for _, pod in render(dict(values_from_yaml(text)) | stored).pods()]
    containers = [c for pod in pods for c in (*pod["containers"], *pod.get("initContainers", []))]
    assert len(containers) == 6
    assert all("cpu" in container["resources"]["limits"] for container in containers)


@pytest.mark.parametrize("name", [MY_VALUES, "deploy/k8s/quire/ci/gpu-values.yaml"])
def test_the_guide_leads_to_two_gpu_pools_with_keda(name: str) -> None:
    """README -> deployment guide -> values -> manifests."""
    assert f"--values {name}" in (ROOT / "README.md").read_text() + PAGES[0].read_text()
    objects = render(read(name))
    pools = [
        m for m in objects.all("StatefulSet") if m["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    ]
    containers = [pool["spec"]["template"]["spec"]["containers"][0] for pool in pools]
    assert [container["resources"]["limits"]["nvidia.com/gpu"] for container in containers] == [1, 1]
    (scaled,) = objects.all("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] in {pool["metadata"]["name"] for pool in pools}
    assert objects.has("ServiceMonitor")


def test_ten_minutes_lead_to_two_gpu_pools_with_mutual_tls_redis_keda_and_traces() -> None:
    """README -> docs/kubernetes.md -> values -> manifests."""
    name, guide = "deploy/k8s/quire/ci/production-gpu-values.yaml", ROOT / "docs" / "kubernetes.md"
    assert "docs/kubernetes.md" in (ROOT / "README.md").read_text()
    section = guide.read_text().partition("## Ten minutes to a GPU cluster\n")[2].partition("\n## ")[0]
    assert f"helm template quire deploy/k8s/quire --namespace inference --values {name}" in section
    assert len(section.split()) < 2000  # ten minutes of reading, with time to think
    objects = render(read(name))
    containers = {owner["metadata"]["name"]: pod["spec"]["containers"][0] for owner, pod in objects.pods()}
    services = {name: c for name, c in containers.items() if c["name"] in ("gateway", "scheduler", "worker")}
    pools = [c for c in services.values() if c["name"] == "worker"]
    assert [pool["resources"]["limits"]["nvidia.com/gpu"] for pool in pools] == [1, 1]
    for container in services.values():
        assert "--internal-tls-ca-file=/etc/quire/trust/ca.crt" in container["args"]
        assert "--trace-endpoint=http://otel-collector.monitoring:4317" in container["args"]
    environment = {item["name"]: item.get("value") for item in services["r-quire-gateway"]["env"]}
    assert environment["QUIRE_REDIS"].startswith("rediss+sentinel://")
    assert environment["QUIRE_REDIS_TLS_CA_FILE"]
    assert environment["QUIRE_REDIS_PASSWORD_FILE"]
    assert sorted(s["spec"]["minReplicaCount"] for s in objects.all("ScaledObject")) == [0, 1]


# -- kubectl, docker ---------------------------------------------------------------------------------------------------


def objects_of_guides() -> dict[str, set[str]]:
    """Names by kind of the objects in a release called quire."""
    rendered = loaded_chart().render(read("deploy/k8s/quire/ci/cpu-values.yaml"), name="quire", namespace="default")
    names: dict[str, set[str]] = {}
    for text in (text for path, text in rendered.items() if not path.endswith(".txt")):
        for manifest in filter(None, yaml.safe_load_all(text)):
            name = manifest["metadata"]["name"]
            names.setdefault(manifest["kind"].lower(), set()).add(name)
            if manifest["kind"] == "StatefulSet":
                names.setdefault("pod", set()).add(f"{name}-0")
    return names


@pytest.mark.parametrize("words", commands("kubectl"))
def test_kubectl_names_objects_that_exist(words: list[str]) -> None:
    names = objects_of_guides()
    for word in words:
        if match := re.fullmatch(r"(service|deployment|statefulset|pod)/(.+)", word):
            assert match[2] in names[match[1]]
    for word in words:
        if re.fullmatch(r"quire-\w+-\w+-\d", word):
            assert word in names["pod"]
    for selector in option(words, "--selector"):
        assert {part.partition("=")[0] for part in selector.split(",")} <= {
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
        }
    if "logs" in words and "--selector" in words:
        assert "--tail=-1" in words  # by default kubectl shows ten lines per container
    for folder in option(words, "--kustomize"):
        assert folder in (option(words, "--base")[0] for words in rendered_bases())


def rendered_bases() -> list[list[str]]:
    return [p.values[0] for p in commands("python") if "--base" in p.values[0]]


@pytest.mark.parametrize("words", [p for p in commands("docker") if p.values[0][1] == "run"])
def test_docker_runs_images_that_the_guide_builds(words: list[str]) -> None:
    built = {tag for p in commands("docker") for tag in option(p.values[0], "--tag")}
    assert built & set(words)


@pytest.mark.parametrize("words", [p for p in commands("docker") if p.values[0][1] != "run"])
def test_docker_builds_from_files_that_exist(words: list[str]) -> None:
    if words[1] == "run":  # prints a file of an image that a Dockerfile writes
        image, path = next(word for word in words if word.startswith("quire-")), words[words.index("cat") + 2]
        assert any(f"image {image} >{path}" in file.read_text() for file in (ROOT / "deploy" / "docker").iterdir())
        return
    (file,) = option(words, "--file")
    assert (ROOT / file).is_file()
    for target in option(words, "--target"):
        assert target in stages(ROOT / file)


# -- quire -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment after following the capacity guide up to `quire up`."""
    exports = [word for p in commands("export") for word in p.values[0][1:]]
    exported = dict(word.split("=", 1) for word in exports)
    (up,) = [p.values[0] for p in commands("quire") if p.values[0][1] == "up"]
    folder, port = tmp_path_factory.mktemp("up"), free_port()
    ready, log = folder / "ready.json", folder / "up.log"
    flags = ["--port", str(port), "--http-port", "0", "--ready-file", str(ready), "--log-dir", str(folder)]
    process = start_child([program("quire"), *up[1:], *flags], log, **exported)
    try:
        wait_for(ready, process, log)
        yield os.environ | {"QUIRE_TARGET": f"localhost:{port}"}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    while not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            raise RuntimeError(log.read_text())


@pytest.mark.parametrize("words", commands("quire"))
def test_quire_commands_of_the_guides_succeed(words: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    if words[1] == "up":
        return  # run by the fixture
    # Only the worker's name and the load are changed.
    words = ["worker-1" if word.startswith("quire-worker-") else word for word in words]
    words = [QUICK.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[1] == "chat":
        words += ["--max-tokens", "4"]
    command = [program("quire"), *words[1:]]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# -- links and expressions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_expressions_use_existing_metrics() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    found = re.findall(r"`((?:sum|avg|max|rate)(?: by|\().+?\)[^`]*)`", "".join(page.read_text() for page in PAGES))
    assert len(found) >= 6
    for expression in found:
        in_a_table = expression.replace("\\|", "|")
        assert all(f"`{name}`" in documented for name in names_in(in_a_table)), expression
