#!/usr/bin/env python
"""`make demo`: start the whole stack, ask the bundled model one question, check its answer, stop.

`quire up` starts gateway, scheduler and worker as processes; this process is the client.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire_cli.commands.status import status_text
from quire_client import Client, QuireError
from quire_client.demo import demo_model_dir

ABOUT = "os.path.join"
QUESTION = f"What does {ABOUT} do?"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class DemoError(Exception):
    """The demo failed; the message says at which point."""


def main() -> int:
    try:
        expected = known_answer(demo_model_dir() / "pairs.json")
        run_demo(expected)
    except (DemoError, QuireError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    print("\nThe demo has ended. Now try `quire up` in one terminal and `quire chat` in another.")
    return 0


def known_answer(pairs_path: Path) -> str:
    """The answer that the model was trained on."""
    for pair in json.loads(pairs_path.read_text())["pairs"]:
        if pair.get("about") == ABOUT and pair.get("kind") != "long":
            return str(pair["answer"])
    raise DemoError(f"{pairs_path} has no answer about {ABOUT}")


def run_demo(expected: str) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        ready_file = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "quire_cli", "up", "--model", "demo", "--port", "0"]
        stack = subprocess.Popen([*command, "--ready-file", str(ready_file), "--log-dir", folder])
        try:
            target = wait_until_ready(stack, ready_file)
            with Client.connect(target) as client:
                check(ask(client), expected)
                print(f"\n{status_text(client.status())}")
        finally:
            exit_code = stop(stack)
    if exit_code != 0:
        raise DemoError(f"`quire up` ended with exit code {exit_code} instead of 0")


def wait_until_ready(stack: subprocess.Popen[bytes], ready_file: Path) -> str:
    """Wait until all services are ready. Returns the gateway's address."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        if stack.poll() is not None:
            raise DemoError(f"`quire up` ended with exit code {stack.returncode} before all services were ready")
        if time.monotonic() > deadline:
            raise DemoError(f"the stack was not ready within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    return str(json.loads(ready_file.read_text())["target"])


def ask(client: Client) -> str:
    """Ask the question and print the answer as it is generated."""
    print(f"you>   {QUESTION}\nquire> ", end="", flush=True)
    num_chunks = 0
    with client.stream_chat(QUESTION, temperature=0) as stream:
        for delta in stream:
            num_chunks += bool(delta.token_ids)
            print(delta.text, end="", flush=True)
        result = stream.result()
    print(f"\n       [{result.usage.output_tokens} tokens in {num_chunks} chunks: {result.finish_reason.value}]")
    return result.text


def check(answer: str, expected: str) -> None:
    if answer != expected:
        raise DemoError(f"expected the answer {expected!r}, got {answer!r}")
    print("       [exactly the answer that the model was trained on]")


def stop(stack: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM and wait for the drain. Returns the exit code."""
    stack.send_signal(signal.SIGTERM)
    try:
        return stack.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        stack.kill()
        return stack.wait()


if __name__ == "__main__":
    sys.exit(main())
