"""`quire up` and the commands that talk to it, run from a shell."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.processes.models import Reference, make_checkpoint
from tests.processes.stack import ROOT

QUIRE = (str(Path(sys.executable).with_name("quire")),)
# Modules that services import. They must not be imported from the folder in which a user starts them.
SHADOWING = ("xxhash", "numpy", "redis", "tokenizers", "logging", "torch")
READY_DEADLINE_S = 90.0
PROMPT = [1, 2, 3]


@contextmanager
def quire_up(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running `quire up` and the content of its ready file. It is killed at the end if it is still running."""
    for name in SHADOWING:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported from the working directory')\n")
    ready_file = folder / "ready.json"
    own = ("--port", "0", "--ready-file", str(ready_file), "--log-dir", str(folder / "logs"))
    with (folder / "up.txt").open("w+") as output:
        process = subprocess.Popen([*QUIRE, "up", *own, *flags], cwd=folder, stdout=output, stderr=output, text=True)
        try:
            deadline = time.monotonic() + READY_DEADLINE_S
            while not ready_file.exists():
                said = (folder / "up.txt").read_text()
                assert process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.05)
            yield process, json.loads(ready_file.read_text())
        finally:
            process.kill()
            process.wait()


def quire(target: str, *arguments: str) -> str:
    """Run one command with the stack as its target. Returns its stdout."""
    command = [*QUIRE, *arguments, "--target", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# test_all_models.py covers the other architectures: `quire up` does not distinguish them.
def test_up_serves_a_folder_and_leaves_no_process(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "my-model")
    expected = Reference(model_dir).greedy(PROMPT, 8)
    flags = ("--model", str(model_dir), "--workers", "2", "--dtype", "float32", "--threads", "1")
    with quire_up(tmp_path, *flags) as (process, ready):
        target = ready["target"]
        options = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--json")
        lines = quire(target, "generate", "--tokens", ",".join(map(str, PROMPT)), *options).splitlines()
        assert len(lines) == 1
        answer = json.loads(lines[0])
        assert answer["token_ids"] == expected
        assert isinstance(answer["text"], str)
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer["usage"]["output_tokens"] == 8
        check_status(json.loads(quire(target, "status", "--json")))
        assert json.loads(quire(target, "models", "--json"))["models"][0]["name"] == "my-model"
        (http,) = ready["http"]
        with urllib.request.urlopen(f"{http}/models", timeout=10) as reply:
            assert json.load(reply)["data"][0]["id"] == "my-model"
        assert f"OpenAI-compatible HTTP API: {http}" in (tmp_path / "up.txt").read_text()
        pids = [service["pid"] for service in ready["services"]]
        assert len(pids) == 4
        tokens = tmp_path / "logs" / "tokens"
        assert tokens.stat().st_mode & 0o777 == 0o600
        (scheduler,) = json.loads(quire(target, "status", "--json"))["schedulers"]
        with grpc.insecure_channel(scheduler["address"]) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/quire.internal.v1.SchedulerService/GetSchedulerStatus")(b"", timeout=60.0)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, (tmp_path / "up.txt").read_text()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not tokens.exists()
    assert "Traceback" not in "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))


def check_status(status: dict[str, Any]) -> None:
    (scheduler,) = status["schedulers"]
    assert scheduler["model"] == "my-model"
    assert scheduler["connected"] is True
    assert scheduler["num_waiting"] == 0
    assert scheduler["prefix_query_tokens"] == len(PROMPT)
    assert scheduler["prefix_hit_tokens"] == 0
    assert {worker["worker_id"] for worker in scheduler["workers"]} == {"worker-0", "worker-1"}
    for worker in scheduler["workers"]:
        assert worker["state"] == "ready"
        assert worker["rows_used"] == 0
        assert worker["blocks_used"] == 0
        assert worker["blocks_free"] > 0
        assert worker["blocks_cached"] >= 0


def test_up_encrypts_every_connection(tmp_path: Path) -> None:
    with quire_up(tmp_path, "--tls", "--executor", "sim") as (process, ready):
        target, ca = ready["target"], ready["tls_ca"]
        (command,) = re.findall(r"^  quire status (.*)$", (tmp_path / "up.txt").read_text(), re.MULTILINE)
        assert command == f"--target {target} --tls-ca {ca}"
        answer = json.loads(quire(target, "generate", "--tokens", "1,2", "--max-tokens", "3", "--json", "--tls-ca", ca))
        assert len(answer["token_ids"]) == 3
        (scheduler,) = json.loads(quire(target, "status", "--json", "--tls-ca", ca))["schedulers"]
        (http,) = ready["http"]
        with urllib.request.urlopen(f"{http}/models", context=ssl.create_default_context(cafile=ca)) as reply:
            assert http.startswith("https://")
            assert json.load(reply)["data"][0]["id"] == "demo"
        for address in (target, scheduler["address"], scheduler["workers"][0]["address"]):
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60.0)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not (Path(ca).parent / "ca.key").exists()
        assert Path(ca).parent.stat().st_mode & 0o077 == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, (tmp_path / "up.txt").read_text()
        assert not Path(ca).parent.exists()
    assert "will refuse" not in "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))


def test_the_bundled_model_answers_a_chat(tmp_path: Path) -> None:
    with quire_up(tmp_path, "--threads", "1", "--metrics", "--console") as (process, ready):
        assert ready["model"] == "demo"
        console = re.search(r"http://\S+/console/", (tmp_path / "up.txt").read_text())
        assert console is not None
        with urllib.request.urlopen(f"{console[0]}api/state", timeout=60.0) as page:
            assert json.load(page)["schedulers"][0]["model"] == "demo"
        for service in ready["services"]:
            kind = service["name"].partition("-")[0]
            with urllib.request.urlopen(service["metrics"], timeout=60.0) as page:
                assert f'quire_build_info{{service="{kind}"' in page.read().decode()
        answer = quire(ready["target"], "chat", "What does os.path.join do?")
        assert answer.strip() == "Join two or more pathname components, inserting '/' as needed."
        check_background_response(ready["http"][0])
        in_json = json.loads(quire(ready["target"], "chat", "Who are you?", "--json"))
        assert in_json["finish_reason"] == "eos"
        assert "demo model of Quire" in in_json["text"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "up.txt").read_text()
    said = (tmp_path / "up.txt").read_text()
    assert all(name in said for name in ("scheduler", "worker-0", "gateway")), said


def test_a_stack_in_the_background_is_listed_and_stopped(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*QUIRE, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    flags = ("--executor", "sim", "--port", "0", "--log-dir", str(tmp_path / "logs"), "--api-key", "token-abc")
    said = run("up", "--detach", *flags)
    assert "detached" in said
    (stack,) = json.loads(run("ps", "--json"))["stacks"]
    try:
        assert (stack["model"], stack["state"]) == ("demo", "serving")
        assert "INFO serving" in run("logs", "--service", "gateway")
        refused = subprocess.run([*QUIRE, "models", "--target", stack["target"]], capture_output=True, text=True)
        assert "an API key is required" in refused.stderr
        assert "demo" in quire(stack["target"], "models", "--api-key", "token-abc")
        assert "stopped demo" in run("stop")
        gone = subprocess.run([*QUIRE, "models", "--target", stack["target"]], capture_output=True, text=True)
        assert "no gateway answers" in gone.stderr
        assert "no stack runs here" in run("ps")
    finally:
        if psutil.pid_exists(stack["pid"]):
            os.kill(stack["pid"], signal.SIGKILL)


def test_a_wrong_setting_ends_the_start_with_one_line(tmp_path: Path) -> None:
    command = [*QUIRE, "up", "--port", "0", "--log-dir", str(tmp_path), "--kv-cache-memory", "900T"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert done.stderr.startswith("quire: error: --kv-cache-memory is 921600.0 GiB, but this machine")
    assert done.stderr.count("\n") == 1


def check_background_response(base_url: str) -> None:
    """Without Redis, one gateway keeps responses in memory."""

    def call(path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}{path}", data, headers), timeout=60.0) as reply:
            return dict(json.load(reply))

    question = "What does os.path.join do?"
    first = call("/responses", model="demo", input=question, background=True, temperature=0)
    deadline = time.monotonic() + READY_DEADLINE_S
    while (stored := call(f"/responses/{first['id']}"))["status"] != "completed":
        assert time.monotonic() < deadline, stored
        time.sleep(0.05)
    assert "Join two or more pathname components" in stored["output"][0]["content"][0]["text"]
    again = call("/responses", model="demo", input="Who are you?", previous_response_id=first["id"])
    assert again["status"] == "completed"


def test_up_refuses_a_missing_model(tmp_path: Path) -> None:
    done = subprocess.run([*QUIRE, "up", "--model", str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
