"""A waiting sequence as the queue and placement see it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import Sequence

I64 = npt.NDArray[np.int64]
NEVER = sys.maxsize
NO_WORKERS: I64 = np.empty(0, dtype=np.int64)
Key = tuple[int, bool, float, int]  # priority, is_new, virtual arrival, seq_id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker had no room for a sequence. It is not checked again while this holds: see `WorkerBooks.refusal`."""

    room_version: int  # `WorkerBooks.room_version` at the refusal; the refusal holds until it changes
    retry_at: int  # number of answered steps at which the projected peak may be low enough; NEVER: time does not help
    can_preempt: bool  # preempting less urgent rows could make room


class QueueEntry:
    """State of a waiting sequence. Created when the sequence joins the queue, dropped when it leaves."""

    __slots__ = (
        "_key_cached", "blocked_since", "cached_as_of", "held_since", "is_new", "key", "most_cached", "num_cached_at",
        "num_expected_tokens", "num_tokens", "refusals", "seq", "uncached_at",
    )  # fmt: skip

    def __init__(self, seq: Sequence, num_expected_tokens: int = 0) -> None:
        self.seq = seq
        self.is_new = seq.is_new
        self.num_tokens = seq.data.num_tokens
        self.num_expected_tokens = num_expected_tokens  # with expected output, and with samples that will fork from it
        self.key: Key = (0, True, 0.0, 0)  # sort key in the queue, set by `WaitingQueue.add`
        self._key_cached = 0  # `most_cached` when the key was set
        self.blocked_since: float | None = None  # first time it was passed over for lack of room
        self.held_since: float | None = None  # first time it waited for its best worker while others had room
        self.refusals: dict[str, Refusal] = {}  # worker id -> its newest refusal
        self.num_cached_at = NO_WORKERS  # number of leading tokens cached on each worker, in the fleet's order
        self.uncached_at = NO_WORKERS  # number of tokens to compute on each worker
        self.most_cached = 0  # the largest value in `num_cached_at`
        self.cached_as_of = (0, 0, 0.0)  # fleet version, fleet pass and time of the newest lookup

    def set_key(self, virtual_arrival: float) -> None:
        """Set the sort key, which depends on `most_cached`."""
        self.key = (self.seq.group.priority, self.is_new, virtual_arrival, self.seq.seq_id)
        self._key_cached = self.most_cached

    @property
    def has_old_key(self) -> bool:
        """Whether `most_cached` has changed since the key was set."""
        return self.most_cached != self._key_cached

    def set_cached(self, num_cached_at: I64) -> None:
        """Set the number of leading tokens cached on each worker."""
        self.num_cached_at, self.uncached_at = num_cached_at, self.num_tokens - num_cached_at
        self.most_cached = int(num_cached_at[num_cached_at.argmax()])

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
        return self.num_expected_tokens - self.most_cached
