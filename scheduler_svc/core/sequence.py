"""Sequences, requests, waiting sequences as the queue sees them, and the table of status transitions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from prefix_index.hashing import NO_KEYS
from request_fields.fields import FinishReason as FinishReason
from request_fields.fields import StopCondition as StopCondition
from step_protocol.columns import I64, U32


class SequenceStatus(Enum):
    """WAITING holds no blocks, RUNNING holds a row and blocks, FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"

    __hash__ = object.__hash__  # a key of dicts in hot paths; the hash of Enum is a Python function


TRANSITIONS: dict[SequenceStatus, set[SequenceStatus]] = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set(),
}


class IllegalTransitionError(RuntimeError):
    """A status change that the table does not allow: a bug in the scheduler."""


class Completion(NamedTuple):
    """A complete output of a request whose outputs are known only when it ends."""

    score: float
    logprob: float  # sum over all output tokens
    token_ids: U32
    end: FinishReason


class Feature:
    """One thing that some requests use and others do not, as an object with hooks. The defaults do nothing.

    This class is the request's half: what the core must know before the request has a row. The attributes are traits:
    planner, queue and placement ask for a trait and never for a feature by name. `part` is the other half: it keeps the
    state of the feature's rows on one worker (`WorkerPart`).
    """

    part: Any = None  # a subclass of WorkerPart; None: the feature keeps no state per worker
    num_sequences = 0  # sequences that run for the request; 0: one per sample
    is_gang = False  # its sequences run together: they are admitted, preempted and ended together
    chooses_tokens = False  # the scheduler chooses its tokens from the worker's answers; clients get them at the end
    is_private = False  # its blocks do not become cached prefixes
    limits_hits = False  # see `max_cached_tokens`
    selects_workers = False  # not every worker with a large enough pool could run it: see `WorkerPart.could_run`
    needs_preparation = False  # a worker must prepare before it opens a row: see `WorkerPart.is_ready`
    num_head_tokens = 0  # the first positions, which one chunk computes, and of which a hit has all or none
    num_bytes = 0  # data that the scheduler keeps until the request ends, and sends with its rows

    def begin(self, group: SequenceGroup, eos_token_ids: frozenset[int]) -> None:
        """The request is accepted."""

    def max_cached_tokens(self, group: SequenceGroup, num_tokens: int) -> int:
        """The largest number of leading tokens that a sequence of `num_tokens` may take from the prefix cache."""
        return num_tokens - 1

    def block_keys(self, block_size: int) -> Mapping[int, bytes]:
        """What blocks of the prompt hold besides tokens, by index: part of their digests."""
        return NO_KEYS

    def preempted(self) -> None:
        """The sequences of a gang were preempted."""


F = TypeVar("F", bound=Feature)


class Features:
    """The features that one request uses. Their traits are joined once, so that reading one costs no call."""

    __slots__ = (
        "chooses_tokens", "is_gang", "is_private", "items", "limits_hits", "needs_preparation", "num_bytes",
        "num_head_tokens", "num_sequences", "selects_workers",
    )  # fmt: skip

    def __init__(self, *items: Feature) -> None:
        self.items = items
        self.num_sequences = max((item.num_sequences for item in items), default=0)
        self.is_gang = any(item.is_gang for item in items)
        self.chooses_tokens = any(item.chooses_tokens for item in items)
        self.is_private = any(item.is_private for item in items)
        self.limits_hits = any(item.limits_hits for item in items)
        self.selects_workers = any(item.selects_workers for item in items)
        self.needs_preparation = any(item.needs_preparation for item in items)
        self.num_head_tokens = max((item.num_head_tokens for item in items), default=0)
        self.num_bytes = sum(item.num_bytes for item in items)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.items)

    def find(self, kind: type[F]) -> F | None:
        """The feature of this kind, if the request uses it."""
        for item in self.items:
            if isinstance(item, kind):
                return item
        return None

    def get(self, kind: type[F]) -> F:
        """The feature of this kind. The request uses it."""
        found = self.find(kind)
        if found is None:
            raise RuntimeError(f"a request does not use {kind.__name__}: a bug in the scheduler")
        return found

    def block_keys(self, block_size: int) -> Mapping[int, bytes]:
        """See `Feature.block_keys`. Keys of one block are joined in the order of the features."""
        joined: dict[int, bytes] = {}
        for item in self.items:
            for index, key in item.block_keys(block_size).items():
                joined[index] = joined.get(index, b"") + key
        return joined


NO_FEATURES = Features()


@dataclass(slots=True)
class SequenceData:
    """The tokens of a sequence that survive preemption. All samples of a group share one prompt array."""

    prompt: U32  # [num_prompt_tokens], shared by all samples of the group
    output: U32  # [num_output_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def token_ids(self) -> U32:
        """Prompt and output in one array (the prompt itself while there is no output)."""
        return np.concatenate((self.prompt, self.output)) if len(self.output) else self.prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. While it runs, its tokens and blocks live in its worker's columns (`rows.py`)."""

    group: SequenceGroup
    sample_index: int
    data: SequenceData
    seq_id: int
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    worker_id: str | None = None
    row: int | None = None
    digests: list[bytes] = field(default_factory=list)  # chain digests of its full blocks, as far as computed
    forks: list[Sequence] = field(default_factory=list)  # samples that fork from this one when its prompt is computed
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_computed_peak: int = 0  # largest number of tokens computed so far, to count recomputed tokens
    num_preemptions: int = 0
    processor_us: float = 0.0  # of the rows that it has had (costs.py)
    block_s: float = 0.0
    requeue_reason: str = ""  # of the last preemption: "preempted", or the value of a MigrationReason
    is_admitted_before: bool = False
    admitted_at: float | None = None  # first admission
    failed_on: str | None = None  # the worker on which its row failed; a second failure ends the sequence

    def move_to(self, status: SequenceStatus) -> None:
        """The only way to change status; raises IllegalTransitionError with both names."""
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransitionError(f"sequence {self.seq_id}: {self.status.name} -> {status.name}")
        self.status = status

    def count_cached(self, num_cached: int) -> None:
        """Record an admission with this number of leading tokens cached."""
        if self.is_admitted_before:
            self.num_recomputed_tokens += max(0, self.num_computed_peak - num_cached)
            return
        self.is_admitted_before = True
        for sample in (self, *self.forks):
            sample.num_cached_tokens = min(num_cached, len(self.group.prompt))

    @property
    def max_cached_tokens(self) -> int:
        """The largest number of leading tokens that it may take from the prefix cache: it computes one at least."""
        num_tokens, group = len(self.data.prompt) + len(self.data.output), self.group
        return group.max_cached_tokens(num_tokens) if group.features.limits_hits else num_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_new(self) -> bool:
        """Whether, as far as the scheduler knows, the client has not received a token of it yet."""
        return not (self.group.takes_over or self.is_admitted_before)

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """Sort key by urgency, most urgent first: priority, then streams that have begun, then arrival, then seq_id."""
        return (self.group.priority, self.is_new, self.group.arrival, self.seq_id)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request: n samples that share a prompt, and the features that it uses.

    `owner` and `handle` identify the request for the caller (the gateway and the gateway's request) and are returned
    in Deltas. `options` is opaque to the core and reaches the worker with its rows. `root_key` separates
    digest chains (cache salt, adapter, encoder input). `outputs` is the Continuation: the output tokens that each
    sample already has.
    `takes_over`: the request was accepted before and its stream was lost. It replaces a live group with the same
    request_id, unless the live group also took over and has another origin; then this request belongs to an older,
    delayed stream. `tenant_id`: the tenant whose share of the work the request counts against. `conversation`:
    it is a turn of this one, and will be continued, so its blocks are evicted like those that were hit.
    """

    request_id: str
    prompt: U32
    stop: StopCondition
    owner: int = 0
    handle: int = 0
    n: int = 1
    priority: int = 0
    conversation: int = 0  # 0: none
    root_key: bytes = b""
    options: Any = None
    features: Features = NO_FEATURES
    outputs: Seq[U32] = ()
    finished_samples: frozenset[int] = frozenset()  # samples of a Continuation that are complete
    takes_over: bool = False
    origin: str = ""  # the gateway that sent it; equal for all streams of that gateway
    tenant_id: str = ""
    timeout_s: float | None = None  # seconds from arrival to the client's deadline
    traceparent: str = ""  # of the span that the spans of its rows are children of; empty: not sampled for traces
    arrival: float = 0.0
    deadline: float = math.inf
    tenant_slot: int = 0  # the core's own number for the tenant
    keeps_kv: bool = False  # rows of it have keys and values of several weights: their blocks become no prefixes
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences have ended."""
        return not [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run for this request."""
        return self.features.num_sequences or self.n

    def max_cached_tokens(self, num_tokens: int) -> int:
        """The largest number of leading tokens that a sequence of `num_tokens` may take from the prefix cache."""
        return min((item.max_cached_tokens(self, num_tokens) for item in self.features), default=num_tokens - 1)


NEVER = sys.maxsize
NO_WORKERS: I64 = np.empty(0, dtype=np.int64)
Key = tuple[int, bool, float, int]  # priority, is_new, virtual arrival, seq_id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker had no room for a sequence. It is not checked again while this holds: see `WorkerState.refusal`."""

    room_version: int  # `WorkerState.room_version` at the refusal; the refusal holds until it changes
    retry_at: int  # number of answered steps at which the projected peak may be low enough; NEVER: time does not help
    can_preempt: bool  # preempting less urgent rows could make room
    num_excess: int = 1  # number of blocks that the projected peak had too many
    num_tokens: int = sys.maxsize  # it also holds for sequences that need as many tokens (`num_needed_tokens`) or more
    priority: int = 0  # and are no more urgent
    of_tenant: bool = False  # the free rows are kept for other tenants, so the sequence reserves no worker

    def covers(self, entry: QueueEntry) -> bool:
        """Whether it holds for this sequence too."""
        return entry.num_needed_tokens >= self.num_tokens and entry.key[0] >= self.priority


class QueueEntry:
    """State of a waiting sequence. Created when the sequence joins the queue, dropped when it leaves."""

    __slots__ = (
        "_key_cached", "blocked_since", "cached_as_of", "held_since", "is_new", "key", "max_cached", "move",
        "num_cached_at", "num_expected_tokens", "num_tokens", "refusals", "search", "seq", "uncached_at",
    )  # fmt: skip

    def __init__(self, seq: Sequence, num_expected_tokens: int = 0) -> None:
        self.seq = seq
        self.is_new = seq.is_new
        self.num_tokens = seq.data.num_tokens
        self.num_expected_tokens = num_expected_tokens  # with expected output, and with samples that will fork from it
        self.key: Key = (0, True, 0.0, 0)  # sort key in the queue, set by `WaitingQueue.add`
        self._key_cached = 0  # `max_cached` when the key was set
        self.blocked_since: float | None = None  # first time it was passed over for lack of room
        self.held_since: float | None = None  # first time it waited for its best worker while others had room
        self.refusals: dict[str, Refusal] = {}  # worker id -> its newest refusal
        self.num_cached_at = NO_WORKERS  # number of leading tokens cached on each worker, in the placement's order
        self.uncached_at = NO_WORKERS  # number of tokens to compute on each worker
        self.move: Any = None  # the move of blocks that it waits for or has waited for (BlockMove)
        self.search: Any = None  # the search for its blocks on workers of other schedulers (BlockSearch)
        self.max_cached = 0  # the largest value in `num_cached_at`
        self.cached_as_of = (0, 0, 0.0)  # placement version, placement pass and time of the newest lookup

    def set_key(self, virtual_arrival: float) -> None:
        """Set the sort key, which depends on `max_cached`."""
        self.key = (self.seq.group.priority, self.is_new, virtual_arrival, self.seq.seq_id)
        self._key_cached = self.max_cached

    @property
    def has_old_key(self) -> bool:
        """Whether `max_cached` has changed since the key was set."""
        return self.max_cached != self._key_cached

    def set_cached(self, num_cached_at: I64) -> None:
        """Set the number of leading tokens cached on each worker."""
        self.num_cached_at, self.uncached_at = num_cached_at, self.num_tokens - num_cached_at
        self.max_cached = int(num_cached_at[num_cached_at.argmax()])

    def is_starved(self, now: float, aging_s: float) -> bool:
        """Record that the sequence was passed over for lack of room. True if that first happened `aging_s` ago: the
        sequence is starved.
        """
        if self.blocked_since is None:
            self.blocked_since = now
        return now - self.blocked_since >= aging_s

    def forget_refusals(self, worker_id: str) -> None:
        """Drop the refusal of an earlier worker process with the same id."""
        self.refusals.pop(worker_id, None)

    @property
    def num_rows(self) -> int:
        """Number of rows for the sequence and all samples that will fork from it."""
        return 1 + len(self.seq.forks)

    @property
    def num_needed_tokens(self) -> int:
        """Expected number of tokens that need KV and are not cached."""
        return self.num_expected_tokens - self.max_cached
