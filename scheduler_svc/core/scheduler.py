"""The scheduler: which sequence computes which tokens on which worker in the next step.

Like raft's Step and Ready: facts go in (`add_group`, `update`, `remove_worker` ...), decisions come out (`schedule`),
and the caller does the I/O. What the caller owes:

- every StepBatch that `schedule` returns is sent once, to its worker, in the order of its step ids;
- every one is reported once with `update`, in the same order, or the worker is removed;
- prefix events are published after the outputs that caused them;
- `now` never goes back. Units: seconds.

State is `computed` catching up with `num_tokens`: there is no prefill phase. Every step gives each running sequence the
tokens it lacks, decodes first, then chunks of prompts, under the worker's token budget; waiting sequences fill what is
left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.decode_run import DecodeRun
from scheduler_svc.core.errors import (
    DeadlineError,
    DuplicateRequestError,
    NeverFitsError,
    QueueFullError,
    UnexpectedStepError,
    WorkerMismatchError,
)
from scheduler_svc.core.fairness import FairShare, WaitingQueue
from scheduler_svc.core.fleet import Choice, Fleet
from scheduler_svc.core.messages import (
    EMPTY,
    CachedBlock,
    Deltas,
    Finished,
    Load,
    MigrationReason,
    PrefixEvent,
    RowFailure,
    SchedulerStats,
    StepBatch,
    StepOutput,
    WorkerCapacity,
)
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.policy import (
    DEADLINE_PART,
    ceil_div,
    first_token_wait_s,
    held_tokens,
    is_queue_full,
    is_too_late,
    virtual_arrival,
)
from scheduler_svc.core.sequence import (
    FinishReason,
    Sequence,
    SequenceData,
    SequenceGroup,
    SequenceStatus,
)
from scheduler_svc.core.worker_state import I64, U32, Flight, StepPlan, WorkerState

MEAN_OUTPUT_WEIGHT = 0.05  # of the newest answer in the running mean of answer lengths
RETURNING_FACTOR = 4  # how many times its limits the queue holds of requests that were accepted before
LEAST_RETRY_S = 0.1
MAX_REFUSALS = 4  # of one worker in one step: each costs a look at all its rows


class Scheduler:
    """Owns every sequence and the blocks of every worker. One caller, no threads."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._workers: dict[str, WorkerState] = {}
        self._model: WorkerCapacity | None = None  # the first worker's: what waits was measured with its sizes
        self._groups: dict[str, SequenceGroup] = {}
        self._share = FairShare()
        self._waiting = WaitingQueue(self._share)
        self._fleet = Fleet(config)
        self._ready: dict[str, WorkerState] = {}  # whose pipeline takes another step
        self._changed: dict[str, WorkerState] = {}  # may have prefix events
        self._priorities: Counter[int] = Counter()  # of live groups
        self._deadlines: list[tuple[float, int, Sequence]] = []  # of what has waited, nearest first
        self._expired: list[Finished] = []
        self._queue_pace = Pace()  # tokens that leave the queue
        self._prefill_pace = Pace()  # prompt tokens that one worker computes
        self._num_admitted_tokens = 0  # since the last look at the queue's pace
        self._waited_since: float | None = None  # the last look, if something waited then
        self._eos = np.array(sorted(config.eos_token_ids), dtype=np.uint32)
        self._mean_output = float(config.expected_output_tokens)
        self._next_seq_id = 0
        self._lost_events: list[PrefixEvent] = []
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self._migrations: Counter[MigrationReason] = Counter()
        self._refused_deadline = 0
        self._steps = 0

    # -- workers ------------------------------------------------------------------------------------------------------

    def add_worker(
        self, capacity: WorkerCapacity, now: float, blocks: Iterable[CachedBlock] = (), next_step_id: int = 1
    ) -> None:
        """A worker joins, with the prefixes that its pool already holds.

        Raises ValueError for sizes that cannot work, WorkerMismatchError if it differs from those before it.
        """
        if capacity.worker_id in self._workers:
            raise ValueError(f"worker {capacity.worker_id} is here already; remove it first")
        if capacity.max_num_batched_tokens < capacity.max_num_seqs:
            raise ValueError(
                f"worker {capacity.worker_id}: max_num_batched_tokens is {capacity.max_num_batched_tokens}, below "
                f"max_num_seqs {capacity.max_num_seqs}: a step could not give every running sequence one token"
            )
        _check_same("block_size", capacity, self._model or capacity)
        _check_same("max_model_len", capacity, self._model or capacity)
        worker = WorkerState(
            capacity,
            self.config.root_salt,
            next_step_id,
            prefix_caching=self.config.prefix_caching,
            reuse_bonus=self.config.reuse_bonus,
        )
        worker.adopt(blocks)
        self._model = self._model or capacity
        self._workers[capacity.worker_id] = self._ready[capacity.worker_id] = worker
        self._changed[capacity.worker_id] = worker
        self._fleet.join(worker)
        for seq in self._waiting:
            seq.refused_by.pop(capacity.worker_id, None)  # by an earlier life of this worker, perhaps
        self._move_drained_rows()

    def remove_worker(self, worker_id: str, now: float) -> None:
        """A worker is lost: its sequences wait again, with their tokens."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._fleet.leave(worker)
        self._ready.pop(worker_id, None)
        self._changed.pop(worker_id, None)
        for row in worker.rows.active().tolist():
            self._requeue(worker.preempt(row), MigrationReason.LOST)
        epoch = worker.capacity.worker_epoch
        self._take_events(worker)
        gone = worker.pool.cached_digests()
        self._lost_events += [PrefixEvent(worker_id, epoch, digest, is_cached=False) for digest in gone]

    def drain_worker(self, worker_id: str, now: float) -> None:
        """The worker takes no new sequences; those it runs wait again, with their tokens, as soon as another worker
        could run them. Until then they go on where they are.
        """
        if worker_id in self._workers:
            self._workers[worker_id].is_draining = True
            self._fleet.touch(self._workers[worker_id])
            self._move_drained_rows()

    def _move_drained_rows(self) -> None:
        workers = self._workers.values()
        takers = [worker for worker in workers if not worker.is_draining]
        for worker in workers:
            for row in worker.rows.active().tolist() if worker.is_draining else ():
                if any(_could_run(worker.rows.sequence(row), taker) for taker in takers):
                    self._requeue(worker.preempt(row), MigrationReason.DRAIN)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something waits or runs."""
        return bool(self._groups)

    def add_group(self, group: SequenceGroup, now: float) -> Deltas:
        """A request arrives. Returns the finishes of samples whose Continuation needs nothing more (usually none), and
        those of the group that it takes over.

        Raises DuplicateRequestError, NeverFitsError (with the field), QueueFullError, DeadlineError; then nothing has
        changed.
        """
        self._check_group(group, now)
        replaced = self.abort_group(group.request_id, FinishReason.ABORTED, now, "another stream took the request over")
        group.arrival = now
        group.deadline = math.inf if group.timeout_s is None else now + group.timeout_s
        group.tenant_slot = self._share.join(group.tenant_id)
        group.sequences = [self._make_sequence(group, i) for i in range(group.n) if i not in group.finished_samples]
        self._groups[group.request_id] = group
        self._priorities[group.priority] += 1
        finished = [self._end_early(seq) for seq in group.sequences if self._is_complete(seq)]
        fresh = [seq for seq in group.sequences if not seq.is_finished and not len(seq.data.output)]
        if fresh:
            fresh[0].forks = fresh[1:]
        queued = [seq for seq in group.sequences if not seq.is_finished and seq not in fresh[1:]]
        for seq in queued:
            self._enqueue(seq)
        self._forget_if_done(group)
        return _finishes([*replaced.finished, *finished])

    def _check_group(self, group: SequenceGroup, now: float) -> None:
        live = self._groups.get(group.request_id)
        if live is not None and not _gives_way(live, group):
            raise DuplicateRequestError(f"request_id {group.request_id!r} is in flight; choose another or wait")
        self._check_queue(group)
        if not len(group.prompt):
            raise NeverFitsError("the prompt is empty; send at least one token", field="prompt")
        asked = f"prompt of {len(group.prompt)} tokens + max_tokens {group.stop.max_tokens}"
        if self._model and len(group.prompt) + group.stop.max_tokens > self._model.max_model_len:
            max_len = self._model.max_model_len
            raise NeverFitsError(f"{asked} is above max_model_len {max_len}", field="stop.max_tokens")
        if self._workers:
            self._check_size(group, asked)
        if group.timeout_s is not None and not group.takes_over:
            self._check_deadline(group, group.timeout_s, now)

    def _check_queue(self, group: SequenceGroup) -> None:
        """Bounded by sequences and by tokens. A request that was accepted before must not fall to a queue that is full
        because its scheduler died: it has more room.
        """
        queue, slot = self._waiting, self._share.slot_of(group.tenant_id)
        if not len(queue):
            return
        factor = RETURNING_FACTOR if group.takes_over else 1
        num_tenants = queue.num_tenants_with(slot)
        if is_queue_full(len(queue), queue.num_of(slot), num_tenants, factor * self.config.max_waiting):
            raise QueueFullError(f"{len(queue)} requests wait, the limit is {self.config.max_waiting}; try later")
        new = held_tokens(len(group.prompt), group.stop.max_tokens, group.n, self._mean_output)
        limit = factor * self.config.max_waiting_tokens
        if is_queue_full(queue.held_tokens + new, queue.held_of(slot) + new, num_tenants, limit):
            raise QueueFullError(
                f"requests of {queue.held_tokens} tokens wait, this one would add {new}, the limit is "
                f"{self.config.max_waiting_tokens}; try later"
            )

    def _check_deadline(self, group: SequenceGroup, timeout_s: float, now: float) -> None:
        workers = [worker for worker in self._workers.values() if not worker.is_draining]
        if not workers:
            return  # when one comes is anybody's guess
        ahead = self._waiting.tokens_ahead(self._share.slot_of(group.tenant_id), group.priority)
        own = len(group.prompt) + min(worker.backlog for worker in workers)
        paces = self._queue_pace.per_s, self._prefill_pace.per_s
        if not is_too_late(first_token_wait_s(ahead, paces[0], own, paces[1]), timeout_s):
            return
        digests: list[bytes] = []
        self._fleet.extend_digests(digests, group.prompt, group.root_key)
        num_cached = max(worker.num_cached(digests, len(group.prompt)) for worker in workers)
        own -= num_cached
        turn = virtual_arrival(now, len(group.prompt) - num_cached, self.config.aging_tokens_per_s)
        ahead = self._waiting.tokens_ahead(self._share.slot_of(group.tenant_id), group.priority, turn)
        wait_s = first_token_wait_s(ahead, paces[0], own, paces[1])
        if not is_too_late(wait_s, timeout_s):
            return
        self._refused_deadline += 1
        raise DeadlineError(
            f"the first token would come after about {wait_s:.1f} s, and the deadline is in {timeout_s:.1f} s: "
            "too late for an answer; try later, or allow more time",
            retry_after_s=max(LEAST_RETRY_S, wait_s - DEADLINE_PART * timeout_s),
        )

    def _check_size(self, group: SequenceGroup, asked: str) -> None:
        pool, max_n = self._fleet.largest_pool, self._fleet.most_rows
        if len(group.prompt) + max(1, group.stop.max_tokens) - 1 > pool:  # the last token needs no KV
            raise NeverFitsError(f"{asked} is above the {pool} tokens of the largest pool", field="stop.max_tokens")
        if group.n > max_n:
            raise NeverFitsError(f"n is {group.n}, above max_num_seqs {max_n}", field="sampling.n")

    def _make_sequence(self, group: SequenceGroup, sample_index: int) -> Sequence:
        output = group.outputs[sample_index] if sample_index < len(group.outputs) else EMPTY
        self._next_seq_id += 1
        return Sequence(group, sample_index, SequenceData(group.prompt, output), self._next_seq_id)

    def _is_complete(self, seq: Sequence) -> bool:
        """A Continuation already holds the token that ends it."""
        output, stop = seq.data.output, seq.group.stop
        if not len(output):
            return False
        last = int(output[-1])
        is_eos = last in self.config.eos_token_ids and not stop.ignore_eos
        return is_eos or last in stop.stop_token_ids or len(output) >= stop.max_tokens

    def _end_early(self, seq: Sequence) -> Finished:
        seq.move_to(SequenceStatus.FINISHED)
        reason, stop_id = self._why(seq.group, int(seq.data.output[-1]))
        return self._finished(seq, reason, stop_id)

    def abort_group(self, request_id: str, reason: FinishReason, now: float, message: str = "") -> Deltas:
        """End a request in any state; its blocks are free once the steps that name them are answered."""
        group = self._groups.get(request_id)
        if group is None:
            return _finishes([])
        live = [seq for seq in group.sequences if not seq.is_finished]
        finished = [self._end(seq, reason, message=message, keep_forks=False) for seq in live]
        return _finishes(finished)

    def finish_sample(self, request_id: str, sample_index: int, reason: FinishReason, now: float) -> Deltas:
        """End one sample: the gateway matched a stop string in its text."""
        group = self._groups.get(request_id)
        live = [s for s in group.sequences if s.sample_index == sample_index and not s.is_finished] if group else []
        return _finishes([self._end(seq, reason) for seq in live])

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        message: str = "",
        keep_forks: bool = True,
    ) -> Finished:
        """The one way out for a sequence in any state."""
        forks = seq.forks
        if seq.worker_id is not None and seq.row is not None:
            worker = self._workers[seq.worker_id]
            worker.finish(seq.row)
            self._fleet.touch(worker)
        else:
            self._leave_queue(seq)
            seq.move_to(SequenceStatus.FINISHED)
        seq.forks = []
        if forks and keep_forks:
            forks[0].forks = forks[1:]
            self._enqueue(forks[0])
        self._forget_if_done(seq.group)
        return self._finished(seq, reason, stop_token_id, message)

    def _leave_queue(self, seq: Sequence) -> None:
        if seq in self._waiting:
            self._waiting.remove(seq)
            return
        for leader in seq.group.sequences:  # it waited to fork off another sample
            if seq in leader.forks:
                leader.forks.remove(seq)
                if leader.worker_id is not None:
                    self._workers[leader.worker_id].unreserve_row()

    def _forget_if_done(self, group: SequenceGroup) -> None:
        if not all(seq.is_finished for seq in group.sequences) or self._groups.pop(group.request_id, None) is None:
            return
        self._share.leave(group.tenant_slot)
        self._priorities[group.priority] -= 1
        if not self._priorities[group.priority]:
            del self._priorities[group.priority]

    def _requeue(self, seq: Sequence, migration: MigrationReason | None = None) -> None:
        self._preemptions += 1
        if migration is not None:
            self._migrations[migration] += 1
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        remaining = seq.group.stop.max_tokens - len(seq.data.output)
        held = held_tokens(seq.data.num_tokens, remaining, 1 + len(seq.forks), self._mean_output)
        seq.num_cached_at, seq.most_cached = None, 0
        if seq.is_new:
            self._fleet.look(seq, seq.group.arrival)
        self._waiting.add(seq, held, self._turn(seq))
        if seq.group.deadline < math.inf:
            heappush(self._deadlines, (seq.group.deadline, seq.seq_id, seq))

    def _turn(self, seq: Sequence) -> float:
        """Its place in line. What was under way before comes by arrival alone: its work is mostly done."""
        uncached = self._fleet.num_uncached(seq) if seq.is_new else 0
        return virtual_arrival(seq.group.arrival, uncached, self.config.aging_tokens_per_s)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[StepBatch]:
        """Everything that can be sent now: for each worker as many steps as its pipeline takes."""
        self._expire(now)
        batches: list[StepBatch] = []
        while new := self._schedule_once(now):
            batches += new
        self._note_queue_pace(now)
        return batches

    def _note_queue_pace(self, now: float) -> None:
        """How fast the queue has moved since the last look, if it was there then and somebody served it."""
        if self._waited_since is not None:
            self._queue_pace.note(self._num_admitted_tokens, now - self._waited_since)
        self._num_admitted_tokens = 0
        is_served = len(self._waiting) and any(not worker.is_draining for worker in self._workers.values())
        self._waited_since = now if is_served else None

    def take_expired(self) -> Deltas:
        """What `schedule` found waiting after its deadline, since the last call: nobody wants it any more."""
        expired, self._expired = self._expired, []
        return _finishes(expired)

    def _expire(self, now: float) -> None:
        """End what waits after its deadline."""
        message = "its deadline passed while it waited"
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heappop(self._deadlines)
            if seq.status is SequenceStatus.WAITING and seq in self._waiting:
                ended = self.abort_group(seq.group.request_id, FinishReason.ABORTED, now, message)
                self._expired += ended.finished

    def _schedule_once(self, now: float) -> list[StepBatch]:
        """One step for each worker whose pipeline has room: an answer of one costs nothing for the others."""
        if not self._ready:
            return []
        placed = self._place(now)
        batches = []
        for name, worker in list(self._ready.items()):
            batch = self._schedule_worker(worker, placed.get(name, []), now)
            if batch is not None:
                batches.append(batch)
            if not worker.can_send:
                del self._ready[name]
        return batches

    def _schedule_worker(self, worker: WorkerState, candidates: list[Sequence], now: float) -> StepBatch | None:
        if not worker.rows.num_used and not candidates and not worker.has_news:
            return None
        self._note_change(worker)
        if candidates:
            self._displace(worker, candidates[0])
        plan = worker.begin_step()
        has_preempted = not worker.continue_run(plan) and self._plan_running(worker, plan)
        if candidates and not has_preempted:
            self._admit(worker, plan, candidates, now)
        batch = worker.finish_plan(plan)
        if batch is not None:
            worker.flights[-1].sent_at = now
            if self.config.burst_s and not candidates:
                worker.plan_burst(batch, self.config.burst_s)
            self._steps += 1 + len(batch.then)
        return batch

    def _plan_running(self, worker: WorkerState, plan: StepPlan) -> bool:
        """Every row goes on; True if some had to leave for that.

        Each decoding row gets the block it writes next; the least urgent are preempted until that works. Blocks of a
        victim may still be named by steps in flight: then rows that got none sit this step out.
        """
        if not worker.rows.num_used:
            return False
        has_preempted = False
        while True:
            decode, prefill = worker.split_by_stage()
            needy = worker.rows_that_need_a_block(decode) if len(decode) else decode
            if len(needy) <= worker.pool.num_free + worker.num_limbo:
                break
            has_preempted = True
            self._preempt_one(worker)
        num_free = worker.pool.num_free
        if len(needy) > num_free:
            by_urgency = sorted(needy.tolist(), key=lambda row: worker.rows.sequence(row).order)
            needy = np.array(by_urgency[:num_free], dtype=np.int64)
            decode = decode[~np.isin(decode, by_urgency[num_free:])]
        if len(needy):
            worker.give_blocks(needy, plan)
        worker.plan_running(plan, decode, prefill)
        return has_preempted

    def _note_change(self, worker: WorkerState) -> None:
        self._changed[worker.capacity.worker_id] = worker
        self._fleet.touch(worker)

    def _preempt_one(self, worker: WorkerState) -> None:
        victim = max(worker.rows.active().tolist(), key=lambda row: worker.rows.sequence(row).order)
        seq = worker.preempt(victim)
        self._requeue(seq)
        if worker.flights:  # it must not take its blocks back, as cached ones, before they are free for whom it left
            seq.refused_by[worker.capacity.worker_id] = worker.room_version

    def _displace(self, worker: WorkerState, urgent: Sequence) -> None:
        """An urgent sequence that finds no room takes that of less urgent ones."""
        needed = ceil_div(urgent.data.num_tokens, worker.capacity.block_size)
        while not worker.has_space(1 + len(urgent.forks), needed) and self._may_displace(urgent, worker):
            self._preempt_one(worker)

    def _admit(self, worker: WorkerState, plan: StepPlan, candidates: list[Sequence], now: float) -> None:
        name = worker.capacity.worker_id
        num_refused = 0
        for seq in candidates:
            if plan.budget < 1 or num_refused >= MAX_REFUSALS:
                return
            is_first = not seq.is_admitted_before
            if worker.admit(seq, plan, self.config.watermark, self._mean_output):
                self._waiting.remove(seq)
                self._count_hits(worker, seq, is_first)
                if is_first:
                    seq.admitted_at = now
                continue
            seq.refused_by[name] = worker.room_version  # asked again when rows or blocks of this worker became free
            num_refused += 1
            if self._note_blocked(seq, now):
                return

    def _count_hits(self, worker: WorkerState, seq: Sequence, is_first: bool) -> None:
        self._fleet.fill(worker, seq.data.num_tokens - seq.num_cached_tokens)
        self._num_admitted_tokens += seq.data.num_tokens
        if is_first:
            self._prefix_query_tokens += seq.data.num_tokens
            self._prefix_hit_tokens += seq.num_cached_tokens
            self._share.charge_prompt(seq.group.tenant_slot, seq.data.num_tokens - seq.num_cached_tokens)

    def _note_blocked(self, seq: Sequence, now: float) -> bool:
        """It was passed over. True once that lasted too long: then nobody passes it any more."""
        if seq.blocked_since is None:
            seq.blocked_since = now
        return now - seq.blocked_since >= self.config.aging_s

    # -- placement ----------------------------------------------------------------------------------------------------

    def _place(self, now: float) -> dict[str, list[Sequence]]:
        """Who goes where, if there is room: decided anew each time, so nobody is bound before its step is made.

        Ends when nobody could take more: a queue of thousands costs no more than one of a few.
        """
        placed: dict[str, list[Sequence]] = {}
        is_mixed = len(self._priorities) > 1
        if not len(self._waiting) or not (is_mixed or any(worker.num_free_rows > 0 for worker in self._ready.values())):
            return placed
        self._fleet.begin(self._ready.values(), is_mixed=is_mixed)
        moved: list[tuple[Sequence, float]] = []
        num_passed = 0
        for seq in self._waiting if self._fleet.num_takers else ():
            choice = self._fleet.choose(seq, now, self._prefill_pace.per_s)
            turn = self._turn(seq)
            if turn != seq.queue_key[2]:
                moved.append((seq, turn))
            if choice is not None and choice.is_now:
                placed.setdefault(choice.worker.capacity.worker_id, []).append(seq)
            else:
                num_passed += 1
            if not self._fleet.num_takers or num_passed > self.config.max_bypass or self._is_stuck(seq, choice, now):
                break
        for seq, turn in moved:
            self._waiting.move(seq, turn)
        return placed

    def _is_stuck(self, seq: Sequence, choice: Choice | None, now: float) -> bool:
        """It finds no room anywhere, for so long that nobody may pass it any more."""
        return choice is not None and not choice.has_room and not choice.is_held and self._note_blocked(seq, now)

    def _may_displace(self, seq: Sequence, worker: WorkerState) -> bool:
        priorities = worker.rows.priority[worker.rows.active()]
        return bool((priorities > seq.group.priority).any())

    # -- answers ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput, now: float) -> Deltas:
        """A worker answered its oldest step: new tokens, and what ended.

        Answers of workers that are gone are ignored. Raises UnexpectedStepError if the step is not the oldest one in
        flight: the caller then removes the worker.
        """
        worker = self._workers.get(output.worker_id)
        if worker is None:
            return _finishes([])
        if not worker.flights or worker.flights[0].step_id != output.step_id:
            expected = worker.flights[0].step_id if worker.flights else None
            raise UnexpectedStepError(f"worker {output.worker_id} answered step {output.step_id}, not {expected}")
        flight = worker.flights[0]
        failures = self._check_answer(flight, output)
        worker.flights.popleft()
        if flight.burst_len:
            self._ready[output.worker_id] = worker
        self._note_change(worker)
        self._note_prefill_pace(worker, flight, now)
        failed = self._fail_rows(worker, flight, failures) if failures else []
        rows, deltas = self._append_tokens(worker, flight, output)
        worker.commit_fills(flight)
        deltas.finished.extend(failed)
        self._finish_rows(worker, flight, rows, deltas)
        if flight.prompt_only:
            self._finish_prompt_only(worker, flight, deltas)
        worker.free_released(flight)
        return deltas

    def _note_prefill_pace(self, worker: WorkerState, flight: Flight, now: float) -> None:
        """Only steps that were full tell what a worker can do; in others prompts waited for nothing."""
        if flight.is_full:
            chunks = int(flight.query_lens[flight.query_lens > 1].sum())
            self._prefill_pace.note(chunks, now - max(flight.sent_at, worker.answered_at))
        if flight.burst_len:
            worker.note_answer(flight, now)

    def _check_answer(self, flight: Flight, output: StepOutput) -> list[RowFailure]:
        """Every row that was to sample must have a token or a failure; one that has neither failed too."""
        expected = flight.sampled
        if not output.failures and output.rows.tobytes() == expected.tobytes():
            return []
        told = {failure.row: failure for failure in output.failures}
        if not np.isin(output.rows, expected).all() or any(row >= len(flight.generation) for row in told):
            raise UnexpectedStepError(f"worker {output.worker_id} answered rows that step {flight.step_id} did not ask")
        silent = set(expected.tolist()) - set(output.rows.tolist()) - set(told)
        return [*told.values(), *(RowFailure(row, "the worker returned no token for this row") for row in silent)]

    def _append_tokens(self, worker: WorkerState, flight: Flight, output: StepOutput) -> tuple[I64, Deltas]:
        """Store the samples of rows that are still what they were when the step was sent."""
        r, run = worker.rows, flight.run
        if run is not None and flight.generation is r.generation:
            return run.rows, self._append_run(worker, run, flight.context_lens, output.token_ids)
        rows, token_ids = output.rows.astype(np.int64), output.token_ids
        if flight.generation is not r.generation:
            is_live = flight.generation[rows] == r.generation[rows]
            rows, token_ids = rows[is_live], token_ids[is_live]
        positions = r.num_tokens[rows]
        r.tokens[rows, positions] = token_ids
        r.num_tokens[rows] = positions + 1
        r.pending[rows] -= 1
        self._share.charge_outputs(r.tenant, rows)
        return rows, Deltas(
            owners=r.owner[rows],
            handles=r.handle[rows],
            sample_indices=r.sample_index[rows],
            offsets=(positions - r.prompt_len[rows]).astype(np.uint32),
            token_ids=token_ids,
        )

    def _append_run(self, worker: WorkerState, run: DecodeRun, context_lens: U32, token_ids: U32) -> Deltas:
        """The same for a step of which every row is still there."""
        r = worker.rows
        r.flat_tokens[run.token_starts + context_lens] = token_ids
        r.num_tokens += run.is_member
        r.pending -= run.is_member
        self._share.charge_outputs(r.tenant, run.rows)
        offsets = context_lens + run.first_offsets
        return Deltas(run.owners, run.handles, run.sample_indices, offsets, token_ids, owner=run.owner)

    def _finish_rows(self, worker: WorkerState, flight: Flight, rows: I64, deltas: Deltas) -> None:
        """End the rows whose newest token ends them."""
        r, token_ids = worker.rows, deltas.token_ids
        if not flight.may_reach_limit and not self._may_stop(flight.run, token_ids):
            return
        ends = r.num_tokens[rows] >= r.limit[rows]
        for eos in self._eos:
            ends |= (token_ids == eos) & ~r.ignore_eos[rows]
        has_stop_ids = r.has_stop_ids[rows]
        for i in np.flatnonzero(has_stop_ids & ~ends).tolist():
            ends[i] = int(token_ids[i]) in r.sequence(int(rows[i])).group.stop.stop_token_ids
        for i in np.flatnonzero(ends).tolist():
            seq = r.sequence(int(rows[i]))
            reason, stop_id = self._why(seq.group, int(token_ids[i]))
            deltas.finished.append(self._end(seq, reason, stop_token_id=stop_id))
            if reason is not FinishReason.LENGTH:
                self._mean_output += MEAN_OUTPUT_WEIGHT * (len(seq.data.output) - self._mean_output)

    def _may_stop(self, run: DecodeRun | None, token_ids: U32) -> bool:
        """A token may be one that ends its sequence."""
        if run is None or run.has_stop_ids:
            return True
        return any(len((token_ids == eos).nonzero()[0]) for eos in self._eos)

    def _why(self, group: SequenceGroup, last_token: int) -> tuple[FinishReason, int | None]:
        if last_token in self.config.eos_token_ids and not group.stop.ignore_eos:
            return FinishReason.EOS, None
        if last_token in group.stop.stop_token_ids:
            return FinishReason.STOP, last_token
        return FinishReason.LENGTH, None

    def _finish_prompt_only(self, worker: WorkerState, flight: Flight, deltas: Deltas) -> None:
        for row in flight.prompt_only:
            if flight.generation[row] == worker.rows.generation[row] and worker.rows.sequences[row] is not None:
                deltas.finished.append(self._end(worker.rows.sequence(row), FinishReason.LENGTH))

    def _fail_rows(self, worker: WorkerState, flight: Flight, failures: list[RowFailure]) -> list[Finished]:
        """A row that failed is tried once more on another worker, if there is one: it may have been the machine. Failed
        again, or alone with its worker, it ends. Rows that read what it was to compute are recomputed, even if they
        failed with it.
        """
        live = [f for f in failures if flight.generation[f.row] == worker.rows.generation[f.row]]
        tainted = worker.rows_tainted_by({failure.row for failure in live}, flight)
        for row in tainted:
            self._requeue(worker.preempt(row), MigrationReason.FAILED)
        alone = [failure for failure in live if failure.row not in tainted]
        finished = [self._retry_or_end(worker, worker.rows.sequence(f.row), f) for f in alone]
        return [end for end in finished if end is not None]

    def _retry_or_end(self, worker: WorkerState, seq: Sequence, failure: RowFailure) -> Finished | None:
        others = [other for other in self._workers.values() if other is not worker and not other.is_draining]
        if seq.failed_on is not None or not any(_could_run(seq, other) for other in others):
            return self._end(seq, FinishReason.ERROR, message=failure.message)
        seq.failed_on = worker.capacity.worker_id
        self._requeue(worker.preempt(failure.row), MigrationReason.FAILED)
        return None

    def _finished(
        self, seq: Sequence, reason: FinishReason, stop_token_id: int | None = None, message: str = ""
    ) -> Finished:
        seq.finish_reason = reason
        return Finished(
            group=seq.group,
            sample_index=seq.sample_index,
            reason=reason,
            num_output_tokens=len(seq.data.output),
            num_cached_tokens=seq.num_cached_tokens,
            num_recomputed_tokens=seq.num_recomputed_tokens,
            num_preemptions=seq.num_preemptions,
            stop_token_id=stop_token_id,
            message=message,
        )

    # -- facts --------------------------------------------------------------------------------------------------------

    def take_prefix_events(self) -> list[PrefixEvent]:
        """Blocks that became cached prefixes or ceased to be, since the last call."""
        for worker in self._changed.values():
            self._take_events(worker)
        self._changed.clear()
        events, self._lost_events = self._lost_events, []
        return events

    def _take_events(self, worker: WorkerState) -> None:
        c = worker.capacity
        self._lost_events += [
            PrefixEvent(c.worker_id, c.worker_epoch, digest, is_cached)
            for digest, is_cached in worker.pool.take_events()
        ]

    def cached_prefixes(self) -> list[PrefixEvent]:
        """Everything an index should hold now: for filling it again."""
        return [
            PrefixEvent(w.capacity.worker_id, w.capacity.worker_epoch, digest, is_cached=True)
            for w in self._workers.values()
            for digest in w.pool.cached_digests()
        ]

    def load(self) -> Load:
        """What is queued and what runs now."""
        workers = self._workers.values()
        pending = self._waiting.pending_tokens + sum(worker.pending_prefill for worker in workers)
        return Load(len(self._waiting), sum(worker.rows.num_used for worker in workers), pending)

    def stats(self) -> SchedulerStats:
        load = self.load()
        return SchedulerStats(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            pending_tokens=load.pending_tokens,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            refused_deadline=self._refused_deadline,
            steps=self._steps,
            workers=[worker.stats() for worker in self._workers.values()],
            migrations=dict(self._migrations),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if any books disagree. For tests."""
        for worker in self._workers.values():
            worker.check_invariants()
        self._waiting.check_invariants()
        self._share.check_invariants(Counter(group.tenant_slot for group in self._groups.values()))
        ready = {name for name, worker in self._workers.items() if worker.can_send}
        assert set(self._ready) == ready, "a worker could take a step and is not asked, or the reverse"
        assert self._priorities == Counter(group.priority for group in self._groups.values()), "priorities are wrong"
        for group in self._groups.values():
            for seq in group.sequences:
                self._check_place(seq)

    def _check_place(self, seq: Sequence) -> None:
        """A live sequence is in exactly one place: queue, row, or behind the sample it will fork off."""
        places = [seq in self._waiting]
        places.append(seq.worker_id is not None and self._workers[seq.worker_id].rows.sequences[seq.row or 0] is seq)
        places.append(any(seq in other.forks for other in seq.group.sequences))
        assert sum(places) == (0 if seq.is_finished else 1), f"sequence {seq.seq_id} is in {sum(places)} places"
        if seq.status is SequenceStatus.WAITING:
            assert not places[1], f"sequence {seq.seq_id} waits and holds a row"


def _gives_way(live: SequenceGroup, group: SequenceGroup) -> bool:
    """A client goes from stream to stream, and only its last one counts. A gateway that was frozen meanwhile sends the
    request again as well: it must not win it back from where the client is now. If that one is dead, its own end frees
    the request_id in a moment.
    """
    return group.takes_over and (not live.takes_over or live.origin == group.origin)


def _could_run(seq: Sequence, worker: WorkerState) -> bool:
    """The worker could run it if nobody else were there. False too for what was queued before any worker was known."""
    num_prompt, max_tokens = len(seq.group.prompt), seq.group.stop.max_tokens
    return (
        num_prompt + max_tokens <= worker.capacity.max_model_len
        and worker.can_ever_hold(num_prompt + max(1, max_tokens))
        and 1 + len(seq.forks) <= worker.capacity.max_num_seqs
    )


def _finishes(finished: list[Finished]) -> Deltas:
    return Deltas(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, finished)


def _check_same(name: str, capacity: WorkerCapacity, other: WorkerCapacity) -> None:
    mine, theirs = getattr(capacity, name), getattr(other, name)
    if mine != theirs:
        raise WorkerMismatchError(
            f"worker {capacity.worker_id} has {name} {mine}, but {other.worker_id} has {theirs}; start it with the same"
        )
