"""Every live request from arrival to end: its group, its position in the queue, its deadline and its tenant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Counts, Finished, MigrationReason
from scheduler_svc.core.policy import Throughput, expected_tokens, may_stop, sure_output
from scheduler_svc.core.sequence import (
    Completion,
    FinishReason,
    QueueEntry,
    Refusal,
    Sequence,
    SequenceData,
    SequenceGroup,
    SequenceStatus,
)
from scheduler_svc.core.steps.answers import Stops
from scheduler_svc.core.steps.costs import Costs
from scheduler_svc.core.waiting_queue import FairShare, WaitingQueue
from scheduler_svc.core.worker_state import WorkerState, num_forks_needed
from step_protocol.columns import EMPTY

RETRY_ADVICE = "retry later or on another scheduler"


class Requests:
    """Owns groups, queue and shares. Shares `workers` with the scheduler, to free the row of a sequence that ends."""

    def __init__(
        self,
        config: SchedulerConfig,
        workers: dict[str, WorkerState],
        placement: Placement,
        stops: Stops,
        throughput: Throughput,
        counts: Counts,
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.share = FairShare()
        self.waiting = WaitingQueue(self.share, config.aging_tokens_per_s)
        self.priorities: Counter[int] = Counter()  # number of live groups per priority
        self.num_bytes = 0  # data that live groups carry
        self._config = config
        self._workers = workers
        self._placement = placement
        self._stops = stops
        self._throughput = throughput
        self._counts = counts
        self.costs = Costs()
        self.preempted: list[tuple[Sequence, WorkerState, Refusal | None]] = []  # not in the queue yet
        self.requeued: list[Sequence] = []  # for observers; `Scheduler.take_requeued` empties it
        self.admits_new = True  # else only sequences that have begun are schedulable
        self._next_seq_id = 0
        self._no_worker_since = math.inf  # inf until `give_up` sets it

    def add(self, group: SequenceGroup, now: float) -> list[Finished]:
        """Queue an accepted request. Returns the samples whose Continuation is complete, which end at once."""
        group.arrival = now
        group.deadline = math.inf if group.timeout_s is None else now + group.timeout_s
        group.tenant_slot = self.share.join(group.tenant_id)
        live = [i for i in range(group.num_sequences) if i not in group.finished_samples]
        group.sequences = [self._make_sequence(group, i) for i in live]
        for feature in group.features.items:
            feature.begin(group, self._config.eos_token_ids)
        self.groups[group.request_id] = group
        self.priorities[group.priority] += 1
        self.num_bytes += group.features.num_bytes
        finished: list[Finished] = []
        fresh: list[Sequence] = []
        for seq in group.sequences:
            if not len(seq.data.output):
                fresh.append(seq)
            elif (end := self._stops.end_of_output(seq)) is not None:
                seq.move_to(SequenceStatus.FINISHED)
                finished.append(_finished(seq, *end))
            else:
                self._enqueue(seq)
        self.enqueue_samples(fresh)
        if len(finished) == len(group.sequences):
            self._forget_if_done(group)
        return finished

    def _make_sequence(self, group: SequenceGroup, sample_index: int) -> Sequence:
        output = group.outputs[sample_index] if sample_index < len(group.outputs) else EMPTY
        self._next_seq_id += 1
        return Sequence(group, sample_index, SequenceData(group.prompt, output), self._next_seq_id)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str, reason: FinishReason, message: str = "") -> list[Finished]:
        """End a request in any state. Its blocks become free when the steps that use them are answered."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        live = [seq for seq in group.sequences if not seq.is_finished]
        ends = [self.end(seq, reason, message=message, keep_forks=False) for seq in live]
        return [end for end in ends if end.sample_index < group.n]  # a gang may have more sequences than samples

    def end_if_late(self, seq: Sequence, now: float) -> list[Finished]:
        """End the request of a waiting sequence that cannot meet its deadline any more; else look again later."""
        start_by = self.start_by(seq)  # measured again
        if start_by > now:
            self.waiting.add_deadline(seq, start_by)
            return []
        message = "the request cannot meet its deadline any more; retry later or set a later deadline"
        return self.abort(seq.group.request_id, FinishReason.ABORTED, message)

    def end_failed(self, seq: Sequence, message: str) -> list[Finished]:
        """End a failed sequence, and all others of its gang."""
        if seq.group.features.is_gang:
            return self.abort(seq.group.request_id, FinishReason.ERROR, message)
        return [self.end(seq, FinishReason.ERROR, message=message)]

    def end_gang(self, group: SequenceGroup, outputs: Seq[Completion]) -> list[Finished]:
        """End a request whose outputs, the best first, become its samples."""
        first = group.sequences[0]
        ends = self.abort(group.request_id, FinishReason.ERROR, f"only {len(outputs)} different outputs are possible")
        return [
            replace(
                end,
                reason=best.end,
                num_output_tokens=len(best.token_ids),
                num_cached_tokens=first.num_cached_tokens,
                num_recomputed_tokens=first.num_recomputed_tokens,
                num_preemptions=first.num_preemptions,
                stop_token_id=int(best.token_ids[-1]) if best.end is FinishReason.STOP else None,
                message="",
                logprob=best.logprob,
                score=best.score,
            )
            for end, best in zip(ends, outputs, strict=False)
        ] + ends[len(outputs) :]

    def give_up(self, now: float) -> list[Finished]:
        """End each request that no present worker could run for `worker_patience_s`. Without workers, that is every
        request.
        """
        if not self.admits_new:
            return []
        if not self._workers:
            self._no_worker_since = min(self._no_worker_since, now)
        unschedulable, ended = self.waiting.unschedulable, list[Finished]()
        for seq in reversed(unschedulable):
            if unschedulable[seq] <= now:
                break
            unschedulable[seq] = now
        while self.patience_ends_at <= now:
            group = next(self.waiting.sequences()).group
            ended += self.abort(group.request_id, FinishReason.ERROR, self._no_worker_message(group))
        return ended

    @property
    def patience_ends_at(self) -> float:
        """When `give_up` ends the next request, unless a worker joins; inf if no request is at risk."""
        if not self.admits_new:
            return math.inf
        since = next(iter(self.waiting.unschedulable.values()), math.inf)
        if not self._workers and len(self.waiting):
            since = self._no_worker_since
        return since + self._config.worker_patience_s

    def is_out_of_patience(self, now: float) -> bool:
        """Whether no worker has been connected for `worker_patience_s`. New requests are then refused."""
        return not self._workers and self._no_worker_since + self._config.worker_patience_s <= now

    def _no_worker_message(self, group: SequenceGroup) -> str:
        patience_s = self._config.worker_patience_s
        if not self._workers:
            return f"no worker is connected and none joined within {patience_s:g} s; {RETRY_ADVICE}"
        sizes = f"{len(group.prompt)} prompt tokens, max_tokens {group.stop.max_tokens}"
        largest = f"{self._placement.largest_pool} tokens"
        return (
            f"no present worker can run the request ({sizes}; the largest pool has {largest}), and no eligible worker "
            f"joined within {patience_s:g} s; {RETRY_ADVICE}"
        )

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        message: str = "",
        keep_forks: bool = True,
    ) -> Finished:
        """End a sequence in any state. Every end of a sequence uses this method."""
        forks = seq.forks
        if seq.worker_id is not None and seq.row is not None:
            worker = self._workers[seq.worker_id]
            worker.finish(seq, seq.row)
            self._placement.mark_changed(worker)
        else:
            self._leave_queue(seq)
            seq.move_to(SequenceStatus.FINISHED)
        self.costs.end(seq)
        seq.forks = []
        if keep_forks:
            self.enqueue_samples(forks)
        self._forget_if_done(seq.group)
        return _finished(seq, reason, stop_token_id, message)

    def _leave_queue(self, seq: Sequence) -> None:
        if seq in self.waiting:
            self.waiting.remove(seq)
            return
        for leader in seq.group.sequences:  # the sequence was waiting to fork from another sample
            if seq in leader.forks:
                leader.forks.remove(seq)
                if leader.worker_id is not None:
                    worker = self._workers[leader.worker_id]
                    worker.unreserve_row()
                    self._placement.mark_changed(worker)

    def _forget_if_done(self, group: SequenceGroup) -> None:
        if not group.is_finished or self.groups.pop(group.request_id, None) is None:
            return
        self.share.leave(group.tenant_slot)
        self.num_bytes -= group.features.num_bytes
        self.priorities[group.priority] -= 1
        if not self.priorities[group.priority]:
            del self.priorities[group.priority]

    # -- the queue ----------------------------------------------------------------------------------------------------

    def requeue(self, seq: Sequence, migration: MigrationReason | None = None) -> None:
        """Queue a preempted sequence again."""
        seq.requeue_reason = "preempted" if migration is None else migration.value
        if migration is None:
            self._counts.num_preemptions += 1
        else:
            self._counts.migrations[migration] += 1
        self.requeued.append(seq)
        self._enqueue(seq)

    def requeue_all(self, worker: WorkerState, migration: MigrationReason) -> int:
        """Queue all sequences of a worker again. Returns how many rows, or gangs, it had."""
        num_requeued = 0
        while worker.rows.num_used:
            self.requeue(worker.preempt(int(worker.rows.active()[0])), migration)
            num_requeued += 1
        return num_requeued

    def preempt_one(self, worker: WorkerState) -> None:
        """Preempt the least urgent row of a worker, or the gang that it belongs to. `requeue_preempted` queues it."""
        victim = max(worker.rows.active().tolist(), key=lambda row: worker.rows.sequence(row).order)
        seq = worker.preempt(victim)
        # While a step is in flight, it could reuse its blocks as cached blocks before they are free.
        self.preempted.append((seq, worker, worker.refuse() if worker.in_flight else None))

    def requeue_preempted(self) -> None:
        """Queue the sequences that `preempt_one` has preempted: a pass over the queue must not change it."""
        preempted, self.preempted = self.preempted, []
        for seq, worker, refusal in preempted:
            self.requeue(seq)
            entry = self.waiting.entry(seq)
            if entry and refusal:
                entry.refusals[worker.capacity.worker_id] = refusal

    def preempt_for(self, worker: WorkerState, entry: QueueEntry) -> None:
        """Preempt less urgent rows to make room for an urgent sequence. Do not preempt if it still would not fit."""
        urgent = entry.seq
        if _has_space(urgent, worker) or not _has_less_urgent(urgent, worker):
            return
        refusal = worker.check_preempting(urgent, self._config.watermark, self._throughput.mean_output)
        if refusal is not None:
            entry.refusals[worker.capacity.worker_id] = refusal
            return
        while not _has_space(urgent, worker) and _has_less_urgent(urgent, worker):
            self.preempt_one(worker)

    def enqueue_samples(self, samples: list[Sequence]) -> None:
        """Queue samples that got no row. The first starts from the cached prompt, and the others fork from it."""
        if samples:
            samples[0].forks = samples[1:]
            self._enqueue(samples[0])

    def update_schedulable(self, is_affected: Callable[[SequenceGroup], bool] | None = None) -> None:
        """Update which sequences are unschedulable, of all requests or of those that are affected. Called when workers
        join, leave, drain or change what they can run, so that steps need not check the whole queue.
        """
        if self._workers:
            self._no_worker_since = math.inf
        for seq in list(self.waiting.sequences()):
            if is_affected is None or is_affected(seq.group):
                self._update_schedulable(seq)

    def _update_schedulable(self, seq: Sequence) -> None:
        if self._is_schedulable(seq) == (seq in self.waiting.unschedulable):
            self.waiting.remove(seq)
            self._join_queue(seq)

    def _is_schedulable(self, seq: Sequence) -> bool:
        is_admitted = self.admits_new or not seq.is_new
        return is_admitted and self._placement.could_run(seq.group, seq.failed_on)

    def _join_queue(self, seq: Sequence) -> None:
        remaining, num_samples = seq.group.stop.max_tokens - len(seq.data.output), 1 + len(seq.forks)
        num_tokens = expected_tokens(seq.data.num_tokens, remaining, num_samples, self._throughput.mean_output)
        if not self._is_schedulable(seq):
            self.waiting.add_unschedulable(seq, num_tokens)
            return
        entry = QueueEntry(seq, num_tokens)
        if entry.is_new:
            self._placement.look_up_cached(entry, seq.group.arrival)
        self.waiting.add(entry)

    def _enqueue(self, seq: Sequence) -> None:
        self._join_queue(seq)
        if seq.group.deadline < math.inf:
            self.waiting.add_deadline(seq, self.start_by(seq))

    def output_s(self, group: SequenceGroup) -> float:
        """Seconds that the output of a request will take at least, as far as that is measured. An idle worker may be
        faster than it was. A client that has less time than the mean answer takes expects a shorter one.
        """
        times = [(worker.decode_s or 0.0) if worker.rows.num_used else 0.0 for worker in self._workers.values()]
        seconds = sure_output(group, self._throughput.measured_output) * min(times, default=0.0)
        return min(seconds, group.timeout_s / 2) if group.timeout_s is not None and may_stop(group) else seconds

    def start_by(self, seq: Sequence) -> float:
        """When a waiting sequence is too late: at its deadline if its request has begun or was accepted before, else
        when its output could not be complete by then.
        """
        group, entry, prefill_per_s = seq.group, self.waiting.entry(seq), self._throughput.prefill.per_s
        if any(not other.is_new for other in group.sequences):
            return group.deadline
        uncached = entry.num_tokens - entry.max_cached if entry is not None else 0
        prompt_s = uncached / prefill_per_s if prefill_per_s else 0.0
        return group.deadline - prompt_s - self.output_s(group)


def _finished(seq: Sequence, reason: FinishReason, stop_token_id: int | None = None, message: str = "") -> Finished:
    seq.finish_reason = reason
    return Finished(
        group=seq.group,
        sample_index=seq.sample_index,
        reason=reason,
        num_output_tokens=0 if seq.group.features.chooses_tokens else len(seq.data.output),  # clients got none
        num_cached_tokens=seq.num_cached_tokens,
        num_recomputed_tokens=seq.num_recomputed_tokens,
        num_preemptions=seq.num_preemptions,
        processor_us=seq.processor_us,
        block_s=seq.block_s,
        stop_token_id=stop_token_id,
        message=message,
    )


def _has_space(seq: Sequence, worker: WorkerState) -> bool:
    _, num_blocks = worker.rows.opening_blocks(seq.data.num_tokens, 0)
    return worker.has_space(1 + num_forks_needed(seq), num_blocks)


def _has_less_urgent(seq: Sequence, worker: WorkerState) -> bool:
    priorities = worker.rows.priority[worker.rows.active()]
    return bool((priorities > seq.group.priority).any())
