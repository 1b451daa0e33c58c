"""`quire up` and `quire serve` with models of the Hugging Face Hub, served locally: downloads, cache, errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quire_client.demo import demo_model_dir

from hub_models.find import HubModel, find_model
from tests.processes.hub_server import COMMIT, HubServer
from tests.processes.stack import ROOT, Stack, compile_kernels
from tests.processes.test_up import QUIRE, quire, quire_up

REPO = "acme/tiny"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    shutil.copytree(demo_model_dir(), folder)
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    return folder


def environment(cache: Path, hub: HubServer | None) -> dict[str, str]:
    url = hub.url if hub else "http://127.0.0.1:1"
    return {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "2"}


def test_up_downloads_a_model_once(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernels()
    cache = tmp_path / "cache"
    flags = ("--threads", "1", "--kv-cache-memory", "64M")
    with HubServer(REPO, repository) as hub:
        for name, value in environment(cache, hub).items():
            monkeypatch.setenv(name, value)
        with quire_up(tmp_path, "--model", REPO, *flags) as (process, ready):
            assert ready["model"] == REPO
            assert "pathname" in quire(ready["target"], "chat", "What does os.path.join do?", "--model", REPO)
            models = json.loads(quire(ready["target"], "models", "--json"))["models"]
            assert [model["name"] for model in models] == [REPO]
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert sorted(set(hub.downloaded)) == sorted(
        {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    )
    assert f"downloading {REPO} into {cache}" in (tmp_path / "up.txt").read_text()
    assert "importing torch" in (tmp_path / "up.txt").read_text()
    for name, value in environment(cache, None).items():  # without the Hub: the cache has the model
        monkeypatch.setenv(name, value)
    said: list[str] = []
    snapshot = cache / "models--acme--tiny" / "snapshots" / COMMIT
    for model in (HubModel(REPO), HubModel(REPO, COMMIT)):
        assert find_model(model, say=said.append, check_config=pytest.fail) == snapshot
    assert said[0] == f"{REPO} is in the local cache: {snapshot}"


def test_fetch_downloads_a_pinned_model_once(tmp_path: Path, repository: Path) -> None:
    """The init container of the chart. The second pod with this storage needs no Hub."""
    to = tmp_path / "models"

    def fetch(name: str, hub: HubServer | None) -> subprocess.CompletedProcess[str]:
        command = [*QUIRE, "fetch", name, "--to", str(to)]
        variables = os.environ | environment(tmp_path / "unused", hub)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=variables)

    folder = str(to / "models--acme--tiny" / "snapshots" / COMMIT)
    with HubServer(REPO, repository) as hub:
        assert "is not pinned: write ORG/NAME@COMMIT" in fetch(f"{REPO}@main", hub).stderr
        done = fetch(f"{REPO}@{COMMIT}", hub)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, folder), done.stderr
    again = fetch(f"{REPO}@{COMMIT}", None)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, folder), again.stderr
    (to / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    broken = fetch(f"{REPO}@{COMMIT}", None)
    assert broken.returncode == 1
    assert "has no model.safetensors" in broken.stderr


def worker_error(model: str, cache: Path, hub: HubServer | None = None) -> str:
    """The log of `quire-worker --model MODEL` that cannot start."""
    variables = os.environ | environment(cache, hub)
    command = [sys.executable, "-m", "worker_svc.service", "--model", model, "--scheduler", "127.0.0.1:1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


async def test_a_worker_downloads_its_model(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    with HubServer(REPO, repository) as hub, Stack(tmp_path) as stack:
        for name, value in environment(cache, hub).items():
            monkeypatch.setenv(name, value)
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, f"{REPO}@main", "--kv-cache-memory", "64M")
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            assert [model.name for model in await client.models()] == [REPO]
            assert (await client.generate("import", max_tokens=2)).text
    assert "model.safetensors" in hub.downloaded


def test_a_worker_without_its_model_names_what_is_missing(tmp_path: Path, repository: Path) -> None:
    cache = tmp_path / "cache"
    said = worker_error(REPO, cache)
    assert f"--model {REPO}: there is no such folder, and {REPO} is not in the local cache {cache}" in said
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with HubServer(REPO, repository) as hub:
        said = worker_error(REPO, cache, hub)
    assert "its weights were not downloaded: architectures: MambaForCausalLM is not supported" in said
    assert "model.safetensors" not in hub.downloaded


def serve(model: str, cache: Path, hub: HubServer | None = None) -> str:
    """The error of `quire serve MODEL`."""
    variables = os.environ | environment(cache, hub)
    command = [*QUIRE, "serve", model, "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_an_unsupported_architecture_is_refused_before_the_weights_are_downloaded(
    tmp_path: Path, repository: Path
) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with HubServer(REPO, repository) as hub:
        said = serve(REPO, tmp_path / "cache", hub)
    assert "its weights were not downloaded: architectures: MambaForCausalLM is not supported" in said
    assert "model.safetensors" not in hub.downloaded


def test_a_model_that_the_hub_does_not_have(tmp_path: Path, repository: Path) -> None:
    with HubServer(REPO, repository) as hub:
        assert "the Hub has no model acme/other" in serve("acme/other", tmp_path / "cache", hub)
        assert "acme/tiny has no revision v9" in serve(f"{REPO}@v9", tmp_path / "cache", hub)
        (repository / "model.safetensors").unlink()
        assert f"{COMMIT} has no model.safetensors; either" in serve(REPO, tmp_path / "cache", hub)


def test_offline_the_error_names_the_missing_files(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said = serve(REPO, cache)
    assert f"acme/tiny is not in the local cache {cache}, and the download failed" in said
    assert (
        "(from http://127.0.0.1:1: ConnectionRefusedError: [Errno 111] Connection refused); use --model FOLDER" in said
    )
    assert len(said.splitlines()[-1].replace(str(cache), "")) < 300
    snapshot = cache / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (snapshot / "model-1.safetensors").write_bytes(b"")
    said = serve(REPO, cache)
    assert f"acme/tiny is incomplete: {snapshot} has no model-2.safetensors" in said
    assert "the Hub at http://127.0.0.1:1 cannot be reached" in said


def test_damaged_weights_are_refused_before_torch_is_imported(tmp_path: Path, repository: Path) -> None:
    weights = repository / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1000)
    blocker = tmp_path / "torch"
    blocker.mkdir()
    (blocker / "torch.py").write_text("raise SystemExit('torch was imported')")
    command = [sys.executable, "-m", "worker_svc.service", "--model", str(repository), "--listen", "127.0.0.1:0"]
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(blocker)},
    )
    assert done.returncode == 2
    assert f"truncated: it has {size - 1000} bytes, its header requires {size}" in done.stderr
    assert "torch was imported" not in done.stderr
    assert time.monotonic() - started < 30
