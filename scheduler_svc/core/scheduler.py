"""The scheduler: which sequence computes which tokens on which worker in the next step.

Like raft's Step and Ready: events go in (`add_group`, `update`, `remove_worker` ...), decisions come out (`schedule`),
and the caller does the I/O. The caller guarantees:

- every StepBatch that `schedule` returns is sent once, to its worker, in the order of step ids;
- the answer to every StepBatch is reported once with `update`, in the same order, or the worker is removed;
- prefix events are published after the outputs that caused them;
- `now`, in seconds, never decreases.

There is no prefill phase: in every step `num_computed_tokens` of each running sequence catches up with `num_tokens`.
Decodes are planned first, then chunks of prompts, within the worker's token budget; waiting sequences get the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from prefix_index.index import PrefixChanges
from request_fields.fields import LAST_PRIORITY
from scheduler_svc.core.admission.admission_control import AdmissionControl
from scheduler_svc.core.admission.barrier import Barrier
from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.adapters import AdapterSwaps
from scheduler_svc.core.features.block_moves import BlockMoves
from scheduler_svc.core.features.cache_groups import add_groups
from scheduler_svc.core.features.loans import Loans
from scheduler_svc.core.features.roles import Roles
from scheduler_svc.core.features.snapshots import Snapshots
from scheduler_svc.core.messages import (
    CachedBlock,
    Counts,
    Deltas,
    Finished,
    MigrationReason,
    WorkerCapacity,
    with_outputs,
)
from scheduler_svc.core.policy import Throughput
from scheduler_svc.core.sequence import FinishReason, QueueEntry, Refusal, Sequence, SequenceGroup
from scheduler_svc.core.stats import (
    Load,
    OpenSequence,
    SchedulerStats,
    WorkerStats,
    load_of,
    scheduler_stats,
    slowest,
    waiting_snapshot,
    worker_stats,
)
from scheduler_svc.core.steps.answers import Stops, append_tokens, check_answer, untrusted_after
from scheduler_svc.core.steps.step_planner import StepPlanner
from scheduler_svc.core.worker_state import Advance, InFlightStep, StepPlan, WorkerState
from step_protocol.columns import EMPTY, I64, U32
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError, RowErrorCode

DRAIN_TIMEOUT_S = 60.0  # of workers, unless the caller of DrainWorker sets another
DRAIN_PATIENCE = 0.5  # fraction of it for which rows stay on a draining worker while no other one has room
MAX_POOLS = 32  # in one snapshot
MAX_REFUSALS = 4  # per worker and step, because each check reads all rows of the worker


class Scheduler:
    """Owns every sequence and the blocks of every worker. One caller, no threads.

    `placement` replaces the default placement, for comparisons.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement | None = None) -> None:
        self.config = config
        self._workers: dict[str, WorkerState] = {}
        self._planners: dict[str, StepPlanner] = {}
        self._ready: dict[str, StepPlanner] = {}  # the workers whose pipeline has room for a step
        self._changes_due: dict[str, float] = {}  # idle workers with changes -> when these are sent, earliest first
        self._placement = placement or Placement(config)
        self._throughput = Throughput(config.expected_output_tokens)
        self._stops = Stops(config.eos_token_ids)
        self._counts = Counts()
        self._requests = Requests(config, self._workers, self._placement, self._stops, self._throughput, self._counts)
        self._admission = AdmissionControl(config, self._requests, self._placement, self._throughput, self._counts)
        self._waiting = self._requests.waiting
        self._share = self._requests.share
        self._touched: dict[str, WorkerState] = {}  # workers whose cached prefixes may have changed
        self._evicted: list[PrefixChanges] = []  # the prefixes of workers that have left
        self.adapters = AdapterSwaps(
            self._workers,
            self._requests.groups,
            self._placement.preparing,
            self._requests.update_schedulable,
            self._leave,
        )
        borrows = config.borrows_prefixes
        self.moves = BlockMoves(
            self._workers, self._throughput, self._counts, config.watermark, self._mark_changed, borrows=borrows
        )
        self.loans = Loans(self._workers, self._counts, self._mark_changed)
        self._roles = Roles(self._workers, self.moves)
        self.barrier = Barrier(self._workers, self._requests, self._placement, self.moves)
        self._now = 0.0  # of the newest `schedule` or `end_move`
        self._draining: dict[str, float] = {}  # worker -> when its rows leave, even if no other worker has room
        self._drained: list[Sequence] = []  # they have left a draining worker, and may still wait for a row
        self._expired: list[Finished] = []
        self._plans: dict[str, StepPlan] = {}  # the steps to which sequences were offered in the present pass
        self._admitted: list[tuple[WorkerState, QueueEntry, list[Sequence]]] = []  # with the forks that got no row

    # -- workers ------------------------------------------------------------------------------------------------------

    def add_worker(self, capacity: WorkerCapacity, blocks: Iterable[CachedBlock] = (), next_step_id: int = 1) -> None:
        """A worker joins. `blocks` are the cached prefixes of its pool.

        Raises ValueError for invalid sizes, WorkerMismatchError if the sizes differ from the other workers' sizes.
        """
        if capacity.worker_id in self._workers:
            raise ValueError(f"worker {capacity.worker_id} has already joined; call remove_worker first")
        self._admission.check_worker(capacity)
        worker = WorkerState(
            capacity,
            self.config.root_salt,
            prefix_caching=self.config.prefix_caching,
            reuse_bonus=self.config.reuse_bonus,
            keeps_events=self.config.publishes_prefixes,
        )
        if capacity.num_snapshots is not None:
            worker.add_part(Snapshots(worker, self._counts))
        add_groups(worker, prefix_caching=self.config.prefix_caching, reuse_bonus=self.config.reuse_bonus)
        worker.adopt(blocks)
        planner = StepPlanner(worker, next_step_id, self.config.changes_wait_s, self.config.max_step_s)
        self._workers[capacity.worker_id] = worker
        self._planners[capacity.worker_id] = self._ready[capacity.worker_id] = planner
        self._placement.join(worker)
        if self.config.prefix_caching:
            self.moves.join(worker)
            self._turn_moves_on_or_off()
        self._touched[capacity.worker_id] = worker
        self._requests.update_schedulable()
        for entry in self._waiting:
            entry.forget_refusals(capacity.worker_id)  # from before a restart of this worker
        self._move_drained_rows()

    def remove_worker(self, worker_id: str) -> None:
        """Remove a lost worker. Its sequences return to the queue with their tokens."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._placement.leave(worker)
        self.moves.forget(worker)
        self._turn_moves_on_or_off()
        del self._planners[worker_id]
        self._ready.pop(worker_id, None)
        self._draining.pop(worker_id, None)
        self._changes_due.pop(worker_id, None)
        self._requests.update_schedulable()
        self._requests.requeue_all(worker, MigrationReason.LOST)
        self._touched.pop(worker_id, None)
        self._evicted += worker.leave_index()

    def _turn_moves_on_or_off(self) -> None:
        self._placement.moves = self.moves if self.moves.is_on else None
        self._placement.roles = self._roles if self.moves.is_on and self._roles.is_on else None

    def drain_worker(self, worker_id: str, timeout_s: float = 0.0) -> None:
        """Stop admitting sequences on the worker. Each running sequence returns to the queue with its tokens as soon as
        another worker has room for it. After DRAIN_PATIENCE of `timeout_s` (0: the default of workers) it is enough
        that another worker could run it. Until then it runs on the draining worker.
        """
        if worker_id in self._workers:
            self._workers[worker_id].is_draining = True
            self._draining[worker_id] = self._now + DRAIN_PATIENCE * (timeout_s or DRAIN_TIMEOUT_S)
            self._placement.drain(self._workers[worker_id])
            self._requests.update_schedulable()
            self._move_drained_rows()

    def _move_drained_rows(self) -> None:
        """Rows whose blocks can move go when these have arrived on another worker. While sequences that have left wait
        for a row, no other follows before the drain is late.
        """
        self._drained = [seq for seq in self._drained if seq in self._waiting]
        takers = [worker for worker in self._workers.values() if not worker.is_draining]
        room = {} if self._drained else {taker: self._roles.room_of(taker) for taker in takers}
        for name, ends_at in self._draining.items():
            worker, is_late = self._workers[name], ends_at <= self._now
            for seq in worker.running() if is_late or room else ():
                able = [taker for taker in takers if seq.row is not None and taker.could_run(seq.group)]
                if not is_late:
                    able = [taker for taker in able if self._roles.has_room(taker, seq, room[taker])]
                if able and (not self.moves.is_on or self.moves.leave(seq, worker, able, self._now)):
                    if not is_late:
                        room[able[0]] = self._roles.room_left(room[able[0]], seq, able[0])
                    self._drained.append(seq)
                    self._leave(worker, seq, MigrationReason.DRAIN)

    def _leave(self, worker: WorkerState, seq: Sequence, reason: MigrationReason | None = None) -> None:
        """Queue a running sequence again. No answer of its worker says that a row is free now."""
        if seq.row is not None:
            self._requests.requeue(worker.preempt(seq.row), reason)
            self._mark_changed(worker)

    def end_move(self, move_id: int, num_moved: int, took_s: float, now: float) -> None:
        """A worker has fetched this many of the leading blocks of a move. `took_s`: the duration of the fetch."""
        self._now = now
        for worker in self.moves.end_move(move_id, num_moved, took_s):
            self._mark_changed(worker)
        self._move_drained_rows()

    def is_source(self, worker_id: str) -> bool:
        """Whether blocks of this worker are being read."""
        return self.moves.is_source(worker_id) or self.loans.is_source(worker_id)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests.groups)

    def add_group(self, group: SequenceGroup, now: float) -> Deltas:
        """Add a request to the queue. Returns the finishes of samples whose Continuation is complete (usually none) and
        of the group that the request replaces.

        Raises NoWorkerError, DuplicateRequestError, NeverFitsError (with the field), QueueFullError or
        UnreachableDeadlineError.
        After an error nothing has changed.
        """
        self._admission.check_group(group, now)
        message = "another stream took the request over"
        replaced = self._requests.abort(group.request_id, FinishReason.ABORTED, message)
        return _finishes(replaced + self._requests.add(group, now))

    def abort_group(self, request_id: str, reason: FinishReason, message: str = "") -> Deltas:
        """End a request in any state. Its blocks become free when the steps that name them are answered."""
        return _finishes(self._requests.abort(request_id, reason, message))

    def finish_sample(self, request_id: str, sample_index: int, reason: FinishReason) -> Deltas:
        """End one sample: the gateway matched a stop string in its text. A gang has no samples until it ends."""
        group = self._requests.groups.get(request_id)
        if group is not None and group.features.is_gang:
            return _finishes([])
        live = [s for s in group.sequences if s.sample_index == sample_index and not s.is_finished] if group else []
        return _finishes([self._requests.end(seq, reason) for seq in live])

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[StepBatch]:
        """Returns all steps that can be sent now. Fills each worker's pipeline."""
        self._now = now
        if self._draining and not self.barrier.is_closed:
            self._move_drained_rows()
        if self._placement.roles is not None:
            for worker, seq in list(self._roles.hand_overs(now)):
                self._leave(worker, seq, MigrationReason.HANDOVER)
        while (late := self._waiting.pop_expired(now)) is not None:
            self._expired += self._requests.end_if_late(late, now)
        if self._waiting.unschedulable or not self._workers:
            self._expired += self._requests.give_up(now)
        if self.barrier.is_held:
            self.barrier.advance()
        if self.barrier.is_closed:
            return []
        batches: list[StepBatch] = []
        changed = self._placement.changed
        if self._changes_due:
            changed.update(name for name, due_at in self._changes_due.items() if due_at <= now)
        while self._ready and (changed or self._waiting.num_schedulable) and (new := self._schedule_once(now)):
            batches += new
        changed.clear()
        is_served = self._waiting.num_schedulable and any(not worker.is_draining for worker in self._workers.values())
        self._throughput.observe_queue(now, is_served=bool(is_served))
        return batches

    def take_expired(self) -> Deltas:
        """The requests that `schedule` has ended since the last call: they waited past their deadline, or no worker
        could run them for `worker_patience_s`.
        """
        expired, self._expired = self._expired, []
        return _finishes(expired)

    @property
    def changes_due_at(self) -> float:
        """When `schedule` sends the next changes of an idle worker; inf if there are none."""
        return math.inf if self.barrier.is_closed else next(iter(self._changes_due.values()), math.inf)

    @property
    def patience_ends_at(self) -> float:
        """When `schedule` ends the next request that no worker can run; inf if there is none."""
        return self._requests.patience_ends_at

    def _schedule_once(self, now: float) -> list[StepBatch]:
        """Plan one step for each worker whose pipeline has room. Workers without changes or placed sequences are
        skipped, so an answer of one worker causes no work for the others.
        """
        is_mixed, pace = len(self._requests.priorities) > 1, self._throughput.prefill.per_s
        self._plans = {}
        self._placement.assign(self._waiting, self._ready, now, pace, self._offer, is_mixed=is_mixed)
        if self._admitted:
            self._leave_queue(now)
        plans, changed = self._plans, self._placement.changed
        batches = []
        for name, planner in list(self._ready.items()):
            if name not in changed and name not in plans:
                continue
            batch = self._finish_step(planner, plans.get(name), now)
            if batch is not None:
                batches.append(batch)
            if batch is None or not planner.may_continue:
                changed.discard(name)
            if not planner.worker.can_send:
                del self._ready[name]
        if self._requests.preempted:
            self._requests.requeue_preempted()
        return batches

    def _finish_step(self, planner: StepPlanner, plan: StepPlan | None, now: float) -> StepBatch | None:
        """The step of a worker, to which waiting sequences were offered if there is a plan."""
        worker, has_offers = planner.worker, plan is not None
        if plan is None:
            if not worker.rows.num_used and not worker.has_changes:
                return None
            self._mark_changed(worker)
            plan = planner.begin_step(now)
            planner.plan_running(plan, partial(self._requests.preempt_one, worker))
        batch = planner.finish_plan(plan)
        if planner.changes_due_at is not None:
            self._changes_due[worker.capacity.worker_id] = planner.changes_due_at
        elif self._changes_due:
            self._changes_due.pop(worker.capacity.worker_id, None)
        if batch is not None:
            if self.config.burst_s and not has_offers:
                planner.plan_burst(batch, self.config.burst_s, now)
            self._counts.steps += 1 + len(batch.then)
        return batch

    def _mark_changed(self, worker: WorkerState) -> None:
        self._touched[worker.capacity.worker_id] = worker
        self._placement.mark_changed(worker)

    def _offer(self, worker: WorkerState, entry: QueueEntry) -> bool:
        """Admit a waiting sequence to the next step of a worker if it fits, after its running rows. Returns whether the
        step accepts more. Less urgent rows are preempted for the first one.
        """
        name, now, features = worker.capacity.worker_id, self._now, entry.seq.group.features
        planner, plan = self._planners[name], self._plans.get(name)
        if plan is None:
            self._mark_changed(worker)
            if len(self._requests.priorities) > 1:
                self._requests.preempt_for(worker, entry)
            plan = self._plans[name] = planner.begin_step(now)
            if planner.plan_running(plan, partial(self._requests.preempt_one, worker)):
                return False
        if plan.budget < 1 or (features.num_bytes and not plan.has_room_for(features.num_bytes)):
            return False
        if entry.seq.group.priority == LAST_PRIORITY and not planner.takes_background(plan):
            return False  # the queue has only such sequences behind it
        has_others = self._share.has_others
        num_kept = worker.num_kept_rows(entry.seq, has_others) if has_others or entry.seq.group.n > 1 else 0
        found = worker.try_admit(entry, self.config.watermark, self._throughput.mean_output, num_kept)
        if isinstance(found, Refusal):
            worker.note_refusal(entry, found)
            plan.num_refused += 1
            is_starved = not found.of_tenant and entry.is_starved(now, self.config.aging_s)
            return plan.num_refused < MAX_REFUSALS and not is_starved
        num_head_tokens = features.num_head_tokens
        if num_head_tokens and not len(found.hits) and not plan.has_tokens_for(num_head_tokens):
            return False  # the sequence is the first to get tokens of the next step
        late = entry.seq.forks[found.num_forks :]
        entry.seq.forks = entry.seq.forks[: found.num_forks]
        planner.admit(entry.seq, found.hits, plan)
        self._admitted.append((worker, entry, late))
        return plan.budget > 0

    def _leave_queue(self, now: float) -> None:
        """Remove the admitted sequences from the queue, which does not change during a pass."""
        admitted, self._admitted = self._admitted, []
        for worker, entry, late in admitted:
            self._count_admitted(worker, entry, now)
            if late:
                self._requests.enqueue_samples(late)

    def _count_admitted(self, worker: WorkerState, entry: QueueEntry, now: float) -> None:
        seq, num_tokens, num_cached = entry.seq, entry.num_tokens, entry.seq.num_cached_tokens
        self._waiting.remove(seq)
        self._placement.add_written(worker, num_tokens - num_cached)
        self._throughput.add_admitted(num_tokens)
        if not seq.num_preemptions:
            seq.admitted_at = now
            self._counts.prefix_cache_queries += num_tokens
            self._counts.prefix_cache_hits += num_cached
            self._share.charge_prompt(seq.group.tenant_slot, num_tokens - num_cached)

    # -- answers ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput, now: float) -> Deltas:
        """Apply a worker's answer to its oldest step. Returns the new tokens and the sequences that ended.

        Answers of removed workers are ignored. Raises UnexpectedStepError if the step is not the oldest in flight; the
        caller must then remove the worker.
        """
        planner = self._planners.get(output.worker_id)
        if planner is None:
            return _finishes([])
        worker = planner.worker
        step, failures = check_answer(worker.in_flight, output)
        worker.pop_in_flight()
        self._mark_changed(worker)
        worker.rows.now = now
        is_open = worker.rows.open_since(step.closed) if step.closed else None
        self._requests.costs.add_step(worker.rows, step, output.forward_us, is_open)
        if step.is_full:  # in other steps the worker could have computed more tokens
            self._throughput.prefill.add(step.num_prompt_tokens, now - max(step.sent_at, planner.answered_at))
        if step.burst_len:
            planner.end_message(step, now)
            self._ready[output.worker_id] = planner
        failed = list[Finished]()
        if failures:
            output.errors = [failure for failure in failures if failure.row not in step.closed]
            failed = self._fail_rows(worker, step, output.errors)
            is_open = worker.rows.open_since(step.closed) if step.closed else None
        rows, deltas, newest = append_tokens(worker.rows, step, output, is_open, self._stops)
        if step.accepted is not None:
            self._counts.accepted_draft_tokens += step.accepted.num_drafts
        if output.draft_lens is not None or worker.speculation.is_on:
            worker.speculation.note(output, is_open)
        for part in worker.parts:
            for failure in part.read(step, output, is_open, deltas):
                failed += self._retry_or_end(worker, failure)
        self._share.charge_outputs(worker.rows.tenant, rows)
        worker.commit_fills(step, is_open)
        deltas.finished.extend(failed)
        may_reach_limit, last_ids = step.may_reach_limit, deltas.token_ids
        if newest is not None:
            rows, last_ids = rows[newest], last_ids[newest]
        if places := self._stops.may_end(worker.rows, rows, last_ids, may_reach_limit=may_reach_limit):
            deltas.finished += self._finish_rows(worker, rows, last_ids, places)
        for row in step.prompt_only:  # requests without output
            if row not in step.closed:
                deltas.finished.append(self._requests.end(worker.rows.sequence(row), FinishReason.LENGTH))
        if step.releases:
            worker.free_released(step)
        for part in worker.parts:
            if (outcome := part.advance(step, output)) is not None:
                deltas = self._apply(worker, outcome, deltas)
        return deltas

    def _apply(self, worker: WorkerState, outcome: Advance, deltas: Deltas) -> Deltas:
        """Apply what a part found in an answer. Returns `deltas` with the outputs of the requests that end."""
        if outcome.advanced:
            self._share.charge_outputs(worker.rows.tenant, np.array(outcome.advanced))
        for failure in outcome.failures:
            deltas.finished.extend(self._retry_or_end(worker, failure))
        for group, outputs in outcome.completed:
            deltas = with_outputs(deltas, group, outputs, self._requests.end_gang(group, outputs))
        return deltas

    def _finish_rows(self, worker: WorkerState, rows: I64, newest_ids: U32, places: list[int]) -> list[Finished]:
        """End the rows at these indices whose newest token is their last one."""
        ends: list[Finished] = []
        for i in places:
            row = rows.item(i)
            end = self._stops.end_of(worker.rows, row, worker.rows.output_tokens(row))
            if end is None:
                continue
            seq = worker.rows.sequence(row)
            ends.append(self._requests.end(seq, end[0], stop_token_id=end[1]))
            if end[0] is not FinishReason.LENGTH:
                self._throughput.add_output(len(seq.data.output))
        return ends

    def _fail_rows(self, worker: WorkerState, step: InFlightStep, live: list[RowError]) -> list[Finished]:
        """Retry a failed row once on another worker, because the machine may have caused the failure. End the sequence
        if it has failed before or no other worker could run it. Rows that read blocks of a failed row are computed
        again, even if they failed too.
        """
        untrusted = untrusted_after(worker, {failure.row for failure in live}, step)
        worker.pool.forget(np.array(untrusted.blocks, dtype=np.int64))
        causes = [failure for failure in live if failure.row not in untrusted.rows]
        # The causes come first: a gang whose other rows read its blocks has had its retry too.
        ends = [end for failure in causes for end in self._retry_or_end(worker, failure)]
        for row in untrusted.rows:
            if worker.rows.sequences[row] is not None:  # else it was closed with its gang
                self._requests.requeue(worker.preempt(row), MigrationReason.FAILED)
        return ends

    def _retry_or_end(self, worker: WorkerState, failure: RowError) -> list[Finished]:
        if worker.rows.sequences[failure.row] is None:
            return []  # it was closed with its gang
        seq = worker.rows.sequence(failure.row)
        if seq.group.features.is_gang:
            seq = seq.group.sequences[0]
        others = [other for other in self._workers.values() if other is not worker and not other.is_draining]
        is_final = failure.code is RowErrorCode.GRAMMAR or seq.failed_on is not None
        if is_final or not any(other.could_run(seq.group) for other in others):
            return self._requests.end_failed(seq, failure.message)
        seq.failed_on = worker.capacity.worker_id
        self._requests.requeue(worker.preempt(failure.row), MigrationReason.FAILED)
        return []

    def change_weights(self, root_salt: bytes, *, keeps_kv: bool) -> int:
        """See `Barrier.change_weights`. The barrier is reached."""
        self.config = replace(self.config, root_salt=root_salt)
        self._touched.update(self._workers)
        return self.barrier.change_weights(root_salt, keeps_kv=keeps_kv)

    def forget_prefixes(self) -> None:
        """No prefix stays cached. The barrier is reached."""
        self._touched.update(self._workers)
        self.barrier.forget_prefixes()

    # -- facts --------------------------------------------------------------------------------------------------------

    def take_prefix_events(self) -> list[PrefixChanges]:
        """Changes of cached prefixes since the last call; those of one worker are in order."""
        evicted, self._evicted = self._evicted, []
        touched, self._touched = self._touched, {}
        return evicted + [changes for worker in touched.values() for changes in worker.take_prefix_changes()]

    def cached_prefixes(self) -> list[PrefixChanges]:
        """All cached prefixes of all workers, to fill an index that has lost its data."""
        return [worker.cached_prefixes() for worker in self._workers.values()]

    def load(self) -> Load:
        """The current load: waiting and running sequences, pending tokens."""
        return load_of(self._requests, self._workers.values())

    def take_requeued(self) -> list[Sequence]:
        """Sequences that lost their row since the last call, with their `requeue_reason`. Some may run again, or have
        ended.
        """
        requeued, self._requests.requeued = self._requests.requeued, []
        return requeued

    def worker_stats(self, worker_id: str) -> WorkerStats:
        """Occupancy of one worker. The worker must have joined."""
        return worker_stats(self._workers[worker_id])

    def first_workers(self, worker_ids: Iterable[str] = ()) -> list[WorkerState]:
        """These workers, if they are known, to be read; without ids, the first ones."""
        known = (self._workers[name] for name in worker_ids or self._workers if name in self._workers)
        return list(islice(known, MAX_POOLS))

    def waiting_snapshot(self, now: float) -> list[OpenSequence]:
        """The first waiting sequences."""
        return waiting_snapshot(self._requests, now)

    def slowest(self, now: float) -> list[OpenSequence]:
        """The oldest open requests."""
        return slowest(self._requests, self._workers.values(), now)

    def stats(self) -> SchedulerStats:
        """Load, occupancy of each worker, and counters since the start."""
        return scheduler_stats(self._requests, self._workers.values(), self._counts)


def _finishes(finished: list[Finished]) -> Deltas:
    return Deltas(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, finished)
