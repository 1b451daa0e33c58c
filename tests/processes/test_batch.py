"""`quire batch` with real services: killed and continued, with a worker killed during the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from quire_client.demo import demo_model_dir

from tests.processes.children import start_child
from tests.processes.ports import free_port
from tests.processes.stack import Stack

NUM_REQUESTS = 60
QUESTIONS = ("What does os.path.join do?", "Who are you?", "What is json.dumps for?")


def request(i: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "seed": i, "max_tokens": 40, "ignore_eos": True}
    if i % 2:
        return {"url": "/v1/completions", "body": {"prompt": f"def f{i}", **sampling}}
    messages = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
    return {"url": "/v1/chat/completions", "body": {"messages": messages, **sampling}}


async def test_a_killed_batch_continues_and_loses_nothing(tmp_path: Path) -> None:
    source, output = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    requests = {f"request-{i}": request(i) for i in range(NUM_REQUESTS)}
    source.write_text(
        "".join(f"{json.dumps({'custom_id': name, 'method': 'POST', **one})}\n" for name, one in requests.items())
    )
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, demo_model_dir(), "--kv-cache-memory", "64M") for _ in range(2)]
        http = f"127.0.0.1:{free_port()}"
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", http))
        async with await stack.connect(gateway, workers=2) as client:
            command = [sys.executable, "-m", "quire_cli", "batch", str(source), "-o", str(output)]
            command += ["--base-url", f"http://{http}", "--concurrency", "4"]
            first = start_child(command, tmp_path / "batch.log")
            wait_for_lines(output, 8)
            workers[0].kill()
            wait_for_lines(output, 16)
            first.kill()
            first.wait()
            num_before = len(output.read_bytes().splitlines())
            assert num_before < NUM_REQUESTS, "the batch ended before it was killed"
            with output.open("ab") as file:
                file.write(b'{"id": "batch_req_1", "custom_id": "request-')
            summary = run_to_end(command)
            assert (summary["num_answered"], summary["num_skipped"]) == (NUM_REQUESTS, num_before)
            found = [json.loads(line) for line in output.read_text().splitlines()]
            assert sorted(line["custom_id"] for line in found) == sorted(requests)
            for line in found[:: NUM_REQUESTS // 6]:
                body = requests[line["custom_id"]]["body"]
                prompt = {"messages": body["messages"]} if "messages" in body else {"prompt": body["prompt"]}
                sampling = {name: body[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
                expected = await client.generate(**prompt, **sampling)
                choice = line["response"]["body"]["choices"][0]
                assert (choice["message"]["content"] if "message" in choice else choice["text"]) == expected.text


def run_to_end(command: list[str]) -> dict[str, int]:
    """Run the batch to its end. Returns its summary."""
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary: dict[str, int] = json.loads(done.stdout)
    return summary


def wait_for_lines(path: Path, count: int, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"fewer than {count} answers after {deadline_s} s"
        time.sleep(0.01)
