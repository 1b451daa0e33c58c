"""`quire profile` and `quire debug bundle` with real services, and secrets that must not be in a bundle."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_cli import main
from quire_cli.commands.setup import digest_line
from quire_client import Client, QuireError
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.stack import Stack

USER, OPERATOR = "sentinel-user-key-01", "sentinel-operator-key-02"
PASSWORD = "sentinel-password-03"
TOKENS = {role: f"sentinel-token-of-{role}-04" for role in ("gateway", "scheduler", "worker")}
PROMPT = "sentinel prompt words 05"
SIM = ("--executor", "sim", "--sim-step-ms", "2", "--model-name", "demo", "--log-level", "debug")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of services with every kind of secret."""
    folder = tmp_path_factory.mktemp("secrets")
    for name, line in (("users", USER), ("operators", digest_line(OPERATOR))):
        (folder / name).mkdir()
        (folder / name / "one").write_text(line)
    (folder / "tokens").write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    admin = f"127.0.0.1:{free_port()}"
    redis = f"--redis=redis://:{PASSWORD}@127.0.0.1:1/0"  # nothing listens there, so its errors are in the logs
    with Stack(folder) as stack:
        token = f"--token-file={folder / 'tokens'}"
        scheduler = stack.start_scheduler(token, redis, "--log-level", "debug")
        worker = stack.start_worker(scheduler, demo_model_dir(), *SIM, token)
        keys = (f"--api-keys={folder / 'users'}", f"--admin-keys={folder / 'operators'}", f"--admin-listen={admin}")
        gateway = stack.start_gateway(scheduler, flags=(*keys, token, redis, "--log-level=debug"))
        worker.wait_ready()
        gateway.wait_ready()
        with Client.connect(gateway.address, api_key=USER) as client:
            client.generate(PROMPT, max_tokens=4)
        yield {"gateway": gateway.address, "admin": admin, "scheduler": scheduler.address, "worker": worker.name}


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_a_profile_of_each_service(stack: dict[str, str], service: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json.gz"
    words = ["profile", service, "--seconds", "0.5", "-o", str(path), "--target", stack["admin"], "--api-key", OPERATOR]
    assert main(words) == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    (process,) = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert process.startswith(f"quire-{service} ")
    slices = [event for event in events if event["ph"] == "X"]
    assert slices
    assert all(event["ts"] >= 0 and event["dur"] > 0 and event["args"]["file"] for event in slices)
    assert max(event["ts"] + event["dur"] for event in slices) > 300_000, "about half a second"


def test_memory_of_each_service(stack: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--memory", "--json", "--target", stack["admin"], "--api-key", OPERATOR]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"gateway", stack["scheduler"], stack["worker"]}
    assert all(memory["other"] and memory["libraries"] for memory in found.values())
    assert main(["status", "--memory", "--target", stack["admin"], "--api-key", OPERATOR]) == 0
    assert f"{stack['worker']} " in capsys.readouterr().out


def test_services_are_named_by_address_and_id(stack: dict[str, str]) -> None:
    with Client.connect(stack["admin"], api_key=OPERATOR, retry=None) as client:
        assert client.report(stack["scheduler"])["service"] == "scheduler"
        assert client.report(stack["worker"])["instance"] == stack["worker"]
        with pytest.raises(QuireError, match="no service 'none', or it is not the only one; services: gateway"):
            client.report("none")
        with pytest.raises(QuireError, match="seconds is 61; must be from"):
            client.profile("worker", seconds=61.0)
        with pytest.raises(QuireError, match="hz is 1001; must be at most 1000"):
            client.profile("worker", hz=1001)


def test_a_key_for_inference_cannot_inspect(stack: dict[str, str]) -> None:
    for address, code in ((stack["gateway"], "PERMISSION_DENIED"), (stack["admin"], "UNAUTHENTICATED")):
        with Client.connect(address, api_key=USER, retry=None) as client, pytest.raises(QuireError) as refused:
            client.report()
        assert refused.value.code.name == code


def test_a_bundle_has_everything_but_secrets(stack: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    assert main(["debug", "bundle", "-o", str(path), "--target", stack["admin"], "--api-key", OPERATOR]) == 0
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        files: dict[str, str] = {}
        for member in archive.getmembers():
            content: Any = archive.extractfile(member)
            files[member.name.partition("/")[2]] = content.read().decode()
    folders = ("gateway", f"scheduler-{stack['scheduler'].replace(':', '-')}", f"worker-{stack['worker']}")
    parts = {
        f"{folder}/{name}"
        for folder in folders
        for name in ("versions.json", "settings.toml", "metrics.txt", "log.txt")
    }
    assert set(files) == parts | {"README.txt", "status.json", "client.json"}
    assert all(files[name] for name in parts)
    assert 'redis = "redis://***@' in files["gateway/settings.toml"]
    assert "quire_build_info" in files[f"{folders[1]}/metrics.txt"]
    assert "ended" in files["gateway/log.txt"]
    assert json.loads(files["status.json"])["schedulers"][0]["workers"][0]["worker_id"] == stack["worker"]
    everything = "\n".join(files.values())
    for secret in (USER, OPERATOR, PASSWORD, *TOKENS.values(), PROMPT):
        assert secret not in everything, secret
