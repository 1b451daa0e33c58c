"""`quire top` in a terminal of 80 columns (tmux), with a real stack."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire_client import Client
from quire_client.demo import demo_model_dir

from tests.processes.stack import Service, Stack

SLOW = ("--executor", "sim", "--sim-step-ms", "20", "--sim-eos-probability", "0")
DEADLINE_S = 20.0

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="no tmux: apt-get install tmux, to test quire top in a terminal"
)


class Terminal:
    """A tmux server with one window, which runs `quire top`."""

    def __init__(self, socket: Path, command: str) -> None:
        self._socket = socket
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", command)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), *words], capture_output=True, text=True, timeout=20
        )
        return done.stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def wait(self, what: str, holds: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not holds(screen := self.screen()):
            assert time.monotonic() < deadline, f"{what}:\n{screen}"
            time.sleep(0.05)
        return screen

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Service]:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, demo_model_dir(), *SLOW, "--num-blocks", "256", "--model-name", "demo")
        gateway = stack.start_gateway(scheduler)
        worker.wait_ready()
        gateway.wait_ready()
        yield gateway


def test_top_in_a_terminal(gateway: Service, tmp_path: Path) -> None:
    command = f"env LC_ALL=C.UTF-8 {sys.executable} -m quire_cli top --target {gateway.address} --interval-s 0.2"
    ended = threading.Event()

    def generate() -> None:
        with Client.connect(gateway.address, retry=None) as client:
            options = {"max_tokens": 3000, "ignore_eos": True, "request_id": "shown-in-top"}
            with client.stream(token_ids=range(5, 69), **options) as stream:  # type: ignore[arg-type]
                for _ in stream:
                    if ended.is_set():
                        return

    terminal = Terminal(tmp_path / "tmux", command)
    thread = threading.Thread(target=generate)
    try:
        terminal.wait("an idle stack", lambda text: "demo" in text and "no open request" in text and "worker-0" in text)
        thread.start()
        screen = terminal.wait("a request", lambda text: "shown-in-top" in text and "1/" in text)
        assert "█" in screen, "used blocks"
        terminal.wait("a rate", lambda text: "output" in text and " 0 tokens/s" not in text)
        assert len(screen.splitlines()) <= 24
        terminal.resize(60, 10)
        terminal.wait("the smaller screen", lambda text: "OLDEST REQUEST" in text)
        ended.set()
        thread.join(20)
        gateway.kill()
        terminal.wait("the lost gateway", lambda text: "NO ANSWER" in text)
        terminal.press("q")
        terminal.wait("the end", lambda text: not text.strip())
    finally:
        ended.set()
        terminal.close()
        if thread.is_alive():
            thread.join(20)
