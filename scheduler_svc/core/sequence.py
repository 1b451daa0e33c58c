"""Sequences, requests, waiting sequences as the queue sees them, and the table of status transitions."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from request_fields.beams import BeamParams
from request_fields.fields import StopCondition as StopCondition
from scheduler_svc.core.beams import BeamSearch
from scheduler_svc.core.pooled import Pooling
from step_protocol.columns import I64, U32


class SequenceStatus(Enum):
    """WAITING holds no blocks, RUNNING holds a row and blocks, FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"

    __hash__ = object.__hash__  # a key of dicts in hot paths; the hash of Enum is a Python function


class SequenceStage(Enum):
    """DECODE when only the newest token remains to be computed, else PREFILL."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why a sequence ended: the same values as in the protocol. Preemption is an event, never a reason."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"

    __hash__ = object.__hash__  # see SequenceStatus


TRANSITIONS: dict[SequenceStatus, set[SequenceStatus]] = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set(),
}


class IllegalTransitionError(RuntimeError):
    """A status change that the table does not allow: a bug in the scheduler."""


class Carried(Protocol):
    """An input that takes positions of a prompt in place of tokens. The core does not read its data."""

    @property
    def start(self) -> int:
        """Its first position."""

    @property
    def length(self) -> int:
        """Its number of positions."""

    @property
    def digest(self) -> bytes:
        """16 bytes that depend on its content."""


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
        """See `SequenceGroup.max_cached_tokens`."""
        num_tokens, group = len(self.data.prompt) + len(self.data.output), self.group
        if group.prompt_logprobs is None and group.pooling is None:
            return num_tokens - 1
        return group.max_cached_tokens(num_tokens)

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
    """One request: n samples that share a prompt.

    `owner` and `handle` identify the request for the caller (the gateway and the gateway's request) and are returned
    in Deltas. `sampling`, `banned_ids` and `bad_words_ids` are opaque to the core and reach the worker in RowOpen.
    `root_key` separates digest chains (cache salt, adapter, encoder input). `outputs` is the Continuation: the output
    tokens that each sample already has.
    With an encoder, the prompt begins with `num_encoder_tokens` positions, a whole number of blocks, that hold the keys
    and values of cross-attention. One chunk computes all of them, and a prefix hit has all of them or none
    (docs/adr/0052-encoders-and-pooled-rows.md). `encoder` is opaque and reaches the worker in RowOpen.
    `inputs` reach it in the same way, as far as their positions are not computed; `prompt` has content ids at these
    positions.
    `takes_over`: the request was accepted before and its stream was lost. It replaces a live group with the same
    request_id, unless the live group also took over and has another origin; then this request belongs to an older,
    delayed stream. `tenant_id`: the tenant whose share of the work the request counts against. With `beam_params`, the
    sequences are the beams of a search. When the search ends, its best sequences become the samples 0 to n - 1.
    """

    request_id: str
    prompt: U32
    stop: StopCondition
    owner: int = 0
    handle: int = 0
    n: int = 1
    priority: int = 0
    root_key: bytes = b""
    adapter: bytes = b""  # digest; part of `root_key` too. Empty: none
    sampling: Any = None
    banned_ids: bytes = b""  # packed ids that cannot be sampled at output positions below `banned_before`
    banned_before: int = 0
    bad_words_ids: Seq[Any] = ()
    num_encoder_tokens: int = 0  # 0: the model has no encoder
    encoder: Any = None
    inputs: Seq[Carried] = ()  # in the order of their positions
    num_input_bytes: int = 0  # size of their data
    images: bytes = b""  # the places of the images among them; opaque
    image_work: Seq[tuple[int, int]] = ()  # per image: its first position, and its work as a number of tokens
    outputs: Seq[U32] = ()
    finished_samples: frozenset[int] = frozenset()  # samples of a Continuation that are complete
    takes_over: bool = False
    origin: str = ""  # the gateway that sent it; equal for all streams of that gateway
    tenant_id: str = ""
    timeout_s: float | None = None  # seconds from arrival to the client's deadline
    beam_params: BeamParams | None = None
    logprobs: int | None = None  # number of most likely tokens to return with each output token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    pooling: Pooling | None = None  # the request returns these numbers instead of tokens
    num_prompt_logprobs: int = 1  # delivered prompt positions, including the first, which has no value
    traceparent: str = ""  # of the span that the spans of its rows are children of; empty: not sampled for traces
    arrival: float = 0.0
    deadline: float = math.inf
    tenant_slot: int = 0  # the core's own number for the tenant
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None  # set at arrival if `beam_params` is set

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences have ended."""
        live = [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]
        return not live

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run for this request: its samples, or its beams."""
        return self.n if self.beam_params is None else self.beam_params.width

    @property
    def pending_prompt_logprobs(self) -> int | None:
        """`prompt_logprobs` while prompt positions remain to be delivered, else None."""
        return self.prompt_logprobs if self.num_prompt_logprobs < len(self.prompt) else None

    def inputs_after(self, num_computed_tokens: int) -> Seq[Carried]:
        """The inputs that are needed to compute the positions from `num_computed_tokens` on."""
        return [carried for carried in self.inputs if carried.start + carried.length > num_computed_tokens]

    def max_cached_tokens(self, num_tokens: int) -> int:
        """The largest number of leading tokens that a sequence of `num_tokens` may take from the prefix cache. It must
        compute the newest token, each token before a prompt position that remains to be delivered, and all tokens whose
        states are pooled.
        """
        if self.pooling is not None and not self.pooling.may_hit:
            return 0
        return num_tokens - 1 if self.pending_prompt_logprobs is None else self.num_prompt_logprobs - 1


NEVER = sys.maxsize
NO_WORKERS: I64 = np.empty(0, dtype=np.int64)
Key = tuple[int, bool, float, int]  # priority, is_new, virtual arrival, seq_id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker had no room for a sequence. It is not checked again while this holds: see `WorkerState.refusal`."""

    room_version: int  # `WorkerState.room_version` at the refusal; the refusal holds until it changes
    retry_at: int  # number of answered steps at which the projected peak may be low enough; NEVER: time does not help
    can_preempt: bool  # preempting less urgent rows could make room


class QueueEntry:
    """State of a waiting sequence. Created when the sequence joins the queue, dropped when it leaves."""

    __slots__ = (
        "_key_cached", "blocked_since", "cached_as_of", "held_since", "is_new", "key", "max_cached", "num_cached_at",
        "num_expected_tokens", "num_tokens", "refusals", "seq", "uncached_at",
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
