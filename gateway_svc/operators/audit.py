"""The audit log of a gateway process: begins entries for calls over gRPC and HTTP, and writes their lines.

They are written by a thread, so that a slow or full disk does not delay requests:
rotation     before each write, the file is opened again if its path names another file
disk full    lines wait in memory and are written later; above a limit they are dropped and counted
processes    several may append to one file: a write has whole lines, at most 4096 bytes
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc

from gateway_svc.callers.caller import CANCELLED, OK, Entry, current_caller, current_entry
from svc_common.calls import PROBES
from svc_common.config import SettingError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MAX_WAITING = 65_536  # lines, up to 60 MB
MAX_WRITE_BYTES = 4096  # a pipe accepts this many bytes at once or not at all
BATCH_S = 0.05
RETRY_S = 1.0
STDOUT = "-"
MODE = 0o600

Line = Callable[[], dict[str, Any]]  # makes the content on the writer's thread


class AuditLogError(SettingError):
    """The file of --audit-log cannot be opened."""


class AuditLog:
    """Writes a line per request to a file, or to stdout for `-`. Raises AuditLogError."""

    def __init__(self, path: str, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        try:
            self._lines = LineWriter(path)
        except OSError as error:
            raise AuditLogError(f"--audit-log {path}: {error.strerror or error}") from None

    @property
    def num_lost(self) -> int:
        """Lines that were dropped because the file could not be written for long."""
        return self._lines.num_lost

    def begin(self, method: str, peer: str) -> Entry:
        """The entry of a call, also as `current_entry`. The caller ends it."""
        entry = Entry(method, peer, self._write, caller=current_caller.get())
        current_entry.set(entry)
        return entry

    def on_call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Begin the entry of a call over gRPC, which ends with the call. Probes have no line."""
        if not method.startswith(PROBES):
            entry = self.begin(method, urllib.parse.unquote(context.peer().partition(":")[2]))
            context.add_done_callback(partial(_end_call, entry))  # type: ignore[arg-type]

    def close(self) -> None:
        self._lines.close(CLOSE_TIMEOUT_S)

    def _write(self, entry: Entry) -> None:
        self._lines.put(lambda: {"gateway": self._gateway_id, **_facts(entry)})


def _end_call(entry: Entry, context: Any) -> None:
    """A call that is not done was cancelled by the client, or by its deadline."""
    code = context.code()
    entry.end(CANCELLED if not context.done() else OK if code is None else code.name)


def _facts(entry: Entry) -> dict[str, Any]:
    """The content of the line. Called on the writer's thread, after the end."""
    began = datetime.fromtimestamp(entry.began_at, UTC).isoformat(timespec="milliseconds")
    facts: dict[str, Any] = {
        "time": began.replace("+00:00", "Z"),
        "method": entry.method,
        "peer": entry.peer,
        "owner": entry.caller.owner,
        "credential": entry.caller.credential,
        "request_id": entry.request_id,
        "model": entry.model,
        "prompt_tokens": entry.num_prompt_tokens,
        "output_tokens": entry.num_output_tokens,
        "cached_tokens": entry.num_cached_tokens,
        "processor_s": round(entry.processor_s, 6),
        "block_s": round(entry.block_s, 6),
        "code": entry.code,
        "finish_reason": entry.finish_reason,
        "duration_s": round(entry.duration_s, 4),
    }
    optional = {"http_status": entry.http_status, "http_request_id": entry.http_request_id, "target": entry.target}
    return facts | {name: value for name, value in optional.items() if value}


class LineWriter:
    """Writes JSON lines to a path, or to stdout for `-`. Raises OSError if the file cannot be opened at first."""

    def __init__(self, path: str, write: Callable[[int, bytes], int] = os.write, retry_s: float = RETRY_S) -> None:
        self._path = path
        self._write = write
        self._retry_s = retry_s
        self._waiting: deque[Line] = deque()
        self._unwritten = b""  # encoded lines
        self._num_encoded = 0  # lines in `_unwritten`
        self._is_torn = False  # the file ends with a part of a line
        self._fd: int | None = None
        self._num_reported = 0
        self._has_failed = False
        self.num_lost = 0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._open()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Write a line soon. Never blocks."""
        if len(self._waiting) >= MAX_WAITING:
            self.num_lost += 1
            return
        self._waiting.append(line)
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Write the lines that wait, at most for this time."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self._waiting or self._unwritten:
            log.error("audit log %s: %d lines were not written", self._path, len(self._waiting) + self._num_encoded)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set() or self._waiting:
            self._wake.wait()
            self._closing.wait(BATCH_S)  # lines that arrive together are written together
            self._wake.clear()
            if not self._write_waiting():
                if self._closing.wait(self._retry_s):
                    break
                self._wake.set()
        if self._fd is not None and self._path != STDOUT:
            os.close(self._fd)

    def _write_waiting(self) -> bool:
        """Write all lines. False if that failed; the rest is kept."""
        try:
            self._reopen_if_moved()
            while self._unwritten or self._waiting:
                self._encode_some()
                self._append()
        except OSError as error:
            self._complain(error)
            return False
        self._recover()
        return True

    def _encode_some(self) -> None:
        """Encode lines until one write is full."""
        parts = [self._unwritten]
        size = len(self._unwritten)
        while self._waiting and size < MAX_WRITE_BYTES:
            data = json.dumps(self._waiting[0](), separators=(",", ":")).encode() + b"\n"
            if size and size + len(data) > MAX_WRITE_BYTES:
                break
            self._waiting.popleft()
            self._num_encoded += 1
            parts.append(data)
            size += len(data)
        self._unwritten = b"".join(parts)

    def _append(self) -> None:
        """Append the encoded lines. A line of which only a part was written is written again as a whole."""
        assert self._fd is not None
        prefix = b"\n" * self._is_torn
        num_written = self._write(self._fd, prefix + self._unwritten)
        written = self._unwritten[: max(0, num_written - len(prefix))]
        self._is_torn = not written.endswith(b"\n") if written else self._is_torn and num_written == 0
        self._unwritten = self._unwritten[written.rfind(b"\n") + 1 :]
        self._num_encoded = self._unwritten.count(b"\n")

    def _reopen_if_moved(self) -> None:
        if self._path == STDOUT:
            return
        with contextlib.suppress(FileNotFoundError):
            named = os.stat(self._path)
            if self._fd is not None and os.path.samestat(named, os.fstat(self._fd)):
                return
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._open()
        self._is_torn = False

    def _open(self) -> None:
        is_stdout = self._path == STDOUT
        self._fd = 1 if is_stdout else os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, MODE)

    def _complain(self, error: OSError) -> None:
        if not self._has_failed:
            words = "cannot write the audit log %s, up to %d lines wait in memory: %s"
            log.error(words, self._path, MAX_WAITING, error.strerror or error)
        self._has_failed = True

    def _recover(self) -> None:
        if self._has_failed:
            log.info("the audit log %s is written again; %d lines were lost", self._path, self.num_lost)
        self._has_failed = False
        if self.num_lost > self._num_reported:
            num_lost, self._num_reported = self.num_lost - self._num_reported, self.num_lost
            self._waiting.append(lambda: {"lost_lines": num_lost})
            self._wake.set()
