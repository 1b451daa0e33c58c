"""The kustomize base works in any namespace: pods resolve its names with their DNS search list."""

from __future__ import annotations

import re
from typing import Any

import yaml

from deploy.k8s.generate import BASE
from svc_common.security.trust import ROLES
from tests.chart.chart import NAMESPACE

ADDRESS = re.compile(r"(?:--scheduler=dns:///|redis://)([a-z0-9.-]+):\d+")


def read_base() -> list[dict[str, Any]]:
    """The objects of the base with an overlay's `namespace:`."""
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(BASE.glob("*.yaml"))]
    objects = [manifest for manifest in manifests if manifest["kind"] != "Kustomization"]
    return [manifest | {"metadata": manifest["metadata"] | {"namespace": NAMESPACE}} for manifest in objects]


def names_of(objects: list[dict[str, Any]]) -> set[str]:
    """The DNS names of these objects in their namespace."""
    return {manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "Service"}


def test_addresses_resolve_in_any_namespace() -> None:
    objects = read_base()
    text = yaml.safe_dump_all(objects)
    addresses = ADDRESS.findall(text)
    assert set(addresses) == {"quire-scheduler-demo", "quire-redis"}
    assert set(addresses) <= names_of(objects)
    assert "default.svc" not in text
    assert "cluster.local" not in text


def test_no_file_contains_a_namespace() -> None:
    assert [path.name for path in BASE.glob("*.yaml") if "namespace:" in path.read_text()] == []


def test_the_base_needs_only_the_secrets_of_the_guides() -> None:
    """docs/trust.md creates quire-tokens with an entry per role; each pod mounts only its own entry. docs/deployment.md
    creates quire-redis.
    """
    mounted = {}
    for manifest in read_base():
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            spec = manifest["spec"]["template"]["spec"]
            mounted[spec["containers"][0]["name"]] = [v["secret"] for v in spec.get("volumes", []) if "secret" in v]
    tokens = {role: [secret_of(role)] for role in ROLES}
    for role in ("gateway", "scheduler"):
        tokens[role].insert(0, {"secretName": "quire-redis"})
    assert mounted == tokens | {"redis": []}
    assert "insecure" not in yaml.safe_dump_all(read_base())


def secret_of(role: str) -> dict[str, Any]:
    return {"secretName": "quire-tokens", "items": [{"key": role, "path": "tokens"}]}
