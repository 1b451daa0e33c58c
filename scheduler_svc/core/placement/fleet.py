"""Where waiting sequences should go: what placement knows of each worker, and the choice.

Facts are columns over workers, refreshed for those to which something has happened, so that a choice costs about the
same for 8 workers and for 64.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from request_fields.sizes import SizeLimits
from scheduler_svc.core.blocks.prompt_digests import PromptDigests
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.policy import best_place, is_worth_leaving, placement_scores
from scheduler_svc.core.queue_entry import QueueEntry
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps.admission import could_run
from scheduler_svc.core.steps.worker_books import WorkerBooks

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LOOK_AGE_S = 0.5  # what is cached where may be so old: pools change slowly
NOBODY = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Choice:
    """What a look at one waiting sequence found."""

    worker: WorkerBooks
    has_room: bool  # it could go there at once, or at the worker's next step
    is_now: bool  # that step is being made
    is_held: bool  # others have room, but waiting for this worker is better


class Fleet:
    """The workers, and during one pass over the queue what the choices so far would add to each.

    `begin` opens a pass; `choose` counts each sequence where it will go, so that those behind it see that load.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_takers = 0  # workers that still have room in this pass
        self.first: WorkerCapacity | None = None  # that joined when nobody was there: what waits was measured with it
        self._config = config
        self._version = 0  # +1 whenever a worker joins or leaves: positions have changed
        self._pass = 0  # the latest one's number
        self._kept: Bools | None = None  # who takes nobody else in this pass
        self._digests = PromptDigests(config.root_salt)
        self._set([], np.zeros(0, dtype=np.int64))

    @property
    def workers(self) -> list[WorkerBooks]:
        """All of them."""
        return self._workers

    def join(self, worker: WorkerBooks) -> None:
        if not self._workers:
            self.first = worker.capacity
        filled = self._filled.min() if len(self._filled) else 0  # what is new is not filled with all that comes
        self._set([*self._workers, worker], np.append(self._filled, filled))

    def leave(self, worker: WorkerBooks) -> None:
        stays = np.array([other is not worker for other in self._workers])
        self._set([other for other in self._workers if other is not worker], self._filled[stays])

    def _set(self, workers: list[WorkerBooks], filled: I64) -> None:
        self._filled = filled  # tokens that were ever put into each pool
        self._workers = workers
        self._version += 1
        self._position = {worker.capacity.worker_id: i for i, worker in enumerate(workers)}
        self._held = [worker.pool.held for worker in workers]
        sizes = [worker.capacity for worker in workers]
        self._pool_tokens = np.array([c.num_blocks * c.block_size for c in sizes], dtype=np.int64)
        self.largest_pool = int(self._pool_tokens.max(initial=0))  # tokens
        self.most_rows = max((c.max_num_seqs for c in sizes), default=0)
        lengths = [c.max_model_len for c in sizes]
        self._size_limits = SizeLimits(min(lengths, default=0), min(self._pool_tokens.tolist(), default=0))  # of all
        steps = self._config.max_pending_prefill_steps
        self._max_pending = np.array([steps * c.max_num_batched_tokens for c in sizes], dtype=np.int64)
        self._is_open = np.array([not worker.is_draining for worker in workers], dtype=np.bool_)
        self._pending = np.zeros(len(workers), dtype=np.int64)
        self._rows = np.zeros(len(workers), dtype=np.int64)
        self._is_ready = np.zeros(len(workers), dtype=np.bool_)
        self._least_urgent = np.full(len(workers), NOBODY)
        self._pressure = np.zeros(
            len(workers)
        )  # of each pool: what is in use and what was ever put into it, by its size
        self._load, self._free_rows, self._takes = self._pending, self._rows, self._is_open
        self._is_mixed = False
        self._stale = dict(zip(self._position, workers, strict=True))
        self.touched = set(self._position)  # may have something to do: the caller takes out who has not

    def touch(self, worker: WorkerBooks) -> None:
        """Something has happened to it: its columns are read again when they are needed."""
        name = worker.capacity.worker_id
        self._stale[name] = worker
        self.touched.add(name)

    def close(self, worker: WorkerBooks) -> None:
        """It takes nothing new from now on."""
        self._is_open[self._position[worker.capacity.worker_id]] = False
        self.touch(worker)

    def could_run(self, seq: Sequence) -> bool:
        """Somebody could, if nobody else were there. While nobody takes anything, all wait alike."""
        return bool(np.count_nonzero(self._able(seq)) or not np.count_nonzero(self._is_open))

    def fill(self, worker: WorkerBooks, num_tokens: int) -> None:
        """So many tokens get new blocks of its pool."""
        self._filled[self._position[worker.capacity.worker_id]] += num_tokens

    # -- one pass over the queue --------------------------------------------------------------------------------------

    def begin(self, ready: Collection[str], *, is_mixed: bool) -> None:
        """Open a pass. `ready`: whose next step is being made. `is_mixed`: requests of several priorities are here."""
        self._pass += 1
        self._is_ready.fill(len(ready) == len(self._workers))
        if len(ready) < len(self._workers):
            self._is_ready[[self._position[name] for name in ready]] = True
        if is_mixed and not self._is_mixed:
            self._stale = dict(zip(self._position, self._workers, strict=True))
        self._is_mixed = is_mixed
        for name, worker in self._stale.items():
            self._read(self._position[name], worker)
        self._stale = {}
        self._kept = None
        self._load, self._free_rows = self._pending.copy(), self._rows.copy()
        has_rows = (self._free_rows > 0) | (self._least_urgent > NOBODY) if is_mixed else self._free_rows > 0
        self._takes = self._is_ready & self._is_open & has_rows & (self._load < self._max_pending)
        self.num_takers = int(np.count_nonzero(self._takes))

    def _read(self, i: int, worker: WorkerBooks) -> None:
        self._is_open[i] = not worker.is_draining
        self._pending[i] = worker.pending_prefill
        self._rows[i] = worker.num_free_rows
        used = worker.pool.num_used * worker.capacity.block_size
        self._pressure[i] = (self._filled[i] + used) / self._pool_tokens[i]
        self._least_urgent[i] = _least_urgent(worker) if self._is_mixed else NOBODY

    def choose(self, entry: QueueEntry, now: float, tokens_per_s: float | None) -> Choice:
        """Where the sequence should go, now or later. Some worker could run it, or it would be unschedulable."""
        seq = entry.seq
        able = self._able(seq)
        uncached = seq.data.num_tokens - self._look_again(entry, now)
        scores = placement_scores(self._load, uncached, self._config.placement_alpha)
        slack = self._config.placement_slack * self._config.placement_alpha * seq.data.num_tokens
        best = best_place(scores, slack, self._pressure, able)
        room = able & self._room(entry)
        is_held = False
        if not room[best] and np.count_nonzero(room):
            other = best_place(scores, slack, self._pressure, room)
            is_held = self._holds(entry, int(uncached[other] - uncached[best]), now, tokens_per_s)
            best = best if is_held else other
        has_room = bool(room[best])
        self._count_in(best, int(uncached[best]), entry.num_rows)
        return Choice(self._workers[best], has_room, has_room and bool(self._is_ready[best]), is_held)

    def keep_for(self, entry: QueueEntry) -> None:
        """Reserve the eligible workers of a starved sequence: they take no other one in this pass."""
        able = self._able(entry.seq)
        self._kept = able if self._kept is None else self._kept | able
        self._takes &= ~able
        self.num_takers = int(np.count_nonzero(self._takes))

    def _count_in(self, i: int, num_tokens: int, num_rows: int) -> None:
        self._load[i] += num_tokens
        self._free_rows[i] -= num_rows
        if not self._takes[i]:
            return
        has_rows = self._free_rows[i] > 0 or self._least_urgent[i] > NOBODY
        if not has_rows or self._load[i] >= self._max_pending[i]:
            self._takes[i] = False
            self.num_takers -= 1

    def _holds(self, entry: QueueEntry, extra_tokens: int, now: float, tokens_per_s: float | None) -> bool:
        if entry.held_since is None:
            entry.held_since = now
        return not is_worth_leaving(extra_tokens, now - entry.held_since, tokens_per_s, self._config.leave_part)

    def _able(self, seq: Sequence) -> Bools:
        """Who could run it if nobody else were there."""
        able = self._is_open
        if not self._size_limits.fits(len(seq.group.prompt), seq.group.stop.max_tokens):
            able = able & np.array([could_run(seq, worker.capacity) for worker in self._workers], dtype=np.bool_)
        failed = self._position.get(seq.failed_on) if seq.failed_on is not None else None
        if failed is not None and np.count_nonzero(able) > able[failed]:
            able = able.copy()
            able[failed] = False  # elsewhere, if there is an elsewhere: it may have been the machine
        return able

    def _room(self, entry: QueueEntry) -> Bools:
        """Workers with a row for it, or a less urgent one to preempt, that have not refused it and have little prefill
        pending.
        """
        room: Bools = self._free_rows > 0
        can_preempt = self._least_urgent > entry.seq.group.priority if self._is_mixed else None
        for name in entry.refusals:
            i = self._position.get(name)
            refusal = None if i is None else self._workers[i].refusal(entry)
            if refusal is not None:
                room[i] = False
                if can_preempt is not None:
                    can_preempt[i] &= refusal.can_preempt
        if can_preempt is not None:
            room |= can_preempt
        room &= self._load < self._max_pending
        if self._kept is not None:
            room &= ~self._kept
        return room

    # -- what is cached where -----------------------------------------------------------------------------------------

    def look(self, entry: QueueEntry, now: float) -> None:
        """Look up where a sequence that joins the queue is cached."""
        if self._workers:
            self._look_again(entry, now)

    def _look_again(self, entry: QueueEntry, now: float) -> I64:
        """Leading tokens cached on each worker: looked up on all if the last lookup is old, else on the ready ones."""
        seq, num_tokens = entry.seq, entry.seq.data.num_tokens
        version, last_pass, when = entry.cached_as_of
        if entry.num_cached_at is None or version != self._version or now - when >= LOOK_AGE_S:
            self.extend_digests(seq.digests, seq.data.token_ids(), seq.group.root_key)
            entry.num_cached_at, entry.most_cached = self._num_cached(seq.digests, num_tokens)
            entry.cached_as_of = (self._version, self._pass, now)
        elif last_pass != self._pass - 1 or when != now:  # else it has just joined the queue
            for i in np.flatnonzero(self._is_ready).tolist():
                entry.num_cached_at[i] = self._workers[i].num_cached(seq.digests, num_tokens)
            entry.most_cached = int(entry.num_cached_at.max())
        return entry.num_cached_at

    def _num_cached(self, digests: list[bytes], num_tokens: int) -> tuple[I64, int]:
        """On each worker, and the most of all. Most hold not even the first block."""
        first, at = digests[0] if digests else b"", zip(self._held, self._workers, strict=True)
        counts = [worker.num_cached(digests, num_tokens) if first in held else 0 for held, worker in at]
        return np.array(counts, dtype=np.int64), max(counts)

    def extend_digests(self, digests: list[bytes], token_ids: U32, root_key: bytes) -> None:
        """The digests of all full blocks of what a waiting sequence knows, as far as they are missing."""
        block_size = self._workers[0].capacity.block_size  # everybody's
        self._digests.extend(digests, token_ids, root_key, block_size)


def _least_urgent(worker: WorkerBooks) -> int:
    """Priority of what would have to leave first; NOBODY if nothing runs."""
    rows = worker.rows.active()
    return int(worker.rows.priority[rows].max()) if len(rows) else NOBODY
