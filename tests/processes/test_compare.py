"""`quire compare` with real services: a model against itself, an adapter, and weights with one other number."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quire_cli as cli
from quire_client import Client
from quire_client.demo import demo_model_dir
from safetensors.torch import load_file, save_file

from tests.processes.stack import Service, Stack
from tests.unit.engine.adapters import ATTENTION, make_adapter

PAIRS = json.loads((demo_model_dir() / "pairs.json").read_text())["pairs"]
QUESTIONS = [f"What does {pair['about']} do?" for pair in PAIRS if "about" in pair][:300]
FLAGS = ("--num-blocks", "400", "--max-num-seqs", "16")


def other_weights(folder: Path) -> Path:
    """The demo model with one other number in one layer."""
    shutil.copytree(demo_model_dir(), folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "layers.2." in name and name.endswith("down_proj.weight"))
    tensors[name][3, 5] += 0.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    """The gateway of the demo model and of its adapter `tuned`, and that of other weights."""
    root = tmp_path_factory.mktemp("compare")
    adapter = make_adapter(demo_model_dir(), root / "tuned", seed=1, target_modules=ATTENTION, strength=0.005)
    flags = (*FLAGS, "--max-adapters", "1", "--adapter", f"tuned={adapter}")
    with Stack(root) as stack:
        made = []
        for folder, more in ((demo_model_dir(), flags), (other_weights(root / "other"), FLAGS)):
            scheduler = stack.start_scheduler()
            worker = stack.start_worker(scheduler, folder, "--model-name", "demo", *more)
            made.append(stack.start_gateway(scheduler))
            worker.wait_ready()
            made[-1].wait_ready()
        yield made[0], made[1]


def num_steps(client: Client) -> int:
    return sum(worker.steps for scheduler in client.status().schedulers for worker in scheduler.workers)


def body_line(number: int, **options: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": QUESTIONS[number]}], "max_completion_tokens": 24, **options}
    return {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def compare(tmp_path: Path, names: str, lines: list[Any], *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = cli.main(["compare", *names.split(), "--requests", str(file), "-o", str(tmp_path / "report"), *flags])
    return code, json.loads((tmp_path / "report.json").read_text())


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "stop": ["."]},
    {"n": 2, "seed": 5, "temperature": 1.2, "repetition_penalty": 1.1},
    {"regex": "[a-z ]{4,30}", "temperature": 1.0},
    {"json_object": True, "temperature": 1.0},
)
TEXTS: list[dict[str, Any]] = [
    {"request": {"prompt": "Return the", "max_tokens": 9, "ignore_eos": True, "temperature": 1.0}},
    {"request": {"token_ids": [5, 6, 7, 8], "max_tokens": 0}},
    {"request": {"prompt": "a b c d e f g", "max_tokens": 9, "truncate_prompt_tokens": 3, "temperature": 1.0}},
]


def mixed_lines(number: int) -> list[dict[str, Any]]:
    return [body_line(i % len(QUESTIONS), **KINDS[i % len(KINDS)]) for i in range(number)] + TEXTS


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=[pytest.mark.deep, pytest.mark.timeout(1200)])])
def test_a_model_does_not_differ_from_itself(gateways: tuple[Service, Service], tmp_path: Path, number: int) -> None:
    target = "--target", gateways[0].address
    code, report = compare(tmp_path, "demo demo", mixed_lines(number), *target, "--max-differing", "0")
    num_answers = number + number // 5 + 3
    summary = report["summary"]
    assert (code, report["errors"], summary["num_answers"]) == (0, {}, num_answers)
    assert (summary["num_identical"], summary["num_differing"], summary["agreement"]) == (num_answers, 0, 1)
    assert summary["a"] == summary["b"]
    assert (summary["a"]["mean_log_ratio"], summary["a"]["num_tokens"] > 2000) == (0, True)


def test_one_other_number_in_the_weights_is_found(gateways: tuple[Service, Service], tmp_path: Path) -> None:
    a, b = (gateway.address for gateway in gateways)
    code, report = compare(tmp_path, "demo demo", mixed_lines(40), "--gateway-a", a, "--gateway-b", b)
    assert (code, report["errors"]) == (0, {})
    identical = {one["name"] for one in report["answers"] if not one["paths"]}
    assert identical == {"42"}, "only the line without output has no other log probability"
    page = (tmp_path / "report.html").read_text()
    assert [word in page for word in ("<svg", "src=", "://")] == [True, False, False]


def test_an_adapter_wins_with_less_variance_if_the_noise_is_the_same(
    gateways: tuple[Service, Service], tmp_path: Path
) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def score(line, text):\n    return len(text)\n")
    options = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    lines: list[dict[str, Any]] = [{"request": {"prompt": question[:14], **options}} for question in QUESTIONS[:150]]
    flags = "--target", gateways[0].address
    code, report = compare(tmp_path, "demo tuned", lines, *flags, "--score", str(rule), "--max-differing", "1")
    summary = report["summary"]
    assert (code, report["errors"]) == (1, {})
    assert summary["win_rate_variance_same_noise"] <= summary["win_rate_variance_other_noise"] / 3
    for one in report["answers"]:
        for path in one["paths"]:
            assert len(path["token_ids"]) == len(path["logprobs"]) == len(path["other_logprobs"])
            assert path["log_ratio"] == pytest.approx(sum(path["logprobs"]) - sum(path["other_logprobs"]))
    _, mirrored = compare(tmp_path, "tuned demo", lines, *flags)
    assert [one["paths"][::-1] for one in mirrored["answers"]] == [one["paths"] for one in report["answers"]]


def test_ctrl_c_writes_what_was_compared(gateways: tuple[Service, Service], tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in mixed_lines(250) * 20))
    flags = "--target", gateways[0].address, "--requests", str(file), "-o", str(tmp_path / "report")
    process = subprocess.Popen(
        [sys.executable, "-m", "quire_cli", "compare", "demo", "demo", *flags], stderr=subprocess.PIPE
    )
    with Client.connect(gateways[0].address) as client:
        steps = num_steps(client)
        while num_steps(client) < steps + 100 and process.poll() is None:
            time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (process.returncode, errors) == (130, b"")
    assert 0 < report["summary"]["num_answers"] < 5000
