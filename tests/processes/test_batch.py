"""`quire batch` with real services: killed and followed again, with a worker killed during the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from quire_client.demo import demo_model_dir

from tests.processes.children import start_child
from tests.processes.ports import free_port
from tests.processes.stack import Stack

NUM_REQUESTS = 60
QUESTIONS = ("What does os.path.join do?", "Who are you?", "What is json.dumps for?")


def request(i: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "seed": i, "max_tokens": 40, "ignore_eos": True}
    messages = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
    return {"url": "/v1/chat/completions", "body": {"messages": messages, **sampling}}


async def test_a_batch_whose_command_and_worker_are_killed_loses_nothing(tmp_path: Path) -> None:
    source, output = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    requests = {f"request-{i}": request(i) for i in range(NUM_REQUESTS)}
    source.write_text(
        "".join(f"{json.dumps({'custom_id': name, 'method': 'POST', **one})}\n" for name, one in requests.items())
    )
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, demo_model_dir(), "--kv-cache-memory", "64M") for _ in range(2)]
        http = f"127.0.0.1:{free_port()}"
        gateway = stack.start_gateway(
            scheduler, flags=("--http-listen", http, "--batch-dir", str(tmp_path / "batches"))
        )
        async with await stack.connect(gateway, workers=2) as client:
            command = [sys.executable, "-m", "quire_cli", "batch", str(source), "-o", str(output)]
            command += ["--base-url", f"http://{http}"]
            first = start_child(command, tmp_path / "batch.log")
            wait_for_answers(f"http://{http}", 8)
            workers[0].kill()
            first.kill()
            first.wait()
            done = run_to_end([*command, "--json"])
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["num_answered"] == NUM_REQUESTS
            found = [json.loads(line) for line in output.read_text().splitlines()]
            assert sorted(line["custom_id"] for line in found) == sorted(requests)
            for line in found[:: NUM_REQUESTS // 6]:
                body = requests[line["custom_id"]]["body"]
                sampling = {name: body[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
                expected = await client.generate(messages=body["messages"], **sampling)
                choice = line["response"]["body"]["choices"][0]
                assert choice["message"]["content"] == expected.text


def run_to_end(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def wait_for_answers(url: str, count: int, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        with urllib.request.urlopen(f"{url}/v1/batches") as answer:
            found = json.load(answer)["data"]
        if found and found[0]["request_counts"]["completed"] >= count:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
