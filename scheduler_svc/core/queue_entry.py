"""A waiting sequence as the queue and placement see it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import Sequence

I64 = npt.NDArray[np.int64]
NEVER = sys.maxsize
Key = tuple[int, bool, float, int]  # priority, is_new, virtual arrival, seq_id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker had no room for a sequence. It is not asked again while this holds: see `WorkerBooks.refusal`."""

    room_version: int  # of the worker; changes when rows or blocks become free
    retry_at: (
        int  # answered steps of the worker after which the projected peak may be low enough; NEVER: it is no matter
    )
    can_preempt: bool  # preempting less urgent rows could make room


@dataclass(slots=True, eq=False)
class QueueEntry:
    """Created when a sequence joins the queue and dropped when it leaves: a running sequence needs none of this."""

    seq: Sequence
    num_expected_tokens: int  # known tokens and expected output, its own and of the samples that will fork from it
    key: Key = (0, True, 0.0, 0)  # its order in the queue; set by `WaitingQueue.add`
    blocked_since: float | None = None  # first time it was passed over for lack of room
    held_since: float | None = None  # first time it waited for its best worker while others had room
    refusals: dict[str, Refusal] = field(default_factory=dict)  # the latest of each worker
    num_cached_at: I64 | None = None  # leading tokens cached on each worker, in the fleet's order
    most_cached: int = 0  # the largest of these
    cached_as_of: tuple[int, int, float] = (0, 0, 0.0)  # the fleet's version and pass, and the time of that lookup

    def forget_refusals(self, worker_id: str) -> None:
        """A worker has joined that may have refused it under the same id before."""
        self.refusals.pop(worker_id, None)

    @property
    def num_rows(self) -> int:
        """Rows for it and all samples that can fork from it."""
        return 1 + len(self.seq.forks)

    @property
    def num_needed_tokens(self) -> int:
        """Tokens of KV that it is expected to need beyond what is cached."""
        return self.num_expected_tokens - self.most_cached

    @property
    def num_uncached(self) -> int:
        """Tokens to compute on the worker that has most of them cached, as of the last lookup."""
        return self.seq.data.num_tokens - self.most_cached
