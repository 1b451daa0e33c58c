"""The writer of the audit log: rotation, full disks, pipes that are not read, several writers."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway_svc.operators import audit
from gateway_svc.operators.audit import LineWriter

NO_SPACE = OSError(28, "No space left on device")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def put(writer: LineWriter, *lines: int, size: int = 0) -> None:
    for n in lines:
        writer.put(lambda n=n: {"n": n, "filler": "x" * size})


def test_a_rotated_file_is_opened_again(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    writer = LineWriter(str(path))
    put(writer, 1)
    until(lambda: path.read_text())
    path.rename(old)
    put(writer, 2)
    until(path.exists)
    path.unlink()
    put(writer, 3)
    writer.close(10.0)
    assert numbers(old) == [1]
    assert numbers(path) == [3]


def test_several_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [LineWriter(str(path)) for _ in range(4)]
    for n in range(2000):
        put(writers[n % 4], n, size=n % 300)
    for writer in writers:
        writer.close(10.0)
    assert sorted(numbers(path)) == list(range(2000))


class Disk:
    """Writes at most `room` bytes, then fails. It accepts a part of the last write."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_failures = 0

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            self.num_failures += 1
            raise NO_SPACE
        part = data[: self.room]
        self.room -= len(part)
        return os.write(fd, part)


@pytest.mark.parametrize("room", [0, 1, 50, 2500, 4096, 4097])
def test_lines_wait_while_the_disk_is_full(tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk, path = Disk(room), tmp_path / "audit.jsonl"
    writer = LineWriter(str(path), disk.write, retry_s=0.01)
    put(writer, *range(200), size=30)
    until(lambda: disk.num_failures > 1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device" in caplog.text
    disk.room = 10**9
    until(lambda: "is written again; 0 lines were lost" in caplog.text)
    writer.close(10.0)
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["n"] for line in whole] == list(range(200))
    assert len(path.read_text().splitlines()) - len(whole) <= 1, "at most the line that was cut"


def test_lines_above_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_WAITING", 10)
    disk, path = Disk(0), tmp_path / "audit.jsonl"
    writer = LineWriter(str(path), disk.write, retry_s=0.01)
    put(writer, 0, size=5000)  # larger than a write, so it is encoded alone
    until(lambda: disk.num_failures)
    put(writer, *range(1, 15), size=5000)
    assert writer.num_lost == 4
    disk.room = 10**9
    until(lambda: "lost_lines" in path.read_text())
    writer.close(10.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["n"] for line in lines[:-1]] == list(range(11))
    assert lines[-1] == {"lost_lines": 4}


def test_a_pipe_that_is_not_read_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = LineWriter(str(path))
    started = time.thread_time()
    put(writer, *range(20_000))
    assert time.thread_time() - started < 5.0
    assert threading.active_count() > 1
    writer.close(0.1)  # the thread is blocked in its write
    os.close(reader)
