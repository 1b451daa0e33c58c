"""Pools whose workers span several nodes: a LeaderWorkerSet whose pods get flags that quire-worker accepts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from svc_common.config import parse
from tests.chart.chart import Manifest, Objects, Values, render, templates_of, validate
from tests.chart.test_values import NEEDED, merged
from worker_svc.flags import check_node_flags, engine_config, make_parser

# Variables that LeaderWorkerSet's webhook adds to containers, and arguments that the kubelet adds.
OF_POD = {"POD_NAME": "r-quire-worker-big-0", "POD_IP": "10.0.0.8"}
OF_GROUP = {"LWS_LEADER_ADDRESS": "r-quire-worker-big-0.r-quire-worker-big-0.team", "LWS_WORKER_INDEX": "1"}


def values(**pool: Any) -> Values:
    return {"workers": [{"name": "big", "model": "demo", "gpuCount": 8, "nodesPerWorker": 2, **pool}]}


@functools.cache
def objects() -> Objects:
    return render(merged(values(replicas=3), NEEDED["EGRESS"]))


def large() -> Manifest:
    return objects().get("LeaderWorkerSet", "worker-big")


def flags(template: Manifest) -> Any:
    """The arguments as quire-worker gets them."""
    (container,) = template["spec"]["containers"]
    arguments = container["args"]
    for name, value in (OF_POD | OF_GROUP).items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    assert not [argument for argument in arguments if "$(" in argument]
    args = parse(make_parser(), arguments)
    check_node_flags(args)
    return args


def test_kubernetes_accepts_the_objects() -> None:
    for manifest in objects().manifests:
        validate(manifest, "1.34")
    assert not objects().has("StatefulSet")


def test_a_replica_is_a_group_that_is_recreated_as_a_whole() -> None:
    spec = large()["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_both_kinds_of_pods_run_ranks_of_one_worker() -> None:
    leader, follower = map(flags, templates_of(large()))
    assert (leader.node_rank, leader.node_listen, leader.leader_address) == (0, "0.0.0.0:50062", None)
    assert (follower.node_rank, follower.leader_address) == (1, f"{OF_GROUP['LWS_LEADER_ADDRESS']}:50062")
    assert (follower.node_listen, follower.scheduler) == (None, [])
    assert leader.scheduler
    settings = [engine_config(args) for args in (leader, follower)]
    assert [(s.tensor_parallel_size, s.nnodes, s.ranks_per_node) for s in settings] == [(16, 2, 8)] * 2
    assert [args.token_file for args in (leader, follower)] == [leader.token_file] * 2


def test_only_the_leader_has_ports_and_probes() -> None:
    leader, follower = (template["spec"]["containers"][0] for template in templates_of(large()))
    assert [port["name"] for port in leader["ports"]] == ["grpc", "health", "metrics", "nodes"]
    probes = ("startupProbe", "livenessProbe", "readinessProbe", "ports")
    assert all(name in leader and name not in follower for name in probes)
    assert leader["resources"] == follower["resources"]
    selector = objects().get("Service", "worker-big")["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert selector["quire/pool"] == "big"


def test_the_service_of_other_pools_selects_all_pods() -> None:
    assert "leaderworkerset" not in str(render().get("Service", "worker-cpu"))


def test_nodes_of_a_pool_may_connect_to_each_other_and_no_others_to_them() -> None:
    policy = objects().get("NetworkPolicy", "worker-big-nodes")["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert labels["quire/pool"] == "big"
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    peers = [{"podSelector": {"matchLabels": labels}}]
    assert (policy["ingress"], policy["egress"]) == ([{"from": peers}], [{"to": peers}])
    assert not [p for p in render(NEEDED["EGRESS"]).all("NetworkPolicy") if p["metadata"]["name"].endswith("-nodes")]


def test_keda_scales_groups_and_a_budget_covers_all_pods() -> None:
    scaled = render(merged(values(), NEEDED["SCALED"]))
    target = scaled.get("ScaledObject", "worker-big")["spec"]["scaleTargetRef"]
    name = scaled.get("LeaderWorkerSet", "worker-big")["metadata"]["name"]
    assert target == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": name}
    assert "replicas" not in scaled.get("LeaderWorkerSet", "worker-big")["spec"]
    budget = objects().get("PodDisruptionBudget", "worker-big")["spec"]["selector"]["matchLabels"]
    for template in templates_of(large()):
        assert budget.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["updateStrategy", "annotations"])
def test_users_set_the_rollout_and_the_topology(name: str) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 1}}
    given = {
        "updateStrategy": strategy,
        "annotations": {"leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.kubernetes.io/zone"},
    }
    manifest = render(values(**{name: given[name]})).get("LeaderWorkerSet", "worker-big")
    validate(manifest, "1.34")
    found = manifest["spec"].get("rolloutStrategy") if name == "updateStrategy" else manifest["metadata"][name]
    assert found == given[name]
