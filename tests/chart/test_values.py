"""Every value has the effect that its comment describes: a case per value in values.txt, and no value without one."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import gateway_svc.flags
import scheduler_svc.flags
import worker_svc.flags
from deploy.k8s import generate
from svc_common.config import parse, settings_of
from tests.chart.chart import CHART, Manifest, Values, dig, render

GATEWAY, SCHEDULER, WORKER, REDIS = (
    "Deployment gateway",
    "Deployment scheduler-demo",
    "StatefulSet worker-cpu",
    "Deployment redis",
)


def merged(first: Values, second: Values) -> Values:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(second[key], dict)
    }
    return first | second | both


@dataclass(frozen=True, slots=True)
class Case:
    """With `value` set, `path` of the object is `expected`. A path may begin with a shortcut (see `look`)."""

    name: str
    value: Any
    where: str
    path: str
    expected: Any
    others: Values = field(default_factory=dict)


def read_table() -> dict[str, list[list[str]]]:
    """The fields of each line of values.txt, by section."""
    sections, lines = defaultdict[str, list[list[str]]](list), (Path(__file__).parent / "values.txt").read_text()
    for line in lines.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            first, *rest = line.split(" | ")
            sections[section].append([*first.split(" = ", 1), *rest])
    return sections


TABLE = read_table()
NEEDED: dict[str, Values] = {name: json.loads(values) for name, values in TABLE["needed"]}


def case_of(name: str, value: str, where: str, path: str, expected: str, needed: str = "{}") -> Case:
    others = NEEDED[needed] if needed in NEEDED else json.loads(needed)
    return Case(name, json.loads(value), where, path, json.loads(expected), others)


OF_TEST = ("nodeSelector", "tolerations", "affinity", "schedulerName", "serviceAccountName", "podSecurityContext")
OF_TEST += ("containerSecurityContext", "labels", "podSpec", "priorityClassName")
NOT_OF_REDIS = ("resourceClaims", "lifecycle", "tmpSize", "extraEnv", "topologySpreadConstraints")


def placed() -> list[Case]:
    """The common values of each component."""
    found = []
    for section, where in (("gateway", GATEWAY), ("scheduler", SCHEDULER), ("workerDefaults", WORKER)):
        found += [case_of(f"{section}.{name}", value, where, *rest) for name, value, *rest in TABLE["placement"]]
    for name, value, path, expected in TABLE["placement"]:
        if name not in NOT_OF_REDIS:
            found.append(case_of(f"redis.{name}", value, REDIS, path, expected))
        if name in OF_TEST:
            path = path.replace("pod.", "spec.").replace("container.", "spec.containers.0.")
            found.append(case_of(f"test.{name}", value, "Pod test", path, expected))
    return found


# Defaults and list entries accept the same values.
NOT_BY_DEFAULT = ("workerDefaults.name", "workerDefaults.model")
CASES = [*(case_of(*fields) for fields in TABLE["cases"]), *placed()]
AS_ENTRY = [case for case in CASES if case.name.startswith("workerDefaults.") and case.name not in NOT_BY_DEFAULT]


def nested(path: str, value: Any) -> Values:
    """{"a": {"b": value}} of a.b."""
    return reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


def values_of(case: Case) -> Values:
    if case.name in NOT_BY_DEFAULT:
        return {"workers": [{"name": "cpu", "model": "demo"} | nested(case.name.partition(".")[2], case.value)]}
    return merged(case.others, nested(case.name, case.value))


def look(values: Values, where: str, path: str) -> Any:
    """The element at `path` of an object; None if it does not exist."""
    kind, _, name = where.partition(" ")
    objects = render(values)
    candidates = {name.removeprefix("="), f"r-quire-{name}"}
    manifest = next((m for m in objects.all(kind) if m["metadata"]["name"] in candidates), None)
    if manifest is None or not path:
        return manifest
    try:
        return _look_into(manifest, path)
    except (KeyError, IndexError):
        return None


def _look_into(manifest: Manifest, path: str) -> Any:
    word, _, name = path.partition(" ")
    if word == "arg":
        return next((a.partition("=")[2] for a in _args(manifest) if a.partition("=")[0] == name), None)
    if word == "count":
        return sum(a.partition("=")[0] == name for a in _args(manifest))
    if word in LISTS:
        items = dig(manifest, LISTS[word])
        item = next((item for item in items if item["name"] == name), {})
        rest = {key: value for key, value in item.items() if key != "name"}
        return (rest.get("value") or rest.get("valueFrom")) if word == "env" else rest
    return dig(manifest, path.replace("container.", f"{CONTAINER}.", 1).replace("pod.", "spec.template.spec.", 1))


CONTAINER = "spec.template.spec.containers.0"
LISTS = {"env": f"{CONTAINER}.env", "mount": f"{CONTAINER}.volumeMounts", "volume": "spec.template.spec.volumes"}


def _args(manifest: Manifest) -> list[str]:
    return list(dig(manifest, f"{CONTAINER}.args"))


def case_id(case: Case) -> str:
    return f"{case.name}={case.value!s:.24}-{case.path.rpartition('.')[2]}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_value(case: Case) -> None:
    assert look(values_of(case), case.where, case.path) == case.expected


@pytest.mark.parametrize("case", AS_ENTRY, ids=case_id)
def test_entries_of_workers_override_the_defaults(case: Case) -> None:
    own = nested(case.name.removeprefix("workerDefaults."), case.value)
    values = case.others | {
        "workers": [{"name": "cpu", "model": "demo"} | merged(case.others.get("workerDefaults", {}), own)]
    }
    assert look(values, case.where, case.path) == case.expected


def test_every_value_has_a_case() -> None:
    names = {value.name for value in CASES}
    missing = [v.path for v in all_values() if v.path not in names]
    assert missing == []


def test_every_value_has_a_comment() -> None:
    assert [value.path for value in all_values() if not value.comment] == []


def all_values() -> list[generate.Value]:
    return list(generate.leaves(generate.read_values((CHART / "values.yaml").read_text())))


def test_two_pools_of_one_model_differ() -> None:
    pools = [
        {"name": "a", "model": "demo", "replicas": 2, "nodeSelector": {"gpu": "a"}},
        {"name": "b", "model": "demo", "maxNumSeqs": 8},
    ]
    values = {"workers": pools}
    assert look(values, "StatefulSet worker-a", "pod.nodeSelector") == {"gpu": "a"}
    assert look(values, "StatefulSet worker-b", "pod.nodeSelector") is None
    assert look(values, "StatefulSet worker-b", "arg --max-num-seqs") == "8"
    assert look(values, SCHEDULER, "spec.replicas") == 1


def test_null_in_an_entry_removes_a_key_of_the_defaults() -> None:
    placed = {
        "nodeSelector": {"accelerator": "a100", "zone": "z"},
        "podLabels": {"l": "m"},
        "affinity": {"nodeAffinity": {}},
    }
    entry = {
        "nodeSelector": {"accelerator": None, "disk": "ssd"},
        "podLabels": {"l": None},
        "affinity": {"nodeAffinity": None, "podAffinity": {"x": None}},
        "resources": {"requests": {"cpu": None}},
    }
    own = [{"name": "cpu", "model": "demo"} | entry]
    pools, models = {"workers": own, "workerDefaults": placed}, {"models": [{"name": "demo", "scheduler": entry}]}
    for values, where, memory in ((pools, WORKER, "4Gi"), (models | {"scheduler": placed}, SCHEDULER, "512Mi")):
        assert look(values, where, "pod.nodeSelector") == {"disk": "ssd", "zone": "z"}
        assert look(values, where, "spec.template.metadata.labels.l") is None
        assert look(values, where, "pod.affinity") == {"podAffinity": {}}
        assert look(values, where, "container.resources.requests") == {"memory": memory}


def test_a_download_has_the_volumes_of_its_worker() -> None:
    mount = {"name": "ca", "mountPath": "/etc/ssl/corporate"}
    values = merged(NEEDED["EMPTY"], {"workerDefaults": {"extraVolumeMounts": [mount]}})
    assert mount in look(values, WORKER, "pod.initContainers.0.volumeMounts")


def test_a_model_may_override_some_scheduler_values() -> None:
    values = {
        "models": [{"name": "demo", "scheduler": {"resources": {"requests": {"cpu": "4"}}}}],
        "scheduler": {"replicas": 3},
    }
    assert look(values, SCHEDULER, "container.resources.requests") == {"cpu": "4", "memory": "512Mi"}
    assert look(values, SCHEDULER, "spec.replicas") == 3


EVERYTHING: Values = {
    "metrics": {"compat": "vllm"},
    "gateway": NEEDED["JWT"]["gateway"]
    | NEEDED["ADMIN"]["gateway"]
    | {
        "tls": {"existingSecret": "cert", "clientCaSecret": "ca"},
        "keyLimits": {"toml": "[default]\nmax_streams = 5\n"},
    },
    "scheduler": {"blockKey": {"existingSecret": "b"}},
    "test": {"tlsSecret": "t"},
    "workerDefaults": {"numBlocks": 8, "maxModelLen": 64, "quantize": "int8", "dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("family", "trust"), [("IPv4", {}), ("IPv6", NEEDED["TRUST_TLS"]), ("IPv4", {"trust": {"mode": "none"}})]
)
@pytest.mark.parametrize("part", ["gateway", "scheduler", "worker"])
def test_services_accept_every_flag_and_variable(part: str, family: str, trust: Values) -> None:
    make = {
        "gateway": gateway_svc.flags.make_parser,
        "scheduler": scheduler_svc.flags.make_parser,
        "worker": worker_svc.flags.make_parser,
    }[part]
    owners = [*render(EVERYTHING | {"ipFamily": family} | trust).pods()]
    (container,) = next(p["spec"]["containers"] for _, p in owners if p["spec"]["containers"][0]["name"] == part)
    names = {name for name, _ in settings_of(make())}
    for item in container["env"]:
        if item["name"].startswith("QUIRE_") and item["name"] != "QUIRE_CACHE_DIR":
            assert item["name"].removeprefix("QUIRE_").lower().replace("_", "-") in names
    args = [arg.replace("$(POD_IP)", "10.0.0.1" if family == "IPv4" else "fd00::1") for arg in container["args"]]
    assert parse(make(), args).drain_timeout_s > 0
