"""`quire bench` with a real stack and a real HTTP server, and every command of docs/benchmarking.md."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import quire_cli as cli
from quire_client import Client
from quire_client.testing import FakeGateway

from tests.processes.openai_server import OpenAIServer
from tests.processes.stack import ROOT, demo_gateway

GUIDE = ROOT / "docs" / "benchmarking.md"
TRACE = [
    {"timestamp": 100 * i, "input_length": 1100, "output_length": 80, "hash_ids": [1, 2 + i % 2]} for i in range(10)
]
TEXTS = [{"prompt": f"What is {name}?"} for name in ("len", "zip", "json")]
REQUESTS = [{"token_ids": [5, 6, 7 + i], "max_tokens": 4 + i} for i in range(5)]
OWN = ("--warmup", "0", "--cache-salt", "own", "--json")  # shares no cached blocks with another test


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_gateway(tmp_path_factory.mktemp("bench")) as address:
        yield address


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    Path("texts.json").write_text(json.dumps(TEXTS))
    Path("requests.jsonl").write_text("\n".join(map(json.dumps, REQUESTS)))


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = cli.main(["bench", *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def commands() -> list[str]:
    """Every `quire bench` of the guide."""
    return re.findall(r"^quire bench .*$", GUIDE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_guide(command, target, capsys, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_TARGET", target)
    with OpenAIServer() as server:
        words = shlex.split(command.replace("http://localhost:8000", server.url), comments=True)
        code, out, err = bench(capsys, *words[2:], "--json")
    figures = json.loads(out)
    assert (code, err, figures["requests_failed"]) == (0, "", 0)
    assert figures["requests_ok"] == num_requests(words)
    assert figures["ttft_ms"]["p50"] > 0
    assert 0 <= figures["itl_ms"]["p50"] <= figures["itl_ms"]["max"]


def num_requests(words: list[str]) -> int:
    if "--num-prompts" in words:
        return int(words[words.index("--num-prompts") + 1])
    return len(TRACE if "trace" in words else REQUESTS)


def test_the_guide_has_every_dataset() -> None:
    text = " ".join(commands())
    for name in ("random", "shared-prefix", "multi-turn", "trace", "demo", "sharegpt", "file"):
        assert f"--dataset {name}" in text


def test_figures_of_a_known_load(target, capsys) -> None:
    dataset = "--dataset shared-prefix --groups 1 --prefix-len 64 --input-len 8 --output-len 12 --num-prompts 9"
    code, out, _ = bench(capsys, *dataset.split(), *OWN, "--concurrency", "1", "--target", target)
    figures = json.loads(out)
    assert code == 0
    assert (figures["requests_ok"], figures["input_tokens"], figures["output_tokens"]) == (9, 9 * 72, 9 * 12)
    assert figures["cached_tokens"] == 8 * 64  # all but the first hit the prefix
    assert figures["e2e_ms"]["max"] >= figures["ttft_ms"]["max"]


def test_results_are_written(target, capsys) -> None:
    flags = "--dataset file --path requests.jsonl --slo ttft:60000 --output result.json --plot result.html"
    code, out, _ = bench(capsys, *flags.split(), "--target", target)
    result = json.loads(Path("result.json").read_text())
    assert code == 0
    assert sorted(request["num_output"] for request in result["requests"]) == [4, 5, 6, 7, 8]
    assert (result["requests_good"], result["settings"]["dataset"], result["model"]) == (5, "file", "demo_model")
    assert "time to first token" in out
    assert Path("result.html").read_text().count("<svg") == 5


def test_a_conversation_resends_its_outputs_as_history(target, capsys) -> None:
    dataset = "--dataset multi-turn --turns 3 --num-prompts 3 --prefix-len 16 --input-len 16 --output-len 16 --seed 9"
    code, out, _ = bench(capsys, *dataset.split(), *OWN, "--target", target)
    figures = json.loads(out)
    assert (code, figures["input_tokens"]) == (0, 32 + 64 + 96)
    assert figures["cached_tokens"] == 32 + 64  # the last token of an output is never computed


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        ("--input-len 5000", 1, "tokens, but max_model_len is 4096"),
        ("--dataset trace", 2, "--dataset trace requires --path"),
        ("--dataset file --path nowhere.json", 1, "nowhere.json cannot be read"),
        ("--backend openai", 2, "--backend openai requires --base-url"),
        ("--backend openai --base-url http://127.0.0.1:9", 1, "no answer from http://127.0.0.1:9/v1/models"),
        ("--slo ttft", 2, "--slo"),
        ("--plot x.pdf", 1, "--plot x.pdf"),
        ("--model missing", 1, "missing"),
    ],
)
def test_a_run_that_cannot_start_prints_one_line(flags, code, complaint, target, capsys) -> None:
    found = bench(capsys, *flags.split(), "--target", target)
    assert (found[0], found[1], found[2].count("\n")) == (code, "", 1)
    assert complaint in found[2]


def test_ctrl_c_prints_the_results_so_far(target) -> None:
    command = shlex.split("bench --num-prompts 5000 --input-len 16 --output-len 32 --concurrency 4 --warmup 0 --json")
    process = subprocess.Popen(
        [sys.executable, "-m", "quire_cli", *command, "--target", target], stdout=subprocess.PIPE, cwd=ROOT
    )
    with process, Client.connect(target) as client:
        deadline = time.monotonic() + 30
        while not client.status().open_streams and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    figures = json.loads(out)
    assert (process.returncode, figures["interrupted"]) == (130, True)
    assert figures["requests_ok"] < 5000


def test_tokens_of_an_http_server_are_counted(capsys) -> None:
    with OpenAIServer() as server:
        flags = "--num-prompts 4 --input-len 10 --output-len 7 --warmup 0 --json --backend openai --base-url"
        code, out, _ = bench(capsys, *flags.split(), server.url)
    figures = json.loads(out)
    assert (code, figures["requests_ok"], figures["input_tokens"], figures["output_tokens"]) == (0, 4, 40, 28)
    assert (figures["chunks"], figures["cached_tokens"]) == (16, 12)  # two tokens per chunk
    assert all(request["ignore_eos"] and len(request["prompt"]) == 10 for request in server.requests[1:])


def test_a_server_that_refuses_token_ids_gets_text(capsys) -> None:
    with OpenAIServer(takes_token_ids=False) as server:
        flags = "--num-prompts 3 --input-len 10 --output-len 7 --json --backend openai --base-url"
        code, out, _ = bench(capsys, *flags.split(), server.url)
    assert (code, json.loads(out)["requests_ok"]) == (0, 3)
    assert all(len(request["prompt"].split()) == 10 for request in server.requests[1:])


def test_failed_requests_are_counted_and_reported(capsys) -> None:
    with OpenAIServer(fails_at=4) as server:  # it serves the probe, the warm-up and two more
        flags = "--num-prompts 6 --input-len 10 --output-len 7 --concurrency 1 --backend openai --base-url"
        code, out, err = bench(capsys, *flags.split(), server.url)
    assert code == 1
    assert "2  ok, 4 failed" in out
    assert "4 x failed: HTTP 429: too many requests" in out
    assert "4 of 6 requests failed; first: HTTP 429: too many requests" in err


def test_the_api_key_reaches_the_server_but_not_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Locked(FakeGateway):
        def GetModel(self, request, context):  # type: ignore[no-untyped-def]
            seen.append(dict(context.invocation_metadata()).get("authorization"))
            return super().GetModel(request, context)

    monkeypatch.chdir(tmp_path)
    flags = ["--num-prompts", "1", "--api-key", "my-secret", "--output", "result.json"]
    with Locked(lambda prompt: "x" * 8) as gateway:
        cli.main(["bench", "--target", gateway.target, *flags])
    assert seen == ["Bearer my-secret"]
    assert "my-secret" not in (tmp_path / "result.json").read_text()
