"""Tokens and certificates of the chart: each service gets only what it needs, and an upgrade keeps the tokens."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from svc_common.security.trust import ROLES, Tokens
from tests.chart.chart import ROOT, Objects, Values, dig, render, render_upgrade
from tests.chart.test_values import NEEDED, merged

LIMITS = "[default]\nmax_streams = 5\n"

CALLERS: dict[str, set[str]] = {"gateway": set(), "scheduler": {"gateway", "worker"}, "worker": {"scheduler"}}


def token_files(objects: Objects) -> dict[str, str]:
    """The token file of each role."""
    data = {role: objects.get("Secret", f"tokens-{role}")["data"] for role in ROLES}
    assert {role: list(entries) for role, entries in data.items()} == {role: ["tokens"] for role in ROLES}
    return {role: base64.b64decode(entries["tokens"]).decode() for role, entries in data.items()}


def check(files: dict[str, str], folder: Path) -> None:
    """Each service has its own token in clear, and accepts exactly the tokens of its callers."""
    read = {}
    for role, text in files.items():
        (folder / role).write_text(text)
        read[role] = Tokens(folder / role)
    tokens = {role: read[role].own(role) for role in ROLES}
    assert len(set(tokens.values())) == len(ROLES)
    for role in ROLES:
        assert len(tokens[role]) >= 32
        accepted = {other for other in ROLES if read[role].role_of(tokens[other]) == other}
        assert accepted == CALLERS[role] | {role}
        assert [other for other in ROLES if tokens[other] in files[role]] == [role], "a token of another role"


def test_each_service_gets_its_token_and_the_digests_of_its_callers(tmp_path: Path) -> None:
    check(token_files(render()), tmp_path)


def test_an_upgrade_keeps_the_tokens() -> None:
    installed = render()
    assert token_files(render()) != token_files(installed), "without a cluster new ones are generated"
    assert token_files(render_upgrade({}, installed)) == token_files(installed)


def password(objects: Objects) -> str:
    return base64.b64decode(objects.get("Secret", "redis")["data"]["password"]).decode()


def test_the_bundled_redis_has_a_password_that_an_upgrade_keeps() -> None:
    installed = render()
    assert len(password(installed)) >= 32
    assert password(render()) != password(installed)
    assert password(render_upgrade({}, installed)) == password(installed)


def test_an_upgrade_generates_only_a_missing_token(tmp_path: Path) -> None:
    installed = render()
    left = Objects(tuple(m for m in installed.manifests if not m["metadata"]["name"].endswith("tokens-worker")), "")
    before, after = token_files(installed), token_files(render_upgrade({}, left))
    check(after, tmp_path)
    assert after["gateway"] == before["gateway"]
    assert after["scheduler"].splitlines()[:2] == before["scheduler"].splitlines()[:2]
    assert after["worker"].splitlines()[0] != before["worker"].splitlines()[0]


def test_the_commands_of_the_guide_create_the_same_files(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "trust.md").read_text().partition("## On Kubernetes")[2]
    (script,) = (text for text in re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL) if "umask" in text)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "kubectl").write_text('#!/bin/sh\necho "$@"\n')
    (commands / "kubectl").chmod(0o755)
    path = {"PATH": f"{commands}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:4] == ["create", "secret", "generic", "quire-tokens"]
    assert words[4:] == [f"--from-file={role}" for role in ROLES]
    check({role: (tmp_path / "tokens" / role).read_text() for role in ROLES}, tmp_path)


@pytest.mark.parametrize(
    "values", [{}, {"trust": {"existingSecret": "s"}}, NEEDED["TRUST_TLS"]], ids=["generated", "own", "tls"]
)
def test_changed_files_reach_the_services_and_only_them(values: Values) -> None:
    """The kubelet updates mounted folders, but no file mounted by subPath. A download gets no token."""
    owners = merged(
        values,
        NEEDED["EMPTY"] | merged(NEEDED["ADMIN"], merged(NEEDED["KEYS"], {"gateway": {"keyLimits": {"toml": LIMITS}}})),
    )
    for owner, pod in render(owners).pods():
        spec = pod["spec"]
        mounts = [mount for container in spec["containers"] for mount in container.get("volumeMounts", [])]
        assert [mount for mount in mounts if "subPath" in mount] == []
        assert all(mount["readOnly"] for mount in mounts if mount["mountPath"].startswith("/etc/quire/"))
        trusted = [container["name"] for container in spec["containers"] if has_trust(container)]
        assert trusted == [name for name in ROLES if name == spec["containers"][0]["name"]], owner["metadata"]["name"]
        assert not any(map(has_trust, spec.get("initContainers", [])))


def has_trust(container: dict[str, Any]) -> bool:
    return any(mount["name"] == "trust" for mount in container.get("volumeMounts", []))


def test_a_certificate_serves_and_calls_with_the_name_of_its_role() -> None:
    for manifest, role in zip(render(NEEDED["ISSUER"]).all("Certificate"), ROLES, strict=True):
        assert manifest["spec"]["dnsNames"] == [f"quire-{role}"]
        assert {"server auth", "client auth"} <= set(manifest["spec"]["usages"])


def test_the_admin_port_is_never_published() -> None:
    public = {"service": {"type": "LoadBalancer"}, "ingress": {"enabled": True, "hosts": ["a.b"]}}
    objects = render(merged(NEEDED["ADMIN"], {"gateway": public}))
    assert dig(objects.get("Service", "gateway-admin"), "spec.type") == "ClusterIP"
    assert [port["name"] for port in objects.get("Service", "gateway")["spec"]["ports"]] == ["grpc"]
    for ingress in objects.all("Ingress"):
        assert "admin" not in str(ingress["spec"])


def test_notes_say_how_the_services_authenticate_each_other() -> None:
    assert "set trust.existingSecret there" in render().notes
    assert "trust.existingSecret" not in render({"trust": {"existingSecret": "s"}}).notes
    assert "trust.mode to tokens or tls" in render({"trust": {"mode": "none"}}).notes
    assert "port-forward service/r-quire-gateway-admin 50055:50055" in render(NEEDED["ADMIN"]).notes
