"""Placement: the worker on which a waiting sequence should run.

One pass over the queue (`assign`) chooses for each waiting sequence, in the order of the queue, on which worker it
should run, and offers it to that worker. The choice holds for this pass only: a sequence stays in the queue until a
step admits it, so a better worker may be found in every pass. Nothing is bound early.

The choice
    score = slowness of prefill * (expected prefill + alpha * tokens that the worker would compute for the sequence)
    tie   = slowness of a step * (rows in use + 1 + fraction of the pool that was written lately)

    The lowest score wins. The first term is the load of the worker: prompt tokens that are admitted and not computed,
    plus those that this pass has placed before. The second is the sequence without its cached prefix; it counts more
    (`placement_alpha`), because blocks that are computed twice also evict others. Among workers that tie
    (`policy.ties`) the least busy one wins, so that a prefix which all requests share does not keep workers idle.
    Slowness is measured (`policy.slowness`), and 1 again after MAX_MEASURE_AGE admissions without an answer, so that a
    worker that was slow once is tried again. What was written decays with each write: after one turnover of all pools
    little of it counts.

    Only eligible workers count: those whose pool and features could run the sequence if they were idle, which do not
    drain, and, if there is another one, on which its row has not failed.

Room
    A worker has room while it has a free row (or, if priorities differ, a less urgent row to preempt), less than
    `max_pending_prefill_steps` of expected prefill, and no valid refusal of this sequence. A prompt that is longer than
    a step counts as one step, and a worker with such a prompt accepts no second one. If the best worker has no
    room but another one has, the sequence goes there only if computing its prefix again takes less than a fraction of
    the wait that it saves (`policy.is_worth_leaving`); else it is *held* for the best worker. A starved sequence
    reserves its eligible workers: they accept no other sequence in this pass.

    A sequence whose worker plans a step now is offered to it at once (`Offer`). A worker that refuses one has no room
    for others that need as much, until some of its rows or blocks become free (`Refusal`), and what no worker has room
    for is passed over without a price. The pass ends when no ready worker accepts more, or when `max_bypass` sequences
    have found no room. So a pass costs what it admits, and not what it refuses: thousands of waiting sequences cost no
    more than a few.

Moves
    Where workers can move blocks, a prefix in a worker's tier or in the pool of another worker counts as cached at its
    price (`BlockMoves.gains`). If the chosen worker has room, the move begins, and the sequence is held until it ends.

Roles
    A prompt on a decode worker also counts the delay of the worker's streams (features/roles.py).

What is kept, and why it stays right
    The inputs are columns with one value per worker. `mark_changed` names the workers whose values may differ; only
    these are read again at the next pass, so one choice costs about the same for 8 workers and for 64.
    The cached prefix of a sequence is looked up on all workers when it joins the queue and when the lookup is older
    than MAX_LOOKUP_AGE_S, and in between on the ready workers only: pools change slowly, and the worker that admits the
    sequence matches its prefix exactly. So these numbers are estimates and never decide what is read from a pool.
    Most answers change one worker while most sequences wait for another one. If all sequences of the last pass wait
    (`Wait`), and every worker that has changed since is still worse by the same rule that chose, the pass is skipped.

    Positions of workers are valid until one joins or leaves, which raises `_version`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefix_index.hashing import NO_KEYS
from request_fields.sizes import SizeLimits
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.block_moves import BlockMoves
from scheduler_svc.core.features.roles import Roles
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.policy import (
    is_worth_leaving,
    least_busy,
    placement_scores,
    places_near_best,
    slowness,
    ties,
)
from scheduler_svc.core.prompt_digests import PromptDigests
from scheduler_svc.core.sequence import NEVER, QueueEntry, Refusal, Sequence, SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import I64, U32, Bools
from step_protocol.types import WorkerRole

F64 = npt.NDArray[np.float64]

MAX_LOOKUP_AGE_S = 0.5  # age at which a lookup of cached tokens is repeated on all workers: pools change slowly
MAX_MEASURE_AGE = 256  # admissions after which the times of a worker that has not answered since are unknown again
MAX_SKIPPED = 256  # sequences per pass that wait for one worker and compete with none for the others
NOTHING_RUNS = np.iinfo(np.int64).min  # below every priority number: there is no row to preempt
NOT_REFUSED = Refusal(room_version=0, retry_at=NEVER, can_preempt=True)

Offer = Callable[[WorkerState, QueueEntry], bool]  # admits the sequence if it fits; whether the worker accepts more


class Wait(NamedTuple):
    """The decision to wait for a worker, with what it depended on. It stands while no other worker has become as good
    (`Placement.would_wait`), so that the next pass need not place the sequence again.

    The worker has room but its next step is not planned now, or it has no room while `other` has.
    """

    entry: QueueEntry
    version: int  # of the placement
    near: list[int]  # positions of the workers that tie with the one of the best score
    score: float  # the best score
    load: float  # of the worker with this score
    slack: float  # within which scores tie
    other: int | None = None  # position of a worker that has room while the best one has none
    extra_tokens: int = 0  # the fewest tokens that any other worker would have to compute more


class WorkerChoice(NamedTuple):
    """The decision for one waiting sequence."""

    worker: WorkerState
    has_room: bool  # the worker has room in its next step
    is_now: bool  # the step is being planned now
    is_held: bool  # it is better to wait for this worker, even if others have room
    is_prepared: bool = True  # false: the worker prepares first
    is_elsewhere: bool = False  # no worker that accepts sequences in this pass could run it
    wait: Wait | None = None


class Placement:
    """The workers, and the load that the current pass over the queue adds to each."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.moves: BlockMoves | None = None  # set while some worker can move blocks
        self.roles: Roles | None = None  # set while some worker has a role
        self.first: WorkerCapacity | None = None  # the first that joined; requests were checked against it
        self._config = config
        self._version = 0  # +1 whenever a worker joins or leaves, because positions change
        self._pass = 0  # number of the newest pass
        self._num_admitted = 0
        self._reserved: Bools | None = None  # workers reserved for starved sequences in this pass
        self._digests = PromptDigests(config.root_salt)
        self.preparing: dict[str, WorkerState] = {}  # asked to prepare since the caller last looked
        self._waits: list[Wait] = []  # of the last pass, if all its sequences got one
        self._is_cut = False  # the last pass ended before the queue
        self._set([], np.zeros(0))

    def join(self, worker: WorkerState) -> None:
        if not self._workers:
            self.first = worker.capacity
        written = self._written.min() if len(self._written) else 0  # 0 would direct all requests to a new worker
        self._set([*self._workers, worker], np.append(self._written, written))

    def leave(self, worker: WorkerState) -> None:
        self.preparing.pop(worker.capacity.worker_id, None)
        stays = np.array([other is not worker for other in self._workers])
        self._set([other for other in self._workers if other is not worker], self._written[stays])

    def _set(self, workers: list[WorkerState], written: F64) -> None:
        self._written = written  # tokens written into each pool during one turnover of all pools
        self.workers = self._workers = workers  # by position
        self._version += 1
        self._position = {worker.capacity.worker_id: i for i, worker in enumerate(workers)}
        self._held = [worker.pool.held for worker in workers]
        sizes = [worker.capacity for worker in workers]
        self._pool_tokens = np.array([c.num_blocks * c.block_size for c in sizes], dtype=np.int64)
        self._all_pools = max(1, int(self._pool_tokens.sum()))
        self.largest_pool = int(self._pool_tokens.max(initial=0))  # tokens
        limits = [c.size_limits for c in sizes]
        self.longest = max((limit.pool_tokens for limit in limits), default=0)  # slots that one sequence may need
        self.max_rows = max((c.max_num_seqs for c in sizes), default=0)
        # Sequences within these limits could run on every worker.
        self._size_limits = SizeLimits(
            min((limit.max_model_len for limit in limits), default=0),
            min((limit.pool_tokens for limit in limits), default=0),
        )
        steps = self._config.max_pending_prefill_steps
        self._max_pending = np.array([steps * c.max_num_batched_tokens for c in sizes], dtype=np.int64)
        self._is_open = np.array([not worker.is_draining for worker in workers], dtype=np.bool_)
        self._expected_prefill = np.zeros(len(workers), dtype=np.int64)
        self._rows = np.zeros(len(workers), dtype=np.int64)
        self._least_urgent = np.full(len(workers), NOTHING_RUNS)
        self._budgets = np.array([c.max_num_batched_tokens for c in sizes], dtype=np.int64)
        self._with_long = self._takes_no_long = frozenset[int]()  # workers with a long prompt; with those of this pass
        self._is_decode = [c.role is WorkerRole.DECODE for c in sizes]
        self._num_delayed = np.zeros(len(workers), dtype=np.int64)  # streams that a prompt would delay
        self._refused_tokens = np.full(len(workers), NEVER)  # the least that each worker has refused, as in `Refusal`
        self._refused_priority = np.zeros(len(workers), dtype=np.int64)
        self._may_preempt = np.ones(len(workers), dtype=np.bool_)
        self._refused_from = NEVER  # tokens from which no worker has room for a sequence, as known in this pass
        self._are_equal = len({limit.pool_tokens for limit in limits}) < 2
        self._max_rows = np.array([c.max_num_seqs for c in sizes], dtype=np.int64)
        self._times = np.full((2, len(workers)), np.inf)  # seconds of a decode step and of a prompt token; inf: unknown
        self._measured_at = np.zeros(len(workers), dtype=np.int64)  # in admissions; NEVER: unknown since it was too old
        self._step_slowness = self._slowness = np.ones(len(workers))  # relative to the fastest worker
        self._is_known_until = -1  # number of admissions until which these hold
        self._load, self._free_rows = self._expected_prefill, self._rows
        self._had_room = np.zeros(len(workers), dtype=np.bool_)  # open, with free rows and little expected prefill
        self._has_room = self._had_room  # the same, with what the current pass adds
        self._can_take = [False] * len(workers)  # has room, also by preempting, and does not drain
        self._ready: set[int] = set()  # positions of the ready workers
        self._accepts: set[int] = set()  # positions of the ready workers that accept more sequences in this pass
        self._is_mixed = False
        self._stale = dict(zip(self._position, workers, strict=True))
        self._unchecked = dict(self._stale)  # changed since the last pass, or since `would_wait`
        self.changed = set(self._position)  # workers that may have work; the caller removes idle workers

    def mark_changed(self, worker: WorkerState) -> None:
        """Read the worker's values again at the next pass."""
        name = worker.capacity.worker_id
        self._stale[name] = self._unchecked[name] = worker
        self.changed.add(name)

    def change_root(self, root_salt: bytes) -> None:
        """The digests of all sequences start from this salt, and are looked up again."""
        self._digests = PromptDigests(root_salt)
        self._set(self._workers, self._written)

    def drain(self, worker: WorkerState) -> None:
        """Stop placing new sequences on the worker."""
        self._is_open[self._position[worker.capacity.worker_id]] = False
        self.mark_changed(worker)

    def could_run(self, group: SequenceGroup, failed_on: str | None = None) -> bool:
        """Whether some worker could run a sequence of the request if it were idle. Always true while every worker
        drains. `failed_on`: see `Sequence.failed_on`.
        """
        eligible = self._eligible(group, failed_on)
        return eligible is self._is_open or bool(np.count_nonzero(eligible) or not np.count_nonzero(self._is_open))

    def add_written(self, worker: WorkerState, num_tokens: int) -> None:
        """Count tokens for which new blocks of the worker's pool are allocated."""
        self._written *= 1 - num_tokens / self._all_pools
        self._written[self._position[worker.capacity.worker_id]] += num_tokens
        self._num_admitted += 1

    # -- one pass over the queue --------------------------------------------------------------------------------------

    def assign(
        self,
        waiting: WaitingQueue,
        ready: Collection[str],
        now: float,
        tokens_per_s: float | None,
        offer: Offer,
        *,
        is_mixed: bool,
    ) -> None:
        """Offer waiting sequences to the ready workers with room, in the order of the queue, which stays as it is.
        `ready`: the workers whose next step is planned now. `is_mixed`: live requests differ in priority.
        `tokens_per_s`: the pace of one worker, if known.
        """
        if not waiting.num_schedulable or not self._may_admit(waiting, ready, is_mixed=is_mixed):
            return
        if self._waits and not is_mixed and self._waits_still_hold(waiting, now, tokens_per_s):
            return
        self._begin_pass(ready, is_mixed=is_mixed)
        found: list[Wait | None] = []
        moved: list[QueueEntry] = []
        num_passed = num_skipped = 0
        self._is_cut = False
        for entry in waiting if self._accepts else ():
            choice = self.place(entry, now, tokens_per_s)
            found.append(choice.wait)
            if entry.has_old_key:
                moved.append(entry)
            if choice.is_now:
                accepts_more = offer(choice.worker, entry)
                if not accepts_more or choice.worker.smallest_refused is not None:
                    self._note_offer(choice.worker, accepts_more=accepts_more)
            elif choice.has_room or choice.is_held or choice.is_elsewhere or not choice.is_prepared:
                num_skipped += 1  # later sequences take no place from it
            else:
                num_passed += 1
            is_waiting = not choice.has_room and not choice.is_held and entry.is_starved(now, self._config.aging_s)
            if is_waiting and not any(refusal.of_tenant for _, refusal in self._refusals(entry)):
                self._serve_starved(entry, choice)
            self._is_cut = num_passed > self._config.max_bypass or num_skipped > MAX_SKIPPED
            if self._is_cut or not self._accepts:
                break
        for entry in moved:
            waiting.move(entry)
        self._waits = [] if is_mixed or None in found else [wait for wait in found if wait is not None]

    def _note_offer(self, worker: WorkerState, *, accepts_more: bool) -> None:
        i = self._position[worker.capacity.worker_id]
        self._read_refusal(i, worker)
        if self._are_equal and not self._is_mixed:
            self._refused_from = int(np.where(self._has_room, self._refused_tokens, 0).max())
        if not accepts_more:
            self._ready.discard(i)
            self._accepts.discard(i)

    def _may_admit(self, waiting: WaitingQueue, ready: Collection[str], *, is_mixed: bool) -> bool:
        """Whether some ready worker has not refused some sequence that may be admitted next.

        A refusal holds until rows or blocks become free. Only for the first sequence it also ends when the projected
        peak may have fallen far enough: retrying all of them would cost more than it gains.
        """
        first, workers = next(iter(waiting)), []
        for name in ready:
            worker = self._workers[self._position[name]]
            if is_mixed or worker.num_free_rows > 0:
                if not first.refusals and worker.smallest_refused is None:
                    return True
                worker.expire_refusal(first)
                workers.append(worker)
        entries = islice(waiting, self._config.max_bypass + 1) if workers else ()
        refusals = (worker.refusal(entry) for entry in entries for worker in workers)
        return any(refusal is None or (is_mixed and refusal.can_preempt) for refusal in refusals)

    def _waits_still_hold(self, waiting: WaitingQueue, now: float, tokens_per_s: float | None) -> bool:
        """Whether a pass would choose as the last one, in which all sequences got a wait. Most answers change one
        worker, while most sequences wait for another.
        """
        waits = self._waits
        entries = list(islice(waiting, len(waits) + (not self._is_cut)))  # no others unless the pass was cut
        is_same = len(entries) == len(waits) and all(map(is_, entries, (wait.entry for wait in waits)))
        return is_same and self.would_wait(waits, now, tokens_per_s)

    def _begin_pass(self, ready: Collection[str], *, is_mixed: bool) -> None:
        """Read the workers that have changed, and forget what the last pass has placed and reserved."""
        self._pass += 1
        self._ready = {self._position[name] for name in ready}
        if is_mixed != self._is_mixed:
            self._stale, self._is_mixed = dict(zip(self._position, self._workers, strict=True)), is_mixed
        for name, worker in self._stale.items():
            self._read(self._position[name], worker)
        self._stale, self._unchecked = {}, {}
        if self._num_admitted > self._is_known_until and len(self._workers) > 1:
            old = self._num_admitted - self._measured_at > MAX_MEASURE_AGE
            self._times[:, old], self._measured_at[old] = np.inf, NEVER
            self._step_slowness, self._slowness = slowness(self._times)
            self._is_known_until = MAX_MEASURE_AGE + int(self._measured_at.min())
        self._reserved, self._takes_no_long = None, self._with_long
        self._refused_from = NEVER
        self._load, self._free_rows = self._expected_prefill.copy(), self._rows.copy()
        self._has_room = self._had_room.copy()
        self._accepts = {i for i in self._ready if self._can_take[i]}

    def _read(self, i: int, worker: WorkerState) -> None:
        expected_prefill, num_rows, is_open = worker.expected_prefill, worker.num_free_rows, not worker.is_draining
        takes_prefill = is_open and expected_prefill < self._max_pending.item(i)
        has_long = expected_prefill >= self._budgets.item(i) and worker.has_long_prompt
        if has_long != (i in self._with_long):
            self._with_long = self._with_long ^ {i}
        self._is_open[i] = is_open
        self._expected_prefill[i], self._rows[i] = expected_prefill, num_rows
        self._read_times(i, worker)
        self._measured_at[i] = self._num_admitted
        if self._is_decode[i]:
            self._num_delayed[i] = worker.rows.num_used
        if worker.smallest_refused is not None or self._refused_tokens.item(i) != NEVER:
            self._read_refusal(i, worker)
        self._least_urgent[i] = least_urgent = _least_urgent(worker) if self._is_mixed else NOTHING_RUNS
        self._had_room[i] = takes_prefill and num_rows > 0
        self._can_take[i] = takes_prefill and (num_rows > 0 or least_urgent > NOTHING_RUNS)

    def _read_times(self, i: int, worker: WorkerState) -> None:
        times = [worker.decode_s or np.inf, worker.prompt_token_s or np.inf]
        if self._times[:, i].tolist() != times:
            self._times[:, i], self._is_known_until = times, -1

    def _read_refusal(self, i: int, worker: WorkerState) -> None:
        refusal = worker.smallest_refused
        if refusal is None or not worker.holds(refusal):
            refusal = NOT_REFUSED
        self._refused_tokens[i], self._refused_priority[i] = refusal.num_tokens, refusal.priority
        self._may_preempt[i] = refusal.can_preempt

    def place(self, entry: QueueEntry, now: float, tokens_per_s: float | None) -> WorkerChoice:
        """Choose the worker for a sequence, now or later. At least one worker is eligible, because the sequence is
        schedulable.
        """
        is_refused = self._refused_from != NEVER and entry.num_needed_tokens >= self._refused_from
        is_known, features = entry.cached_as_of[0] == self._version, entry.seq.group.features
        if is_refused and is_known and not features.selects_workers:
            return WorkerChoice(self._workers[0], False, False, False)
        self._update_cached(entry, now)
        if len(self._workers) == 1 and not (self._is_mixed or features.needs_preparation or self.moves is not None):
            return self._place_alone(entry)
        seq, needs_preparation = entry.seq, features.needs_preparation
        eligible = self._candidates(entry)
        if eligible is None:
            return WorkerChoice(self._workers[0], False, False, is_held=True)
        room = self._room(entry)
        if eligible is not self._is_open or self._is_mixed:
            room = eligible & room
        if not np.count_nonzero(room) and not needs_preparation:  # no score would change that
            return WorkerChoice(self._workers[0], False, False, False, is_elsewhere=self._is_elsewhere(eligible))
        uncached = entry.uncached_at
        if self.moves is not None:
            uncached = np.maximum(uncached - self.moves.gains(self._workers, entry), 1)
        num_delayed = 0 if self.roles is None else self._num_delayed
        scores = self._slowness * placement_scores(self._load, uncached, self._config.placement_alpha, num_delayed)
        slack = self._config.placement_slack * self._config.placement_alpha * entry.num_tokens
        near = places_near_best(scores, slack, self._load, eligible)
        best = self._least_busy(near)
        if needs_preparation:
            room &= np.array([worker.is_ready(seq.group) for worker in self._workers], dtype=np.bool_)
        is_held, wait = False, None
        if not room[best] and np.count_nonzero(room):
            other = self._least_busy(places_near_best(scores, slack, self._load, room))
            costs = uncached * (1 + num_delayed)
            is_held = self._should_wait(entry, int(costs[other] - costs[best]), now, tokens_per_s)
            if is_held:
                more = costs - costs[best]
                more[best] = more.max()
                wait = self._wait(entry, near, scores, slack)._replace(other=other, extra_tokens=int(more.min()))
            else:
                best = other
        elif room[best] and best not in self._ready:
            wait = self._wait(entry, near, scores, slack)
        if needs_preparation:
            wait = None  # each pass asks the worker to prepare
            is_preparing = self._prepare(self._workers[best], seq.group)
            if is_preparing is not None:
                return WorkerChoice(self._workers[best], False, False, is_preparing, is_prepared=False)
        has_room = bool(room[best])
        is_elsewhere = not has_room and self._is_elsewhere(eligible)
        if has_room or is_held:
            self._count_in(best, int(uncached[best]), entry.num_rows)
        is_now = has_room and best in self._ready
        if self.moves is not None:
            wait = None  # each pass prices the moves again
            if has_room and self.moves.wait_for(self._workers[best], entry, now):
                return WorkerChoice(self._workers[best], False, False, is_held=True, is_prepared=False)
        return WorkerChoice(self._workers[best], has_room, is_now, is_held, is_elsewhere=is_elsewhere, wait=wait)

    def _least_busy(self, places: I64) -> int:
        rows, written = self._max_rows - self._free_rows, self._written / self._pool_tokens
        return least_busy(places, rows, written, self._step_slowness) if len(places) > 1 else places.item(0)

    def _candidates(self, entry: QueueEntry) -> Bools | None:
        """The workers on which a sequence may run; None if each of them has a long prompt, as the sequence is."""
        seq = entry.seq
        eligible = self._eligible(seq.group, seq.failed_on)
        if self._takes_no_long:
            eligible = self._without_long(entry, eligible)
            if not np.count_nonzero(eligible):
                return None
        return eligible if self.roles is None else self.roles.eligible(self._workers, seq, eligible)

    def _place_alone(self, entry: QueueEntry) -> WorkerChoice:
        """`place` for the only worker, which needs no scores. They would cost three times as much as the rest."""
        if self._takes_no_long and not self._without_long(entry, self._is_open)[0]:
            return WorkerChoice(self._workers[0], False, False, is_held=True)
        has_room = bool(self._room(entry)[0])
        if has_room:
            self._count_in(0, int(entry.uncached_at[0]), entry.num_rows)
        return WorkerChoice(self._workers[0], has_room, has_room and 0 in self._ready, is_held=False)

    def _without_long(self, entry: QueueEntry, eligible: Bools) -> Bools:
        """Only the workers where the sequence would be no second long prompt."""
        eligible = eligible.copy()
        for i in self._takes_no_long:
            eligible[i] &= not self._workers[i].is_long(entry.uncached_at.item(i))
        return eligible

    def _is_elsewhere(self, eligible: Bools) -> bool:
        """Whether no worker that accepts sequences in this pass is among the eligible ones."""
        return eligible is not self._is_open and self._accepts.isdisjoint(eligible.nonzero()[0].tolist())

    def _wait(self, entry: QueueEntry, near: I64, scores: F64, slack: float) -> Wait:
        best = near[scores[near].argmin()]
        return Wait(entry, self._version, near.tolist(), float(scores[best]), float(self._load[best]), slack)

    def would_wait(self, waits: list[Wait], now: float, tokens_per_s: float | None) -> bool:
        """Whether `place` would choose as in the last pass, in which the first sequences of the queue got these waits.
        Only the workers that have changed since could change a choice. Not for live requests of different priorities.
        """
        changed, self._unchecked = self._unchecked, {}
        for name, worker in changed.items():
            self._read_times(self._position[name], worker)
        if self._is_known_until < 0 and (slowness(self._times)[1] != self._slowness).any():
            return False
        return all(
            wait.version == self._version
            and now - wait.entry.cached_as_of[2] < MAX_LOOKUP_AGE_S
            and (wait.other is None or self._should_wait(wait.entry, wait.extra_tokens, now, tokens_per_s))
            and all(self._stays_worse(self._position[name], worker, wait) for name, worker in changed.items())
            for wait in waits
        )

    def _stays_worse(self, i: int, worker: WorkerState, wait: Wait) -> bool:
        """Whether this worker was not among those that could be chosen, and still is not."""
        if i in wait.near:
            return False
        seq, num_cached = wait.entry.seq, int(wait.entry.num_cached_at[i])
        if (
            worker.num_cached(seq.digests, seq.max_cached_tokens, num_cached, seq.group.features.num_head_tokens)
            != num_cached
        ):
            return False
        load = worker.expected_prefill
        if i == wait.other and (worker.num_free_rows < 1 or load >= self._max_pending[i]):
            return False
        score = self._slowness.item(i) * (load + self._config.placement_alpha * int(wait.entry.uncached_at[i]))
        return score > wait.score and not ties(score, load, wait.score, wait.load, wait.slack)

    def _serve_starved(self, entry: QueueEntry, choice: WorkerChoice) -> None:
        """Reserve the eligible workers of a starved sequence: they accept no other sequence in this pass. If it waits
        for the preparation of its worker, free rows would not help it.
        """
        if not choice.is_prepared:
            self._prepare(choice.worker, entry.seq.group, is_starved=True)
            return
        eligible = self._without_long(entry, self._eligible(entry.seq.group, entry.seq.failed_on))
        self._reserved = eligible if self._reserved is None else self._reserved | eligible
        self._accepts = {i for i in self._accepts if not eligible[i]}

    def _count_in(self, i: int, num_tokens: int, num_rows: int) -> None:
        if num_tokens > (budget := self._budgets.item(i)):
            num_tokens, self._takes_no_long = budget, self._takes_no_long | {i}
        load, free_rows = self._load.item(i) + num_tokens, self._free_rows.item(i) - num_rows
        self._load[i], self._free_rows[i] = load, free_rows
        is_full = load >= self._max_pending.item(i)
        if is_full or free_rows <= 0:
            self._has_room[i] = False
        if i in self._accepts and (is_full or (free_rows <= 0 and self._least_urgent[i] == NOTHING_RUNS)):
            self._accepts.remove(i)

    def _prepare(self, worker: WorkerState, group: SequenceGroup, *, is_starved: bool = False) -> bool | None:
        """Ask a worker to prepare for a waiting request. None if it is ready, else whether preparation is under way."""
        under_way = [part.prepare(group, is_starved=is_starved) for part in worker.parts_of(group)]
        self.preparing[worker.capacity.worker_id] = worker
        return None if worker.is_ready(group) else any(under_way)

    def _should_wait(self, entry: QueueEntry, extra_tokens: int, now: float, tokens_per_s: float | None) -> bool:
        if entry.held_since is None:
            entry.held_since = now
        return not is_worth_leaving(extra_tokens, now - entry.held_since, tokens_per_s, self._config.leave_fraction)

    def _eligible(self, group: SequenceGroup, failed_on: str | None) -> Bools:
        """Workers that could run a sequence of the request if they were idle."""
        eligible = self._is_open
        if group.features.selects_workers or not self._size_limits.fits(len(group.prompt), group.stop.max_tokens):
            eligible = eligible & np.array([worker.could_run(group) for worker in self._workers], dtype=np.bool_)
        failed = self._position.get(failed_on) if failed_on is not None else None
        if failed is not None and np.count_nonzero(eligible) > eligible[failed]:
            eligible = eligible.copy()
            eligible[failed] = False  # the machine may have caused the failure
        return eligible

    def _room(self, entry: QueueEntry) -> Bools:
        """Workers that have a row for the sequence (or a less urgent row to preempt), have not refused it or one that
        needs less, and have little expected prefill.
        """
        priority = entry.key[0]
        is_refused = (entry.num_needed_tokens >= self._refused_tokens) & (priority >= self._refused_priority)
        room, refusals = self._has_room & ~is_refused, self._refusals(entry) if entry.refusals else ()
        for i, _ in refusals:
            room[i] = False
        if self._is_mixed:
            can_preempt = (self._least_urgent > priority) & (~is_refused | self._may_preempt)
            for i, refusal in refusals:
                can_preempt[i] &= refusal.can_preempt
            room |= can_preempt & (self._load < self._max_pending)
        if self._reserved is not None:
            room &= ~self._reserved
        return room

    def _refusals(self, entry: QueueEntry) -> list[tuple[int, Refusal]]:
        """Refusals that still hold, with the positions of their workers."""
        at = [(self._position.get(name), refusal) for name, refusal in entry.refusals.items()]
        return [(i, refusal) for i, refusal in at if i is not None and self._workers[i].holds(refusal)]

    # -- cached prefixes ----------------------------------------------------------------------------------------------

    def look_up_cached(self, entry: QueueEntry, now: float) -> None:
        """Look up how much of a sequence is cached on each worker when it joins the queue."""
        if self._workers:
            self._update_cached(entry, now)

    def _update_cached(self, entry: QueueEntry, now: float) -> None:
        """Update the number of leading tokens cached on each worker. Looks them up on all workers if the last lookup is
        old, else only on the ready workers.
        """
        seq = entry.seq
        version, last_pass, when = entry.cached_as_of
        if version != self._version:
            self.extend_digests(seq.digests, seq.data.token_ids(), seq.group)
            entry.set_cached(self._num_cached(seq))
        elif now - when >= MAX_LOOKUP_AGE_S:
            self._recount(entry, range(len(self._workers)))
        else:
            if last_pass != self._pass - 1 or when != now:  # otherwise the sequence has just joined the queue
                self._recount(entry, self._ready)
            return
        entry.cached_as_of = (self._version, self._pass, now)

    def _recount(self, entry: QueueEntry, positions: Iterable[int]) -> None:
        """Look up the cached tokens on these workers again. They seldom differ from those of the last lookup."""
        found, digests, max_cached = entry.num_cached_at, entry.seq.digests, entry.seq.max_cached_tokens
        min_tokens = entry.seq.group.features.num_head_tokens
        has_changed = False
        for i in positions:
            before = int(found[i])
            found[i] = count = self._workers[i].num_cached(digests, max_cached, before, min_tokens)
            has_changed |= count != before
        if has_changed:
            entry.set_cached(found)

    def _num_cached(self, seq: Sequence) -> I64:
        """Number of cached leading tokens on each worker. Most workers do not even hold the first block."""
        digests, counts = seq.digests, np.zeros(len(self._workers), dtype=np.int64)
        if digests:
            for i in [i for i, held in enumerate(self._held) if digests[0] in held]:
                min_tokens = seq.group.features.num_head_tokens
                counts[i] = self._workers[i].num_cached(digests, seq.max_cached_tokens, 0, min_tokens)
        return counts

    def extend_digests(self, digests: list[bytes], token_ids: U32, group: SequenceGroup) -> None:
        """Append to `digests` the missing digests of a sequence's full blocks."""
        block_size = self._workers[0].capacity.block_size  # equal on all workers
        keys = group.features.block_keys(block_size) if group.features.items else NO_KEYS
        self._digests.extend(digests, token_ids, group.root_key, block_size, keys)


def _least_urgent(worker: WorkerState) -> int:
    """Priority of the row that would be preempted first; NOTHING_RUNS if no row runs."""
    rows = worker.rows.active()
    return int(worker.rows.priority[rows].max()) if len(rows) else NOTHING_RUNS
