"""The rendered kustomize base works in any namespace: pods resolve its names with their DNS search list."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s.generate import make_base
from svc_common.security.trust import ROLES
from tests.chart.chart import NAMESPACE, ROOT, validate

ADDRESS = re.compile(r"(?:--scheduler=dns:///|redis://)([a-z0-9.-]+):\d+")


@functools.cache
def base() -> dict[str, str]:
    return make_base()


def manifests() -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in base().values()]


def read_base() -> list[dict[str, Any]]:
    """The objects of the base with an overlay's `namespace:`."""
    objects = [manifest for manifest in manifests() if manifest["kind"] != "Kustomization"]
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


def test_the_command_writes_a_base_that_kubernetes_accepts(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "deploy/k8s/generate.py", "--base", tmp_path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == base()
    (kustomization,) = [manifest for manifest in manifests() if manifest["kind"] == "Kustomization"]
    assert sorted([*kustomization["resources"], "kustomization.yaml"]) == sorted(base())
    for name in kustomization["resources"]:
        validate(yaml.safe_load(base()[name]), "1.34")


def test_no_file_contains_a_namespace() -> None:
    assert [name for name, text in base().items() if "namespace:" in text] == []


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
