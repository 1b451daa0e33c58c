"""The one task that calls the core.

Streams post events with plain method calls; the events wait in an inbox. Each turn handles all events in the inbox:

    apply events -> schedule -> send steps -> route tokens and finishes -> publish prefix changes

Steps are sent first because workers wait for them. Nothing here polls, and the only clock is the event loop's clock, so
the task also runs on a simulated event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from quire.internal.v1.scheduler_pb2 import WeightsChange

from prefix_index.index import PrefixIndex
from scheduler_svc.core.admission.barrier import Hold
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import SchedulerError, UnexpectedStepError, WorkerMismatchError
from scheduler_svc.core.features.adapters import AdapterSwap
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.messages import CachedBlock, Deltas, WorkerCapacity, split_deltas
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from scheduler_svc.core.sequence import Sequence as QueuedSequence
from scheduler_svc.history import Events, LoadSamples, RequestTimelines, log_finished, log_queued
from scheduler_svc.metrics import SchedulerTimes
from scheduler_svc.refusals import RETRY_NO_WORKER_S, RETRY_STOPPING_S, RetryAdvice, refusal_from
from step_protocol.messages import StepBatch, StepOutput
from svc_common.errors import AlreadyExistsError, ServiceError, UnavailableError
from svc_common.flush import FlushTimer

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model that are needed to build the core. Equal for all workers."""

    eos_token_ids: frozenset[int] = frozenset()
    root_salt: bytes = b""


class WorkerLink(Protocol):
    """One lease of one worker. A new lease of the same worker is a new link, so late answers belong to the old link."""

    @property
    def worker_id(self) -> str: ...

    @property
    def worker_epoch(self) -> int: ...

    @property
    def address(self) -> str: ...

    def send(self, batch: StepBatch) -> None:
        """Queue a step for the worker. A failure is reported with `StepLoop.worker_lost`."""

    def fetch_blocks(self, move: BlockMove, source_address: str) -> None:
        """Fill blocks of the worker's pool. The end is reported."""

    def swap_adapter(self, swap: AdapterSwap) -> None:
        """Make an adapter resident. The end is reported."""

    def close(self, reason: str) -> None:
        """End the lease, because the worker is drained, broke the protocol or was refused."""


class GatewayLink(Protocol):
    """Sends replies and deltas to one gateway."""

    def reply(self, handle: int, error: ServiceError | None) -> None:
        """Reply to one Submit: queued (None) or refused."""

    def deliver(self, deltas: Deltas) -> None:
        """Send new tokens and finishes of this gateway's requests. They may be merged with later ones."""

    def change_weights(self, change: WeightsChange) -> None:
        """Send that later tokens are computed by these weights."""


class StepLoop:
    """Owns `core.Scheduler`. The methods that gateways and workers call only post an event.

    The first worker that joins brings the ModelFacts of the core. Until then requests are refused with UNAVAILABLE.
    Afterwards the core decides how long a request waits for a worker that can run it. When all workers have left and no
    request is live, a worker with another model may join.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, timelines: RequestTimelines | None = None) -> None:
        self._config = config
        self._index = index
        self.timelines = timelines or RequestTimelines()
        self._now = 0.0  # time of the current turn
        self.core = Scheduler(config)  # others only read it
        self.lenders: Callable[[Scheduler], None] | None = None  # finds blocks on workers of other schedulers
        self._facts: ModelFacts | None = None
        self._workers: dict[str, WorkerLink] = {}
        self._draining: set[str] = set()
        self._gateways: dict[int, GatewayLink] = {}
        self._requests: dict[tuple[int, int], SequenceGroup] = {}  # (owner, handle) of live requests
        self._next_owner = 0
        self._reaching: dict[str, asyncio.Future[Hold]] = {}  # by holder
        self._inbox: list[Callable[[], None]] = []
        self._produced: list[Deltas] = []
        self._wake = asyncio.Event()
        self._alarm = FlushTimer(self._wake.set)  # a turn that needs no event: the core has something due
        self._idle = asyncio.Event()
        self._refusal: ServiceError | None = None
        self._advice = RetryAdvice()
        self._is_stopped = False
        self.times = SchedulerTimes()
        self.events = Events()
        self.samples = LoadSamples()

    # -- gateways -----------------------------------------------------------------------------------------------------

    def attach(self, link: GatewayLink) -> int:
        """Add a gateway. Returns its number, the `owner` of its groups."""
        owner = self._next_owner
        self._next_owner += 1
        self._gateways[owner] = link
        return owner

    def detach(self, owner: int) -> None:
        """Remove a gateway and abort its requests."""
        self._post(partial(self._apply_detach, owner))

    def submit(self, group: SequenceGroup) -> None:
        """Add a request of gateway `group.owner`. The gateway's link gets the `reply`."""
        self._post(partial(self._apply_submit, group))

    def cancel(self, owner: int, handle: int, sample_index: int | None, reason: FinishReason) -> None:
        """End a gateway's request, or one of its samples. Does nothing if the request has already finished."""
        self._post(partial(self._apply_cancel, owner, handle, sample_index, reason))

    def abort(self, request_ids: Sequence[str]) -> asyncio.Future[list[str]]:
        """End requests of any gateway by request_id. The result lists the ids that were live."""
        found: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._post(partial(self._apply_abort, tuple(request_ids), found))
        return found

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker_joined(
        self,
        link: WorkerLink,
        capacity: WorkerCapacity,
        facts: ModelFacts,
        blocks: Sequence[CachedBlock] = (),
        next_step_id: int = 1,
    ) -> None:
        """Add a leased worker. `blocks` are the cached blocks of its pool."""
        self._post(partial(self._apply_joined, link, capacity, facts, blocks, next_step_id))

    def step_answered(self, link: WorkerLink, output: StepOutput) -> None:
        """Report a worker's answer to its oldest step."""
        self._post(partial(self._apply_answer, link, output))

    def worker_draining(self, link: WorkerLink, timeout_s: float = 0.0) -> None:
        """Stop placing sequences on a worker. Its sequences move when another worker has room for them, or when half of
        `timeout_s` (0: the default of workers) has passed. The link is closed when the worker has none left.
        """
        self._post(partial(self._apply_draining, link, timeout_s))

    def worker_lost(self, link: WorkerLink, reason: str) -> None:
        """Remove a worker whose lease has ended. Its sequences keep their tokens and wait again."""
        self._post(partial(self._apply_lost, link, reason))

    def report(self, event: Callable[[Scheduler, float], None], link: WorkerLink | None = None) -> None:
        """Call `event(core, now)` in the next turn; with a `link` only if its lease has not ended."""
        self._post(partial(self._apply_event, event, link))

    def address_of(self, worker_id: str) -> str:
        """The address of a leased worker."""
        return self._workers[worker_id].address

    # -- weights, pauses ----------------------------------------------------------------------------------------------

    def hold(self, hold: Hold) -> asyncio.Future[Hold]:
        """Begin a hold of the core's barrier. Its samples, when it is reached, wait or were aborted. None: it was
        released before.
        """
        reached: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()
        self._post(partial(self._apply_hold, hold, reached))
        return reached

    def release(self, holder: str) -> None:
        """End a hold."""
        self._post(partial(self._apply_release, holder))

    def change(self, change: Callable[[Scheduler], T]) -> asyncio.Future[T]:
        """Change the core between two turns. The caller holds the barrier, if that is needed."""
        changed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(partial(self._apply_change, change, changed))
        return changed

    def change_weights(self, facts: ModelFacts, change: WeightsChange) -> asyncio.Future[int]:
        """The workers compute with other weights from the next step on. The caller holds the barrier, which is reached.
        Returns the number of rows that ran.
        """
        return self.change(partial(self._change_weights, facts, change))

    # -- start, stop, drain -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take turns until `stop` is called. An exception from here is a bug and must end the process."""
        loop = asyncio.get_running_loop()
        while not self._is_stopped:
            await self._wake.wait()
            self._wake.clear()
            self._now = loop.time()
            self._turn()
            self.times.record_turn(self._now, loop.time())
            if not self.has_work:
                self._idle.set()

    def stop(self) -> None:
        """Let `run` return after its current turn."""
        self._alarm.stop()
        self._is_stopped = True
        self._wake.set()

    def refuse_new(self, message: str) -> None:
        """Answer every later Submit with UNAVAILABLE."""
        self._refusal = UnavailableError(message, retry_after_s=RETRY_STOPPING_S)

    async def wait_idle(self) -> None:
        """Wait until no request is waiting or running."""
        while self.has_work:
            self._idle.clear()
            await self._idle.wait()

    # -- status -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self.core.has_work

    def num_rows(self, worker_id: str) -> int:
        """Number of sequences that a worker runs; 0 for a worker that has left."""
        return self.core.worker_stats(worker_id).rows_used if worker_id in self._workers else 0

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _post(self, fact: Callable[[], None]) -> None:
        self._inbox.append(fact)
        self._wake.set()

    def _turn(self) -> None:
        inbox, self._inbox = self._inbox, []
        for apply in inbox:
            apply()
        batches = self.core.schedule(self._now)
        if self._reaching:
            self._settle_holds()
        for batch in batches:
            self._workers[batch.worker_id].send(batch)
        if self.core.adapters.preparing:
            for swap in self.core.adapters.take_swaps():
                self._workers[swap.worker_id].swap_adapter(swap)
        if self.core.moves.is_on:
            self._begin_moves()
        if requeued := self.core.take_requeued():
            self._record_requeued(requeued)
        self.timelines.record_steps(batches, self._now)
        self._produce(self.core.take_expired())
        due_at = min(self.core.patience_ends_at, self.core.changes_due_at)
        if self.core.moves.is_on:
            due_at = min(due_at, self.core.moves.next_end_of_patience(self._now))
        self._alarm.by(due_at)
        self._route()
        if self._draining:
            self._release_drained()
        if changes := self.core.take_prefix_events():
            self._index.publish(changes)

    def _begin_moves(self) -> None:
        for move in self.core.moves.take_moves():
            source = None if move.source is None else self._workers.get(move.source.worker_id)
            address = "" if move.source is None else move.source.address
            self._workers[move.worker_id].fetch_blocks(move, source.address if source and not address else address)
        if self.lenders is not None:
            self.lenders(self.core)

    def _record_requeued(self, requeued: list[QueuedSequence]) -> None:
        for sequence in requeued:
            self.events.add(self._now, f"sequences queued again: {sequence.requeue_reason}", count=1)
        self.timelines.record_moves(requeued, self._now)

    def _produce(self, deltas: Deltas) -> None:
        """Keep tokens and finishes of the core for `_route`."""
        if not len(deltas.token_ids) and not deltas.finished and deltas.prompt is None:
            return
        self._produced.append(deltas)
        if deltas.finished:
            self.timelines.record_ends(deltas.finished, self.times.first_token_at, self._now)
        self.times.record_deltas(deltas, self._now, self._find)
        # Drop finished requests at once: a late cancel must not find a request that another stream has taken over.
        for finished in deltas.finished:
            group = finished.group
            if log.isEnabledFor(logging.DEBUG):
                log_finished(finished, self._now)
            if finished.reason is FinishReason.ERROR:
                self.events.add(self._now, "samples ended with an error", is_bad=True, count=1)
            if group.is_finished:
                self._requests.pop((group.owner, group.handle), None)
                self._advice.record_end(self._now)

    def _find(self, owner: int, handle: int) -> SequenceGroup | None:
        return self._requests.get((owner, handle))

    def _route(self) -> None:
        produced, self._produced = self._produced, []
        for deltas in produced:
            for owner, share in split_deltas(deltas).items():
                if owner in self._gateways:
                    self._gateways[owner].deliver(share)

    def _release_drained(self) -> None:
        for worker_id in sorted(self._draining):
            worker = self.core.worker_stats(worker_id)
            if not worker.rows_used and not worker.steps_in_flight and not self.core.is_source(worker_id):
                self._drop_worker(self._workers[worker_id], "drained")

    # -- applying requests --------------------------------------------------------------------------------------------

    def _apply_submit(self, group: SequenceGroup) -> None:
        link = self._gateways.get(group.owner)
        if link is None:
            return
        self.timelines.begin(group, self._now)
        try:
            self._add(group)
        except ServiceError as error:
            self.times.refusals[error.code.name] += 1
            self.events.add(self._now, f"requests refused: {error.code.name}", count=1)
            self.timelines.refuse(group, error.code.name, self._now)
            link.reply(group.handle, error)
        except Exception:
            # One request must not end the scheduler: its gateway would then send it to the next scheduler.
            log.exception("request %s: the core failed to add it", group.request_id)
            self.timelines.refuse(group, ServiceError.code.name, self._now)
            link.reply(group.handle, ServiceError("internal error while queueing the request; see the scheduler's log"))
        else:
            link.reply(group.handle, None)

    def _add(self, group: SequenceGroup) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._facts is None:
            raise UnavailableError("no worker has registered yet; retry later", retry_after_s=RETRY_NO_WORKER_S)
        key = (group.owner, group.handle)
        if key in self._requests:
            raise AlreadyExistsError(f"handle {group.handle} is in use by a live request; use another", field="handle")
        try:
            finished = self.core.add_group(group, self._now)
        except SchedulerError as error:
            raise refusal_from(error, self._queue_retry_s) from error
        self._requests[key] = group
        if log.isEnabledFor(logging.DEBUG):
            log_queued(group)
        if finished.finished:
            self._produce(finished)

    def _queue_retry_s(self) -> float:
        return self._advice.seconds(self.core.load().num_waiting, self._now)

    def _apply_cancel(self, owner: int, handle: int, sample_index: int | None, reason: FinishReason) -> None:
        group = self._requests.get((owner, handle))
        if group is None:
            return
        if sample_index is None:
            self._produce(self.core.abort_group(group.request_id, reason))
        else:
            self._produce(self.core.finish_sample(group.request_id, sample_index, reason))

    def _apply_abort(self, request_ids: Sequence[str], found: asyncio.Future[list[str]] | None) -> None:
        live = {group.request_id for group in self._requests.values()}
        aborted = [request_id for request_id in request_ids if request_id in live]
        for request_id in aborted:
            self._produce(self.core.abort_group(request_id, FinishReason.ABORTED))
        if found is not None and not found.done():  # done: the caller was cancelled
            found.set_result(aborted)

    def _apply_detach(self, owner: int) -> None:
        if self._gateways.pop(owner, None) is None:
            return
        orphans = [key for key in self._requests if key[0] == owner]
        for key in orphans:
            self._apply_cancel(*key, None, FinishReason.ABORTED)

    # -- applying workers ---------------------------------------------------------------------------------------------

    def _apply_joined(
        self,
        link: WorkerLink,
        capacity: WorkerCapacity,
        facts: ModelFacts,
        blocks: Sequence[CachedBlock],
        next_step_id: int,
    ) -> None:
        stale = self._workers.get(link.worker_id)
        if stale is not None:
            self._drop_worker(stale, "leased again")
        try:
            self._core_for(facts).add_worker(capacity, blocks, next_step_id)
        except (SchedulerError, ValueError) as error:
            log.error("worker %s is refused: %s", link.worker_id, error)
            self.events.add(self._now, f"worker {link.worker_id} is refused: {error}", is_bad=True)
            link.close(str(error))
            return
        except Exception as error:  # MemoryError too: one worker must not end the scheduler
            log.exception("worker %s is refused: the core failed to add it", link.worker_id)
            link.close(f"the scheduler failed to add the worker: {type(error).__name__}; see the scheduler's log")
            return
        self._workers[link.worker_id] = link
        self.events.add(self._now, f"worker {link.worker_id} joined")
        self._index.register_worker(link.worker_id, link.worker_epoch, link.address)

    def _core_for(self, facts: ModelFacts) -> Scheduler:
        """The core for this model. Raises WorkerMismatchError while another model is in use."""
        if facts == self._facts:
            return self.core
        if self._workers or self.core.has_work:
            raise WorkerMismatchError("the worker's model differs from the model in use")
        config = replace(
            self._config,
            eos_token_ids=facts.eos_token_ids,
            root_salt=facts.root_salt,
            publishes_prefixes=self._index.is_shared,
            borrows_prefixes=self.lenders is not None,
        )
        barrier = self.core.barrier
        self.core, self._facts = Scheduler(config), facts
        self.core.barrier.adopt(barrier)
        return self.core

    def _apply_answer(self, link: WorkerLink, output: StepOutput) -> None:
        if self._workers.get(link.worker_id) is not link:
            return
        try:
            self._produce(self.core.update(output, self._now))
        except UnexpectedStepError as error:
            log.error("worker %s broke the protocol: %s", link.worker_id, error)
            self._drop_worker(link, str(error))
            return
        for failure in output.errors:  # failures of rows that were open
            log.warning(
                "worker %s: row %d failed in step %d: %s", link.worker_id, failure.row, output.step_id, failure.message
            )

    def _apply_draining(self, link: WorkerLink, timeout_s: float) -> None:
        if self._workers.get(link.worker_id) is not link:
            return
        self.core.drain_worker(link.worker_id, timeout_s)
        self._draining.add(link.worker_id)
        self.events.add(self._now, f"worker {link.worker_id} is draining")

    def _apply_event(self, event: Callable[[Scheduler, float], None], link: WorkerLink | None) -> None:
        if link is None or self._workers.get(link.worker_id) is link:
            event(self.core, self._now)

    def _apply_hold(self, hold: Hold, reached: asyncio.Future[Hold]) -> None:
        self.core.barrier.hold(hold)
        self._reaching[hold.holder] = reached

    def _apply_release(self, holder: str) -> None:
        if (hold := self.core.barrier.release(holder)) is not None:
            self._answer_hold(hold)

    def _answer_hold(self, hold: Hold) -> None:
        reached = self._reaching.pop(hold.holder, None)
        if reached is not None and not reached.done():  # done: the caller was cancelled
            reached.set_result(hold)

    def _settle_holds(self) -> None:
        """Some holds may be reached; others then, because requests have ended."""
        while reached := self.core.barrier.take_reached():
            if any(hold.aborts for hold in reached):
                self._apply_abort([group.request_id for group in self._requests.values()], None)
            for hold in reached:
                self._answer_hold(hold)

    def _apply_change(self, change: Callable[[Scheduler], T], changed: asyncio.Future[T]) -> None:
        result = change(self.core)
        if not changed.done():
            changed.set_result(result)

    def _change_weights(self, facts: ModelFacts, change: WeightsChange, core: Scheduler) -> int:
        self._facts = facts
        words, revision = f"weights have version {change.weights.version}", change.weights.revision
        self.events.add(self._now, f"{words}, revision {revision}" if revision else words)
        for link in self._gateways.values():
            link.change_weights(change)
        return core.change_weights(facts.root_salt, keeps_kv=change.keeps_kv)

    def _apply_lost(self, link: WorkerLink, reason: str) -> None:
        if self._workers.get(link.worker_id) is link:
            self._drop_worker(link, reason)

    def _drop_worker(self, link: WorkerLink, reason: str) -> None:
        """Remove the worker from the core. Its sequences wait for another worker."""
        del self._workers[link.worker_id]
        is_lost = link.worker_id not in self._draining
        num_rows = self.core.worker_stats(link.worker_id).rows_used
        words = f"is lost: {reason}; sequences to move: {num_rows}" if is_lost else f"left: {reason}"
        self.events.add(self._now, f"worker {link.worker_id} {words}", is_bad=is_lost)
        self._draining.discard(link.worker_id)
        self.core.remove_worker(link.worker_id)
        self._index.forget(link.worker_id, link.worker_epoch)
        link.close(reason)
