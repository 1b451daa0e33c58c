"""The line of one request. It is filled while the request runs, and written when it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from gateway_svc.callers.caller import ANONYMOUS, Caller, current_caller

OK = "OK"
CANCELLED = "CANCELLED"
MAX_TARGET_CHARS = 1000


class Meter(Protocol):
    """The counts of one generation, which may be in progress."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    processor_s: float
    block_s: float
    finish_reason: str


@dataclass(slots=True)
class Entry:
    """Facts of one request. Text of the client is stored only after it was checked."""

    method: str
    peer: str
    write: Callable[[Entry], None]
    caller: Caller = ANONYMOUS
    request_id: str = ""
    http_request_id: str = ""
    model: str = ""
    target: str = ""  # object of an Abort or of an operation
    code: str = ""  # name of a gRPC status; empty: not known yet
    http_status: int | None = None
    meters: list[Meter] = field(default_factory=list)  # a request over HTTP may have several generations
    num_prompt_tokens: int = 0  # this and the next five are known at the end
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    processor_s: float = 0.0
    block_s: float = 0.0
    finish_reason: str = ""
    began_at: float = field(default_factory=time.time)
    started_at: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0

    def end(self, code: str) -> None:
        """Write the line. `code` is the result, unless another one was noted."""
        self.duration_s = time.monotonic() - self.started_at
        self.code = self.code or code
        for meter in self.meters:
            self.num_prompt_tokens += meter.num_prompt_tokens
            self.num_output_tokens += meter.num_output_tokens
            self.num_cached_tokens += meter.num_cached_tokens
            self.processor_s += meter.processor_s
            self.block_s += meter.block_s
            self.finish_reason = meter.finish_reason if self.code == OK else ""
        self.meters.clear()  # many entries may wait for a disk
        self.write(self)

    def fork(self, method: str) -> Entry:
        """An entry for work that continues after the request."""
        return Entry(
            method,
            self.peer,
            self.write,
            caller=current_caller.get(),
            request_id=self.request_id,
            http_request_id=self.http_request_id,
        )

    def facts(self) -> dict[str, Any]:
        """The content of the line. Called on another thread, after the end."""
        began = datetime.fromtimestamp(self.began_at, UTC).isoformat(timespec="milliseconds")
        facts: dict[str, Any] = {
            "time": began.replace("+00:00", "Z"),
            "method": self.method,
            "peer": self.peer,
            "owner": self.caller.owner,
            "credential": self.caller.credential,
            "request_id": self.request_id,
            "model": self.model,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "cached_tokens": self.num_cached_tokens,
            "processor_s": round(self.processor_s, 6),
            "block_s": round(self.block_s, 6),
            "code": self.code,
            "finish_reason": self.finish_reason,
            "duration_s": round(self.duration_s, 4),
        }
        optional = {"http_status": self.http_status, "http_request_id": self.http_request_id, "target": self.target}
        return facts | {name: value for name, value in optional.items() if value}


# The entry of the current call; None without an audit log. Tasks that a call starts inherit it.
current_entry: ContextVar[Entry | None] = ContextVar("current_entry", default=None)


def annotate(*, model: str = "", code: str = "") -> None:
    """Note facts about the current request."""
    entry = current_entry.get()
    if entry is not None:
        entry.model, entry.code = model or entry.model, code or entry.code


def record_request_id(request_id: str) -> None:
    """Note the id of the current request, unless it has one."""
    entry = current_entry.get()
    if entry is not None:
        entry.request_id = entry.request_id or request_id


def record_target(target: str) -> None:
    """Note what the current request acts on."""
    entry = current_entry.get()
    if entry is not None:
        entry.target = target[:MAX_TARGET_CHARS]


def record_generation(request_id: str, meter: Meter) -> None:
    """Count the tokens of a generation for the current request, and note its id unless the request has one."""
    entry = current_entry.get()
    if entry is not None:
        entry.request_id = entry.request_id or request_id
        entry.meters.append(meter)


@contextlib.contextmanager
def forked(method: str) -> Iterator[Entry | None]:
    """Tasks that start in this block note their facts in an entry of their own, which the caller ends."""
    entry = current_entry.get()
    own = None if entry is None else entry.fork(method)
    token = current_entry.set(own)
    try:
        yield own
    finally:
        current_entry.reset(token)
