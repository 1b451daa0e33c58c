"""Every program in examples/ runs against real services with the demo model; tools.py against a scripted gateway."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_client import ToolCall
from quire_client.demo import demo_model_dir
from quire_client.testing import FakeGateway

from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Stack

EXAMPLES = ROOT / "examples"
CLIENTS_PYTHON = ROOT / os.environ.get("CLIENTS_VENV", ".clients") / "bin/python"
JOIN = "Join two or more pathname components, inserting '/' as needed."
COVERED = {
    "chat.py",
    "streaming.py",
    "tools.py",
    "openai_tools.py",
    "json_object.py",
    "logprobs.py",
    "decide.py",
    "batch.py",
    "input.jsonl",
    "failover.py",
    "langchain_chat.py",
    "streaming.mjs",
    "curl.sh",
    "grpo.py",  # test_grpo.py
}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One stack with HTTP: the variables of the examples."""
    with Stack(tmp_path_factory.mktemp("examples")) as stack:
        scheduler = stack.start_scheduler()
        flags = ("--kv-cache-memory", "64M", "--model-name", "demo")
        worker = stack.start_worker(scheduler, demo_model_dir(), *flags)
        http = f"127.0.0.1:{free_port()}"
        gateway = stack.start_gateway(
            scheduler, flags=("--http-listen", http, "--batch-dir", str(stack.folder / "batches"))
        )
        worker.wait_ready()
        gateway.wait_ready()
        yield {"QUIRE_TARGET": gateway.address, "QUIRE_BASE_URL": f"http://{http}"}


def run(services: dict[str, str], name: str, *arguments: str, program: str = sys.executable) -> tuple[str, str]:
    """Stdout and stderr of an example."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # batch.py runs the `quire` command
    variables = {**os.environ, **services, "PATH": path}
    command = [program, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_every_example_is_run_and_listed() -> None:
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert names == COVERED
    assert set(re.findall(r"\]\(([\w.]+)\) \|", (EXAMPLES / "README.md").read_text())) == names


def test_chat(services: dict[str, str]) -> None:
    out, _ = run(services, "chat.py")
    assert out.startswith(f"{JOIN}\n")
    assert re.search(r"^\d+ prompt tokens, \d+ of them from the cache$", out, re.MULTILINE)


def test_streaming(services: dict[str, str]) -> None:
    out, _ = run(services, "streaming.py")
    assert len(re.findall(r"\[eos, \d+ tokens\]", out)) == 3
    assert all(f"What does {name} do?" in out for name in ("len", "zip", "json.dumps"))


def test_json_object(services: dict[str, str]) -> None:
    review, shown = run(services, "json_object.py")[0].splitlines()
    found = re.fullmatch(
        r"Review\(sentiment='(positive|neutral|negative)', stars=([1-5]), is_spam=(True|False)\)", review
    )
    assert found is not None, review
    assert shown == f"{found[2]} stars, {found[1]}, spam: {found[3]}"


def test_logprobs(services: dict[str, str]) -> None:
    lines = run(services, "logprobs.py")[0].splitlines()
    assert len(lines) == 8
    for line in lines:
        found = re.fullmatch(r" *(\S.*?) +(\S+)%   of (.*)", line)
        assert found is not None, line
        assert found[3].startswith(f"{found[1]} {found[2]}%")  # greedy: the token is the most likely one


def test_decide(services: dict[str, str]) -> None:
    lines = run(services, "decide.py")[0].splitlines()
    assert re.fullmatch(r"about paths: \S+%\nmodule: \S+ \(\S+%\)\nlength: \d\.\d\d of 0 to 2", "\n".join(lines)), lines


def test_batch(services: dict[str, str], tmp_path: Path) -> None:
    out, err = run(services, "batch.py", str(tmp_path))
    assert "4 of 4 requests answered" in out
    assert "What does zip do?\n  " in out
    assert "demo model of Quire" in out
    assert err == ""


def test_failover(services: dict[str, str]) -> None:
    pytest.importorskip("openai")
    out, err = run(services, "failover.py", f"http://127.0.0.1:{free_port()}", services["QUIRE_BASE_URL"])
    assert out == f"{JOIN}\n"
    assert "the next gateway continues" in err


@pytest.mark.skipif(not CLIENTS_PYTHON.exists(), reason="langchain is missing; run scripts/install_clients .venv/bin")
def test_langchain(services: dict[str, str]) -> None:
    out, _ = run(services, "langchain_chat.py", program=str(CLIENTS_PYTHON))
    assert out.startswith(f"{JOIN}\n")
    assert len(out.splitlines()) == 2


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_node(services: dict[str, str]) -> None:
    assert run(services, "streaming.mjs", program="node")[0] == f"{JOIN}\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(services: dict[str, str]) -> None:
    out, _ = run(services, "curl.sh", program="bash")
    models, chat, *events = out.splitlines()
    assert json.loads(models)["data"][0]["id"] == "demo"
    assert json.loads(chat)["choices"][0]["finish_reason"] == "stop"
    assert "data: [DONE]" in events


def test_tools_over_http(services: dict[str, str]) -> None:
    pytest.importorskip("openai")
    called, answer = run(services, "openai_tools.py")[0].splitlines()
    assert re.fullmatch(r"weather\(\{'city': '(Paris|Rome)'\}\) = It rains in (Paris|Rome)\.", called)
    assert answer


def test_tools() -> None:
    call = ToolCall("", "add", '{"a": 17.5, "b": 24.5}')
    answers = {"What is 17.5 + 24.5? Use the tool.": call, "42.0": "The sum is 42.0."}
    with FakeGateway(answers) as gateway:
        out, _ = run({"QUIRE_TARGET": gateway.target}, "tools.py")
    assert out == 'add({"a": 17.5, "b": 24.5}) = 42.0\nThe sum is 42.0.\n'
