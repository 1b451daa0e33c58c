"""The caller of the current call, the ids of its requests inside the services, and what is noted for the audit log."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from svc_common.config import SettingError

OWNER = re.compile(r"[A-Za-z0-9._:-]{1,64}")
OK = "OK"
CANCELLED = "CANCELLED"
MAX_TARGET_CHARS = 1000


class CallersError(SettingError):
    """A setting about callers cannot be used; the message names the flag and says what to do."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The result of a check of credentials. `credential` identifies them in the audit log and is not a secret."""

    owner: str = ""  # owns request ids and records, has limits, is the tenant; empty: callers are not identified
    credential: str = ""
    counts_apart: bool = False  # lines of batches leave the owner's limits to its other requests

    @property
    def counted_as(self) -> str:
        """Whose use is counted. No owner has this name."""
        return f"{self.owner}/batch" if self.counts_apart else self.owner

    @property
    def sender(self) -> str:
        """Has places of its own while its requests arrive. Tokens of two tenants may have one subject, or none."""
        return self.credential and f"{self.owner}/{self.credential}"


ANONYMOUS = Caller()

# The caller of the current call. Tasks that a call starts inherit it.
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANONYMOUS)
# Over HTTP: collects the targets of the routes that the current call names, for a header of the answer.
current_targets: ContextVar[list[str]] = ContextVar("current_targets")


def scoped(request_id: str) -> str:
    """The id of a request inside the services: `OWNER/request_id`, so that no other owner can abort or resume it.

    A client's request id cannot contain `/`.
    """
    owner = current_caller.get().owner
    return f"{owner}/{request_id}" if owner else request_id


def tenant_salt(owner: str, cache_salt: str) -> str:
    """The cache salt of a tenant's request, from the salt that the request has: tenants share no cached blocks.

    The length in front separates owner and salt, which may contain any characters.
    """
    pair = f"{len(owner)}:{owner}{cache_salt}"
    return f"tenant:{hashlib.sha256(pair.encode()).hexdigest()}"


def owner_name(name: str) -> str:
    """The name, or its digest if it cannot be part of a request id."""
    return name if OWNER.fullmatch(name) else hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]


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
