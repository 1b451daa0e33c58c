"""One pass over the queue: assigns waiting sequences to the next steps of workers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from operator import is_

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.measurements import Throughput
from scheduler_svc.core.placement import Placement, Wait, WorkerChoice
from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.sequence import QueueEntry
from scheduler_svc.core.steps.step_planner import StepPlanner

MAX_SKIPPED = 256  # sequences per pass that wait for one worker: until it is prepared, or although others have room


class QueueScan:
    """Assigns waiting sequences to workers. Sequences stay in the queue until a step admits them."""

    def __init__(
        self, config: SchedulerConfig, requests: Requests, placement: Placement, throughput: Throughput
    ) -> None:
        self._config = config
        self._requests = requests
        self._waiting = requests.waiting
        self._placement = placement
        self._throughput = throughput
        self._waits: list[Wait] = []  # of the last pass, if all its sequences got one
        self._is_cut = False  # the last pass ended before the queue

    def place(self, ready: Mapping[str, StepPlanner], now: float) -> dict[str, list[QueueEntry]]:
        """For each ready worker, the sequences to admit in its next step, in order. The assignment holds for this step
        only.

        The pass ends when no worker accepts more, so thousands of waiting sequences cost no more than a few. Most
        answers change one worker, while most sequences wait for another: then the result of the last pass is kept.
        """
        placed: dict[str, list[QueueEntry]] = {}
        is_mixed = len(self._requests.priorities) > 1
        if not self._waiting.num_schedulable or not self._may_admit(ready, is_mixed=is_mixed):
            return placed
        tokens_per_s, waits = self._throughput.prefill.per_s, self._waits
        if waits and not is_mixed and self._are_first(waits) and self._placement.would_wait(waits, now, tokens_per_s):
            return placed
        self._placement.begin_pass(ready.keys(), is_mixed=is_mixed)
        found: list[Wait | None] = []
        moved: list[QueueEntry] = []
        num_passed = num_skipped = 0
        self._is_cut = False
        for entry in self._waiting if self._placement.num_accepting else ():
            choice = self._placement.place(entry, now, tokens_per_s)
            found.append(choice.wait)
            if entry.has_old_key:
                moved.append(entry)
            if choice.is_now:
                placed.setdefault(choice.worker.capacity.worker_id, []).append(entry)
            elif choice.is_held or not choice.is_prepared:
                num_skipped += 1  # it takes no place from later sequences
            else:
                num_passed += 1
            if self._is_starved(entry, choice, now):
                self._placement.reserve_for(entry)
            self._is_cut = num_passed > self._config.max_bypass or num_skipped > MAX_SKIPPED
            if self._is_cut or not self._placement.num_accepting:
                break
        for entry in moved:
            self._waiting.move(entry, self._requests.virtual_arrival(entry))
        self._waits = [] if is_mixed or None in found else [wait for wait in found if wait is not None]
        return placed

    def _are_first(self, waits: list[Wait]) -> bool:
        """Whether the first sequences of the queue are still those of these waits, in this order, and it has no others
        unless the pass was cut.
        """
        entries = list(islice(self._waiting, len(waits) + (not self._is_cut)))
        return len(entries) == len(waits) and all(map(is_, entries, (wait.entry for wait in waits)))

    def _may_admit(self, ready: Mapping[str, StepPlanner], *, is_mixed: bool) -> bool:
        """Whether some ready worker has not refused some sequence that may be admitted next.

        A refusal holds until rows or blocks become free. Only the first sequence is also retried when the projected
        peak may have fallen far enough: retrying all of them would cost more than it gains.
        """
        first = next(iter(self._waiting))
        if not first.refusals:
            return is_mixed or any(planner.worker.num_free_rows > 0 for planner in ready.values())
        workers = [p.worker for p in ready.values() if is_mixed or p.worker.num_free_rows > 0]
        entries = list(islice(self._waiting, self._config.max_bypass + 1))
        for worker in workers:
            worker.expire_refusal(first)
        refusals = (worker.refusal(entry) for entry in entries for worker in workers)
        return any(refusal is None or (is_mixed and refusal.can_preempt) for refusal in refusals)

    def _is_starved(self, entry: QueueEntry, choice: WorkerChoice, now: float) -> bool:
        """Whether no worker has had room for the sequence for `aging_s`: its eligible workers are reserved for it."""
        return not choice.has_room and not choice.is_held and self._requests.is_starved(entry, now)
