"""The one task that touches the core.

Facts arrive from streams as plain method calls and wait in an inbox; the task takes all that have come together,
applies them, asks the core what to do, and does it in this order:

    apply facts -> schedule -> send steps -> route what was produced -> publish prefix events

Steps go first because workers wait for them; prefix events go last because nobody does. Nothing here polls, and the
only clock is the event loop's, so a simulated loop runs it as well as a real one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from prefix_index.changes import PrefixChanges
from prefix_index.index import PrefixIndex
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    DeadlineError,
    DuplicateRequestError,
    NeverFitsError,
    NoWorkerError,
    QueueFullError,
    SchedulerError,
    UnexpectedStepError,
    WorkerMismatchError,
)
from scheduler_svc.core.messages import (
    CachedBlock,
    Deltas,
    Load,
    SchedulerStats,
    StepBatch,
    StepOutput,
    WorkerCapacity,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from scheduler_svc.metrics import SchedulerTimes
from scheduler_svc.request_log import log_finished, log_queued
from scheduler_svc.wire import split_deltas
from svc_common.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    OverloadedError,
    QuireError,
    UnavailableError,
)

log = logging.getLogger(__name__)

RETRY_NO_WORKER_S = 1.0
RETRY_STOPPING_S = 1.0
RETRY_LEAST_S = 0.1
RETRY_MOST_S = 30.0


class WorkerLink(Protocol):
    """One lease of one worker. A new lease of the same worker is a new link, so late answers name the old one."""

    @property
    def worker_id(self) -> str: ...

    @property
    def worker_epoch(self) -> int: ...

    @property
    def address(self) -> str: ...

    def send(self, batch: StepBatch) -> None:
        """Queue a step for the worker. Never blocks and never raises: a failure is told by `worker_lost`."""

    def close(self, reason: str) -> None:
        """The step loop is done with this lease: the worker is drained, misbehaved or does not fit."""


class GatewayLink(Protocol):
    """Where what happens to one gateway's requests goes. Nothing here blocks."""

    def reply(self, handle: int, error: QuireError | None) -> None:
        """One Submit was queued (None) or refused."""

    def deliver(self, deltas: Deltas) -> None:
        """New tokens and finishes of this gateway's requests; they may be merged with later ones."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the core must know of a model before it can be built; the same for all workers."""

    eos_token_ids: frozenset[int] = frozenset()
    root_salt: bytes = b""


class RetryAdvice:
    """When a refused request may find room: from how fast requests have ended lately."""

    def __init__(self, memory: int = 64) -> None:
        self._ends: deque[float] = deque(maxlen=memory)

    def note_end(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, num_waiting: int, now: float) -> float:
        """Time until a thirtieth of the queue has moved on, so that those refused together find places together."""
        if len(self._ends) < 2:
            return RETRY_NO_WORKER_S
        rate = len(self._ends) / max(now - self._ends[0], 1e-3)
        return min(RETRY_MOST_S, max(RETRY_LEAST_S, max(1.0, num_waiting / 30) / rate))


class StepLoop:
    """Owner of `core.Scheduler`. Every public method but `run`, `stop` and `wait_idle` only queues a fact.

    The core is built when the first worker joins, because the model's facts come from it. Until then requests are
    refused with UNAVAILABLE; later they wait, even while no worker is there that could run them, but at most
    `config.worker_patience_s`. When all workers are gone and nothing waits, a worker of another model may be the first
    again.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex) -> None:
        self._config = config
        self._index = index
        self._alarm: asyncio.TimerHandle | None = None  # runs while something waits that no worker here could run
        self._scheduler: Scheduler | None = None
        self._facts: ModelFacts | None = None
        self._workers: dict[str, WorkerLink] = {}
        self._draining: set[str] = set()
        self._gateways: dict[int, GatewayLink] = {}
        self._requests: dict[tuple[int, int], SequenceGroup] = {}  # (owner, handle) of live requests
        self._next_owner = 0
        self._inbox: list[Callable[[float], None]] = []
        self._produced: list[Deltas] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._refusal: QuireError | None = None
        self._advice = RetryAdvice()
        self._is_stopped = False
        self.times = SchedulerTimes()

    # -- gateways -----------------------------------------------------------------------------------------------------

    def attach(self, link: GatewayLink) -> int:
        """A gateway is there. Returns its number, which is `owner` of its groups."""
        owner = self._next_owner
        self._next_owner += 1
        self._gateways[owner] = link
        return owner

    def detach(self, owner: int) -> None:
        """A gateway is gone: its requests are aborted."""
        self._post(partial(self._apply_detach, owner))

    def submit(self, group: SequenceGroup) -> None:
        """A request of gateway `group.owner`; the answer is a `reply` on its link."""
        self._post(partial(self._apply_submit, group))

    def cancel(self, owner: int, handle: int, sample_index: int | None, reason: FinishReason) -> None:
        """A gateway ends a request, or one sample of it. One that has finished meanwhile is nobody's mistake."""
        self._post(partial(self._apply_cancel, owner, handle, sample_index, reason))

    def abort(self, request_ids: Sequence[str]) -> asyncio.Future[list[str]]:
        """End requests by their public ids, whichever gateway has them. Gives those that were here."""
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
        """A worker is leased and takes steps; `blocks` are the prefixes that its pool holds already."""
        self._post(partial(self._apply_joined, link, capacity, facts, blocks, next_step_id))

    def step_answered(self, link: WorkerLink, output: StepOutput) -> None:
        """A worker answered its oldest step."""
        self._post(partial(self._apply_answer, link, output))

    def worker_draining(self, link: WorkerLink) -> None:
        """A worker takes nothing new; what it runs moves as soon as another worker is there. When its last sequence has
        left, its link is closed.
        """
        self._post(partial(self._apply_draining, link))

    def worker_lost(self, link: WorkerLink, reason: str) -> None:
        """A lease ended: the worker's sequences wait again, with their tokens."""
        self._post(partial(self._apply_lost, link, reason))

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Turn facts into steps until `stop`. An exception from here is a bug, and the end of the process."""
        loop = asyncio.get_running_loop()
        while not self._is_stopped:
            await self._wake.wait()
            self._wake.clear()
            started_at = loop.time()
            self._turn()
            self.times.note_turn(started_at, loop.time())
            if not self.has_work:
                self._idle.set()

    def stop(self) -> None:
        """Let `run` return after its current turn."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._is_stopped = True
        self._wake.set()

    def refuse_new(self, message: str) -> None:
        """Answer every later Submit with UNAVAILABLE."""
        self._refusal = UnavailableError(message, retry_after_s=RETRY_STOPPING_S)

    async def wait_idle(self) -> None:
        """Return when nothing waits or runs."""
        while self.has_work:
            self._idle.clear()
            await self._idle.wait()

    # -- facts for people ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or (self._scheduler is not None and self._scheduler.has_work)

    @property
    def max_waiting(self) -> int:
        return self._config.max_waiting

    @property
    def max_waiting_tokens(self) -> int:
        return self._config.max_waiting_tokens

    def load(self) -> Load:
        """What is queued and what runs now."""
        return Load() if self._scheduler is None else self._scheduler.load()

    def stats(self) -> SchedulerStats | None:
        """Counters and occupancy; None before the first worker."""
        return None if self._scheduler is None else self._scheduler.stats()

    def num_rows(self, worker_id: str) -> int:
        """Sequences that a worker runs now; 0 for a worker that has left."""
        if self._scheduler is None or worker_id not in self._workers:
            return 0
        return self._scheduler.worker_stats(worker_id).rows_used

    def cached_prefixes(self) -> list[PrefixChanges]:
        """Everything that the prefix index should hold now."""
        return [] if self._scheduler is None else self._scheduler.cached_prefixes()

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _post(self, fact: Callable[[float], None]) -> None:
        self._inbox.append(fact)
        self._wake.set()

    def _turn(self) -> None:
        now = asyncio.get_running_loop().time()
        inbox, self._inbox = self._inbox, []
        for apply in inbox:
            apply(now)
        if self._scheduler is None:
            return
        for batch in self._scheduler.schedule(now):
            self._workers[batch.worker_id].send(batch)
        self._produce(self._scheduler.take_expired(), now)
        self._set_alarm(self._scheduler.patience_ends_at)
        self._route()
        if self._draining:
            self._release_drained(self._scheduler, now)
        if changes := self._scheduler.take_prefix_events():
            self._index.publish(changes)

    def _set_alarm(self, at: float) -> None:
        """Take a turn then, though nothing else may happen."""
        if at < math.inf and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake.set()

    def _route(self) -> None:
        produced, self._produced = self._produced, []
        for deltas in produced:
            for owner, part in split_deltas(deltas).items():
                if owner in self._gateways:
                    self._gateways[owner].deliver(part)

    def _forget_finished(self, deltas: Deltas, now: float) -> None:
        for finished in deltas.finished:
            group = finished.group
            log_finished(finished, now)
            if all(sequence.is_finished for sequence in group.sequences):
                self._requests.pop((group.owner, group.handle), None)
                self._advice.note_end(now)

    def _release_drained(self, scheduler: Scheduler, now: float) -> None:
        for worker_id in sorted(self._draining):
            worker = scheduler.worker_stats(worker_id)
            if not worker.rows_used and not worker.steps_in_flight:
                self._drop_worker(self._workers[worker_id], "drained", now)

    # -- applying requests --------------------------------------------------------------------------------------------

    def _apply_submit(self, group: SequenceGroup, now: float) -> None:
        link = self._gateways.get(group.owner)
        if link is None:
            return
        try:
            self._add(group, now)
        except QuireError as error:
            self.times.refusals[error.code.name] += 1
            link.reply(group.handle, error)
        except Exception:
            # One request must not end the scheduler: it would be sent again to the next one.
            log.exception("request %s: the core failed to take it", group.request_id)
            link.reply(group.handle, QuireError("internal error while the request was queued; the server's log has it"))
        else:
            link.reply(group.handle, None)

    def _add(self, group: SequenceGroup, now: float) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._scheduler is None:
            raise UnavailableError("no worker has registered yet; try again soon", retry_after_s=RETRY_NO_WORKER_S)
        key = (group.owner, group.handle)
        if key in self._requests:
            raise AlreadyExistsError(f"handle {group.handle} names a live request; use a new one", field="handle")
        try:
            finished = self._scheduler.add_group(group, now)
        except SchedulerError as error:
            raise self._as_refusal(error, self._scheduler, now) from error
        self._requests[key] = group
        log_queued(group)
        self._produce(finished, now)

    def _as_refusal(self, error: SchedulerError, scheduler: Scheduler, now: float) -> QuireError:
        if isinstance(error, QueueFullError):
            return OverloadedError(str(error), retry_after_s=self._advice.seconds(scheduler.load().num_waiting, now))
        if isinstance(error, DeadlineError):
            return OverloadedError(str(error), retry_after_s=min(RETRY_MOST_S, error.retry_after_s))
        if isinstance(error, NeverFitsError):
            return InvalidRequestError(str(error), field=error.field)
        if isinstance(error, DuplicateRequestError):
            return AlreadyExistsError(str(error), field="request_id")
        if isinstance(error, NoWorkerError):
            return UnavailableError(str(error), retry_after_s=RETRY_NO_WORKER_S)
        return QuireError(str(error))

    def _apply_cancel(
        self, owner: int, handle: int, sample_index: int | None, reason: FinishReason, now: float
    ) -> None:
        group = self._requests.get((owner, handle))
        if group is None or self._scheduler is None:
            return
        if sample_index is None:
            self._produce(self._scheduler.abort_group(group.request_id, reason, now), now)
        else:
            self._produce(self._scheduler.finish_sample(group.request_id, sample_index, reason, now), now)

    def _apply_abort(self, request_ids: Sequence[str], found: asyncio.Future[list[str]], now: float) -> None:
        live = {group.request_id for group in self._requests.values()}
        here = [request_id for request_id in request_ids if request_id in live]
        for request_id in here:
            if self._scheduler is not None:
                self._produce(self._scheduler.abort_group(request_id, FinishReason.ABORTED, now), now)
        if not found.done():  # else whoever asked has left
            found.set_result(here)

    def _apply_detach(self, owner: int, now: float) -> None:
        if self._gateways.pop(owner, None) is None:
            return
        orphans = [key for key in self._requests if key[0] == owner]
        for key in orphans:
            self._apply_cancel(*key, None, FinishReason.ABORTED, now)

    def _produce(self, deltas: Deltas, now: float) -> None:
        if len(deltas.token_ids) or deltas.finished:
            self._produced.append(deltas)
            self.times.note_deltas(deltas, now, self._find)
            # At once: a late cancel must not find a request that another stream has taken over.
            self._forget_finished(deltas, now)

    def _find(self, owner: int, handle: int) -> SequenceGroup | None:
        return self._requests.get((owner, handle))

    # -- applying workers ---------------------------------------------------------------------------------------------

    def _apply_joined(
        self,
        link: WorkerLink,
        capacity: WorkerCapacity,
        facts: ModelFacts,
        blocks: Sequence[CachedBlock],
        next_step_id: int,
        now: float,
    ) -> None:
        stale = self._workers.get(link.worker_id)
        if stale is not None:
            self._drop_worker(stale, "leased again", now)
        try:
            self._core_for(facts).add_worker(capacity, now, blocks, next_step_id)
        except (SchedulerError, ValueError) as error:
            log.error("worker %s is refused: %s", link.worker_id, error)
            link.close(str(error))
            return
        self._workers[link.worker_id] = link
        self._index.register_worker(link.worker_id, link.worker_epoch, link.address)

    def _core_for(self, facts: ModelFacts) -> Scheduler:
        """The core that serves this model. Raises WorkerMismatchError while another model is in use."""
        if self._scheduler is not None and facts == self._facts:
            return self._scheduler
        if self._scheduler is not None and (self._workers or self._scheduler.has_work):
            raise WorkerMismatchError("the worker's model differs from the one that is served")
        config = replace(
            self._config,
            eos_token_ids=facts.eos_token_ids,
            root_salt=facts.root_salt,
            publishes_prefixes=self._index.is_shared,
        )
        self._scheduler, self._facts = Scheduler(config), facts
        return self._scheduler

    def _apply_answer(self, link: WorkerLink, output: StepOutput, now: float) -> None:
        if self._workers.get(link.worker_id) is not link or self._scheduler is None:
            return
        for failure in output.failures:
            log.warning(
                "worker %s: row %d failed in step %d: %s", link.worker_id, failure.row, output.step_id, failure.message
            )
        try:
            self._produce(self._scheduler.update(output, now), now)
        except UnexpectedStepError as error:
            log.error("worker %s broke the protocol: %s", link.worker_id, error)
            self._drop_worker(link, str(error), now)

    def _apply_draining(self, link: WorkerLink, now: float) -> None:
        if self._workers.get(link.worker_id) is not link or self._scheduler is None:
            return
        self._scheduler.drain_worker(link.worker_id, now)
        self._draining.add(link.worker_id)

    def _apply_lost(self, link: WorkerLink, reason: str, now: float) -> None:
        if self._workers.get(link.worker_id) is link:
            self._drop_worker(link, reason, now)

    def _drop_worker(self, link: WorkerLink, reason: str, now: float) -> None:
        """The worker leaves the books; what it ran waits for another one."""
        del self._workers[link.worker_id]
        self._draining.discard(link.worker_id)
        if self._scheduler is not None:
            self._scheduler.remove_worker(link.worker_id, now)
        self._index.forget(link.worker_id, link.worker_epoch)
        link.close(reason)
