"""Every scenario of ci/ renders to consistent objects that four versions of Kubernetes accept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from helm_python import chart as helm

from gateway_svc.foreign.services import ENGINES
from gateway_svc.process.ports import SERVICE_NAMES
from tests.chart.chart import CHART, NAMESPACE, SCENARIOS, VERSIONS, Objects, read_values, render, validate
from tests.chart.test_values import NEEDED, merged

SOURCE = f"hf://o/m@{'a' * 40}"

every_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem.removesuffix("-values"))


@pytest.mark.parametrize("version", VERSIONS)
@every_scenario
def test_kubernetes_accepts_every_object(path: Path, version: str) -> None:
    for manifest in render(read_values(path)).manifests:
        validate(manifest, version)


def test_the_validator_refuses_invalid_objects() -> None:
    gateway = render().get("Deployment", "gateway")
    gateway["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="redinessProbe"):
        validate(gateway, VERSIONS[0])
    twice = render().get("Deployment", "gateway")
    container = twice["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "HOME", "value": "/"})
    container["ports"].append({"name": "more", "containerPort": 9090})
    with pytest.raises(
        ValueError, match=r"env has two items with name HOME; .*ports has two items with containerPort 9090"
    ):
        validate(twice, VERSIONS[0])
    scaled = render(read_values(CHART / "ci" / "gpu-values.yaml")).all("ScaledObject")[0]
    scaled["spec"]["minReplicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplicas"):
        validate(scaled, VERSIONS[0])


@every_scenario
def test_helm_lints_it(path: Path) -> None:
    report = helm.lint(CHART, read_values(path), strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert all(message["severity"] <= 1 for message in report["messages"]), report


@every_scenario
def test_names_are_unique_and_in_the_namespace(path: Path) -> None:
    objects = render(read_values(path))
    counts = Counter((m["kind"], m["metadata"]["name"]) for m in objects.manifests)
    assert max(counts.values()) == 1
    assert {m["metadata"]["namespace"] for m in objects.manifests} == {NAMESPACE}
    # The name of a StatefulSet plus a hash becomes a label, which is limited to 63 characters.
    assert all(len(m["metadata"]["name"]) <= 52 for m in objects.all("StatefulSet"))


@every_scenario
def test_every_selector_finds_its_pods_and_no_others(path: Path) -> None:
    objects = render(read_values(path))
    pods = {owner["metadata"]["name"]: pod["metadata"]["labels"] for owner, pod in objects.pods()}
    for owner, pod in objects.pods():
        if owner["kind"] != "Pod":
            selector = owner["spec"]["selector"]["matchLabels"]
            assert [name for name in pods if selects(selector, pods[name])] == [owner["metadata"]["name"]]
            assert pod["metadata"]["labels"].items() >= selector.items()
            for spread in pod["spec"].get("topologySpreadConstraints", []):
                assert spread["labelSelector"]["matchLabels"] == selector
    for kind, field in (("Service", "selector"), ("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for manifest in objects.all(kind):
            selector = manifest["spec"][field]
            assert any(selects(selector.get("matchLabels", selector), labels) for labels in pods.values()), manifest


@every_scenario
def test_autoscalers_and_routes_reference_existing_objects(path: Path) -> None:
    objects = render(read_values(path))
    there = {(m["kind"], m["metadata"]["name"]) for m in objects.manifests}
    for scaler in (*objects.all("HorizontalPodAutoscaler"), *objects.all("ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in there
        (scaled,) = (m for m in objects.all(target["kind"]) if m["metadata"]["name"] == target["name"])
        assert "replicas" not in scaled["spec"], "an upgrade would revert the autoscaler"
    ports = {s["metadata"]["name"]: {p["name"]: p["port"] for p in s["spec"]["ports"]} for s in objects.all("Service")}
    for ingress in objects.all("Ingress"):
        for route in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            assert route["backend"]["service"]["port"]["name"] in ports[route["backend"]["service"]["name"]]
    for route in objects.all("GRPCRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            assert backend["port"] == ports[backend["name"]]["grpc"]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return labels.items() >= selector.items()


@every_scenario
def test_ports_have_names_that_services_and_policies_use(path: Path) -> None:
    objects = render(read_values(path))
    names = {
        owner["metadata"]["name"]: {port["name"] for c in pod["spec"]["containers"] for port in c.get("ports", [])}
        for owner, pod in objects.pods()
    }
    for service in objects.all("Service"):
        owner = service["metadata"]["name"].removesuffix("-headless").removesuffix("-admin")
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names[owner]


@every_scenario
def test_schedulers_are_addressed_by_the_name_of_their_headless_service(path: Path) -> None:
    objects = render(read_values(path))
    services = {
        f"dns:///{s['metadata']['name']}.{NAMESPACE}.svc.cluster.local:50052": s
        for s in objects.all("Service")
        if s["metadata"]["labels"]["app.kubernetes.io/component"] == "scheduler"
    }
    assert all(s["spec"]["clusterIP"] == "None" and s["spec"]["publishNotReadyAddresses"] for s in services.values())
    assert set(schedulers_of(objects.get("Deployment", "gateway"))) == services.keys()
    for worker in objects.all("StatefulSet"):
        model = worker["metadata"]["labels"]["quire/model"]
        (address,) = schedulers_of(worker)
        assert services[address]["spec"]["selector"]["quire/model"] == model


def test_the_number_of_schedulers_is_in_no_other_pod() -> None:
    """scheduler.replicas restarts no gateway and no worker."""
    one, three = (render({"scheduler": {"replicas": replicas}}) for replicas in (1, 3))
    assert one.get("Deployment", "scheduler-demo")["spec"].pop("replicas") == 1
    assert three.get("Deployment", "scheduler-demo")["spec"].pop("replicas") == 3
    assert list(one.pods()) == list(three.pods())


def test_schedulers_and_gateways_leave_a_lost_node_soon() -> None:
    """Pods without these tolerations stay bound to an unreachable node for five minutes."""
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    values = {"scheduler": {"nodeLostSeconds": 7}, "gateway": {"tolerations": [own]}}
    objects = render(values)
    lost = pod_of(objects.get("Deployment", "scheduler-demo"))["tolerations"]
    assert {t["key"].rpartition("/")[2]: t["tolerationSeconds"] for t in lost} == {"unreachable": 7, "not-ready": 7}
    kept = pod_of(objects.get("Deployment", "gateway"))["tolerations"]
    assert [t for t in kept if t["key"] == own["key"]] == [own]  # the user's own toleration wins
    (worker,) = objects.all("StatefulSet")
    assert "tolerations" not in pod_of(worker)  # a StatefulSet does not replace them


def pod_of(owner: dict[str, Any]) -> dict[str, Any]:
    return dict(owner["spec"]["template"]["spec"])


def schedulers_of(owner: dict[str, Any]) -> list[str]:
    args = owner["spec"]["template"]["spec"]["containers"][0]["args"]
    return [arg.removeprefix("--scheduler=") for arg in args if arg.startswith("--scheduler=")]


@every_scenario
def test_every_pod_is_hardened(path: Path) -> None:
    for _, pod in render(read_values(path)).pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # QUIRE_GATEWAY_PORT would be read as a setting
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            # Namespaces with a ResourceQuota refuse pods with containers without requests.
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]


@every_scenario
def test_only_readiness_depends_on_other_services(path: Path) -> None:
    for owner, pod in render(read_values(path)).pods():
        if owner["metadata"]["labels"]["app.kubernetes.io/component"] in ("gateway", "scheduler", "worker"):
            (container,) = pod["spec"]["containers"]
            probes = [container[f"{name}Probe"]["grpc"]["service"] for name in ("startup", "liveness", "readiness")]
            assert probes == ["startup", "liveness", "readiness"]


@every_scenario
def test_shutdown_fits_into_the_grace_period(path: Path) -> None:
    for owner, pod in render(read_values(path)).pods():
        if owner["metadata"]["labels"]["app.kubernetes.io/component"] in ("gateway", "scheduler", "worker"):
            container = pod["spec"]["containers"][0]
            drain = next(float(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout-s="))
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            # After the drain a service closes open streams within five seconds.
            assert pause + drain + 5 < pod["spec"]["terminationGracePeriodSeconds"]


@every_scenario
def test_mounts_have_volumes(path: Path) -> None:
    for owner, pod in render(read_values(path)).pods():
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | claims
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        assert {m["name"] for c in containers for m in c.get("volumeMounts", [])} <= volumes


@every_scenario
def test_the_service_monitor_finds_every_pod(path: Path) -> None:
    objects = render(merged(read_values(path), {"metrics": {"serviceMonitor": {"enabled": True}}}))
    (monitor,) = objects.all("ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    scraped = [service for service in objects.all("Service") if selects(selector, service["metadata"]["labels"])]
    assert all("metrics" in {port["name"] for port in service["spec"]["ports"]} for service in scraped)
    for owner, pod in objects.pods():
        is_ours = owner["metadata"]["labels"]["app.kubernetes.io/component"] in ("gateway", "scheduler", "worker")
        found = [s for s in scraped if selects(s["spec"]["selector"], pod["metadata"]["labels"])]
        assert len(found) == is_ours  # once, otherwise sums count it twice


def test_network_policies_allow_required_ingress() -> None:
    objects = render(read_values(CHART / "ci" / "hardened-values.yaml"))
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"] for _, pod in objects.pods()
    }
    allowed = {part: {other for other in pods if may_enter(objects, pods[part], pods[other])} for part in pods}
    assert allowed == {
        "gateway": {"test"},  # and clients of the namespaces in the values
        "scheduler": {"gateway", "worker"},
        "worker": {"scheduler"},
        "redis": {"gateway", "scheduler"},
        "test": set(pods),  # no policy selects it, and it has no port
    }


def test_the_bundled_redis_is_maintained_pinned_and_closed_by_default() -> None:
    """Redis 7.4.2 had CVE-2025-49844 and CVE-2025-21605, no password and no policy, and ignored image.registry."""
    objects = render({"image": {"registry": "registry.example.com/quire/"}})
    (container,) = pod_of(objects.get("Deployment", "redis"))["containers"]
    image = r"registry\.example\.com/quire/valkey/valkey:8\.1\.(\d+)-alpine@sha256:[0-9a-f]{64}"
    found = re.fullmatch(image, container["image"])
    assert found is not None
    assert int(found[1]) >= 4  # the first release of 8.1 with both fixes
    assert container["args"][container["args"].index("--maxmemory-policy") + 1] == "volatile-lru"  # keeps pins
    (policy,) = objects.all("NetworkPolicy")  # although networkPolicy.enabled is false
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "redis"
    (rule,) = policy["spec"]["ingress"]
    peers = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]}
    assert peers == {"gateway", "scheduler"}


def test_gpu_pools_have_memory_and_shm_by_ranks_and_no_kv_size_of_cpus() -> None:
    """Four ranks got 8Gi of memory and a KV cache of 1G, the defaults of CPU pools."""
    objects = render({"workers": [{"name": "tp", "model": "demo", "gpuCount": 4}]})
    spec = pod_of(objects.get("StatefulSet", "worker-tp"))
    (container,) = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": 4},
        "limits": {"memory": "128Gi", "nvidia.com/gpu": 4},
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in spec["volumes"]
    assert "--gpu-memory-utilization=0.9" in container["args"]
    left_to_the_backend = ("kv-cache-memory", "block-size", "max-num-seqs", "max-num-batched-tokens")
    assert not [arg for arg in container["args"] if arg.startswith(tuple(f"--{name}=" for name in left_to_the_backend))]


def test_long_release_names_that_begin_alike_have_names_of_their_own() -> None:
    names = [f"{'inference-platform-of-team-a-for-testing'}-{suffix}" for suffix in ("blue", "green")]
    blue, green = ({m["metadata"]["name"] for m in render(name=name).manifests} for name in names)
    assert not blue & green
    assert all(len(name) <= 63 for name in blue | green)


def test_an_existing_claim_is_read_only_unless_a_download_fills_it() -> None:
    storage = {"storage": {"existingClaim": "c"}}
    for model, read_only in ((storage | {"path": "/models/m"}, True), (storage | {"source": SOURCE}, None)):
        objects = render({"models": [{"name": "demo"} | model]})
        (volume,) = (v for v in pod_of(objects.get("StatefulSet", "worker-cpu"))["volumes"] if v["name"] == "models")
        assert volume["persistentVolumeClaim"].get("readOnly") is read_only


def test_egress_policies_match_ingress_policies() -> None:
    objects = render(merged(read_values(CHART / "ci" / "hardened-values.yaml"), NEEDED["EGRESS"]))
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"] for _, pod in objects.pods()
    }
    parts = pods.keys() - {"test"}
    let_in = {(source, part) for part in parts for source in parts if may_enter(objects, pods[part], pods[source])}
    assert {(part, to) for part in parts for to in parts if may_leave(objects, pods[part], pods[to])} == let_in
    for part in ("gateway", "scheduler", "worker"):
        rules = objects.get("NetworkPolicy", part)["spec"]["egress"]
        dns_ports = [(port["port"], port["protocol"]) for port in rules[0]["ports"]]
        assert dns_ports == [
            (53, "UDP"),
            (53, "TCP"),
            (5353, "UDP"),
            (5353, "TCP"),
        ]  # DNS pods of OpenShift listen on 5353


def may_leave(objects: Objects, source: dict[str, str], to: dict[str, str]) -> bool:
    """Whether ingress policies allow a pod of this release to connect to the port of the other one."""
    (policy,) = [p for p in objects.all("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], source)]
    served = {"gateway": 50051, "scheduler": 50052, "worker": 50061, "redis": 6379}[to["app.kubernetes.io/component"]]
    peers = [
        peer["podSelector"]["matchLabels"]
        for rule in policy["spec"]["egress"]
        for peer in rule.get("to", [])
        if {"port": served} in rule["ports"]
    ]
    return any(selects(labels, to) for labels in peers)


def test_external_routes_exclude_admin_calls() -> None:
    objects = render(merged(NEEDED["INGRESS"], NEEDED["ROUTE"]))
    (rule,) = objects.get("GRPCRoute", "gateway")["spec"]["rules"]
    routed = {match["method"]["service"] for match in rule["matches"]}
    paths = objects.get("Ingress", "gateway")["spec"]["rules"][0]["http"]["paths"]
    assert {path["path"].removeprefix("/") for path in paths} == routed
    assert routed == {
        "quire.v1.InferenceService",
        "quire.v1.SessionService",
        *ENGINES,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
        "grpc.reflection.v1.ServerReflection",
    }
    assert {name for name in SERVICE_NAMES if name not in routed} == {
        "quire.v1.AdminService",
        "quire.v1.RolloutService",
    }


def may_enter(objects: Objects, to: dict[str, str], source: dict[str, str]) -> bool:
    """Whether egress policies allow a pod of this release to connect to the first port of the other one."""
    policies = [p for p in objects.all("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], to)]
    rules = [policy["spec"]["ingress"][0] for policy in policies]
    peers = [peer.get("podSelector", {}).get("matchLabels") for rule in rules for peer in rule.get("from", [])]
    return not policies or any(labels is not None and selects(labels, source) for labels in peers)


def test_every_value_has_a_type_and_a_description() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    properties = dict(walk_properties(schema, ""))
    assert len(properties) > 150
    assert [path for path, value in properties.items() if not value.get("description")] == []
    assert [path for path, value in properties.items() if not value.keys() & {"type", "$ref"}] == []


def walk_properties(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in schema.get("properties", {}).items():
        yield f"{path}.{name}", value
        yield from walk_properties(value, f"{path}.{name}")
    for name, value in schema.get("$defs", {}).items():
        yield from walk_properties(value, name)


def test_notes_show_how_to_connect() -> None:
    notes = render(read_values(CHART / "ci" / "multi-model-values.yaml")).notes
    assert "meta-llama/Llama-3.1-8B-Instruct, demo" in notes
    assert "port-forward service/r-quire-gateway 50051:50051" in notes
    assert "Set networkPolicy.enabled" in notes
    assert "networkPolicy" not in render({"networkPolicy": {"enabled": True}}).notes
    assert "--tls --target llm.example.com:443" in render(NEEDED["INGRESS"]).notes
    hardened = render(read_values(CHART / "ci" / "hardened-values.yaml")).notes
    assert r"get secret quire-test-client --output 'jsonpath={.data.ca\.crt}'" in hardened
    assert "export QUIRE_TLS=1 QUIRE_TLS_SERVER_NAME=r-quire-gateway.team.svc.cluster.local" in hardened
    assert "export QUIRE_TLS_CERT=FILE" in hardened


def test_the_chart_can_be_packaged(tmp_path: Path) -> None:
    archive = helm.package(CHART, destination=tmp_path)
    with helm.Chart.load(archive) as packed:
        names = {file["name"] for file in packed.files}
        assert packed.render(name="r", namespace="n")
    assert "README.md" in names


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/k8s/generate.py", "--check"], cwd=CHART.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + "run python deploy/k8s/generate.py"


def test_a_new_chart_version_with_the_same_images_restarts_no_pod(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    about = tmp_path / "chart" / "Chart.yaml"
    about.write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.9.9", about.read_text()))
    values = {"image": {"tag": "0.1.0"}}
    with helm.Chart.load(tmp_path / "chart") as newer:
        after = render(values, chart=newer)
    assert after.get("Deployment", "gateway")["metadata"]["labels"]["helm.sh/chart"] == "quire-9.9.9"
    before = [pod for owner, pod in render(values).pods() if owner["kind"] != "Pod"]
    assert [pod for owner, pod in after.pods() if owner["kind"] != "Pod"] == before


def test_two_releases_share_a_namespace() -> None:
    names = [{(m["kind"], m["metadata"]["name"]) for m in render(name=name).manifests} for name in ("a", "b")]
    assert not names[0] & names[1]
