"""The base without Helm fits into any namespace: what it names is found by a pod's own search list."""

from __future__ import annotations

import re
from typing import Any

import yaml

from deploy.k8s.generate import BASE
from tests.chart.chart import NAMESPACE

ADDRESS = re.compile(r"(?:--scheduler=|redis://)([^:/]+):")


def read_base() -> list[dict[str, Any]]:
    """The base's objects as an overlay with `namespace:` makes them."""
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(BASE.glob("*.yaml"))]
    objects = [manifest for manifest in manifests if manifest["kind"] != "Kustomization"]
    return [manifest | {"metadata": manifest["metadata"] | {"namespace": NAMESPACE}} for manifest in objects]


def names_of(objects: list[dict[str, Any]]) -> set[str]:
    """What cluster DNS has for them in their namespace."""
    names = {manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "Service"}
    for manifest in objects:
        if manifest["kind"] == "StatefulSet":
            pods = [f"{manifest['metadata']['name']}-{i}" for i in range(manifest["spec"]["replicas"])]
            names |= {f"{pod}.{manifest['spec']['serviceName']}" for pod in pods}
    return names


def test_every_address_is_found_from_any_namespace() -> None:
    objects = read_base()
    text = yaml.safe_dump_all(objects)
    addresses = ADDRESS.findall(text)
    assert set(addresses) == {"quire-scheduler-demo-0.quire-scheduler-demo", "quire-redis"}
    assert set(addresses) <= names_of(objects)
    assert "default.svc" not in text
    assert "cluster.local" not in text


def test_no_file_names_a_namespace() -> None:
    assert [path.name for path in BASE.glob("*.yaml") if "namespace:" in path.read_text()] == []
