"""Keeps this worker registered with one of its schedulers as long as the process lives.

    LOADING (progress) ... READY (capacity) -> heartbeats ... DRAINING

Several schedulers may serve one model; each leases some of the workers. A worker has an order of preference that
spreads workers over schedulers (rendezvous hashing of its id and their addresses). It is registered with one at a time:

    the scheduler is unreachable, refuses, is silent or ends the stream   -> the next scheduler, at once
    all schedulers fail in this way                                       -> a growing pause, then the first again
    another scheduler has fewer workers (schedulers.py)                     -> drain here, then register there

The schedulers may change at any time (svc_common/scheduler_names.py).
The lease of a new scheduler fences the old lease. The new scheduler adopts the pool with its committed blocks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.v1 import types_pb2

from svc_common.channels import OpenChannel
from svc_common.security.trust import certificate_problem
from svc_common.serve import open_channel
from svc_common.tasks import cancel, wait_for_peer
from worker_svc.lifecycle import DRAINING, READY, Lifecycle
from worker_svc.schedulers import FIRST_PAUSE_S, SchedulerCandidate, SchedulerCandidates, Share, count_workers
from worker_svc.steps.executor import StepExecutor

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAUSE_S = 2.0
REFUSED_PAUSE_S = 15.0
OPEN_TIMEOUT_S = 3.0
MIN_ACK_TIMEOUT_S = 2.0
ACK_TIMEOUT_INTERVALS = 14  # pings find a stopped scheduler sooner (svc_common/tasks.py)
MIN_UPDATE_INTERVAL_S = 0.1  # limits the rate of messages about loading progress
DEFAULT_HEARTBEAT_S = 2.0
STEADY_S = 2.0  # a session that lasted this long counts as successful
UNUSED_S = 3.0  # time without a step after which this worker moves at once
BUSY_MOVE_S = 10.0  # time after which it moves although it has rows: its scheduler continues them on other workers
HANDOVER_TIMEOUT_S = 60.0  # time for its scheduler to move the rows
PROBE_INTERVAL_S = 2.0

# Refusals that only another setting can resolve. ALREADY_EXISTS resolves itself when the earlier process is gone.
REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED,
    },
)  # fmt: skip
ID_IN_USE = grpc.StatusCode.ALREADY_EXISTS

Call = grpc.aio.StreamStreamCall[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]


class StreamEndedError(Exception):
    """The scheduler ended the stream without an error."""


class OtherRevisionError(Exception):
    """Another scheduler of the model serves another revision of it."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session. `was_used`: the session was steady, and its scheduler leased or stepped the worker."""

    code: grpc.StatusCode
    details: str
    was_used: bool = False
    is_silent: bool = False

    @property
    def is_refusal(self) -> bool:
        return self.code in REFUSALS or self.code is ID_IN_USE

    @property
    def may_retry_first(self) -> bool:
        """The scheduler may only have timed out this worker: register there again before trying others."""
        return self.was_used and not self.is_silent and not self.is_refusal


class Registration:
    """One worker's Register stream, to one scheduler at a time.

    `run` lasts until its owner cancels it, or until the scheduler has released a draining worker. `update` may add and
    remove schedulers meanwhile; a session with a removed scheduler lasts until that scheduler ends it.
    `address_towards(scheduler)` gives the address where that scheduler reaches this worker; it may block.
    """

    def __init__(
        self,
        *,
        schedulers: Sequence[str] = (),
        worker_id: str,
        address_towards: Callable[[str], str],
        worker_epoch: int,
        lifecycle: Lifecycle,
        work: StepExecutor,
        refused_pause_s: float = REFUSED_PAUSE_S,
        busy_move_s: float = BUSY_MOVE_S,
        rng: random.Random | None = None,
        open_channel: OpenChannel = open_channel,
        on_unavailable: Callable[[], None] = lambda: None,
        replaces_revision: bool = False,
    ) -> None:
        self._candidates = SchedulerCandidates(worker_id, schedulers)
        self._worker_id = worker_id
        self._address_towards = address_towards
        self._worker_epoch = worker_epoch
        self._lifecycle = lifecycle
        self._work = work
        self._refused_pause_s = refused_pause_s
        self._busy_move_s = busy_move_s
        self._rng = rng or random.Random()
        self._open_channel = open_channel
        self._on_unavailable = on_unavailable  # a scheduler was lost, or could not be reached
        self._replaces_revision = replaces_revision
        self._acknowledgement = asyncio.Condition()
        self._acknowledged_state: types_pb2.WorkerState.ValueType = types_pb2.WORKER_STATE_UNSPECIFIED
        self._share = Share()
        self._is_agreed = False  # no other scheduler serves another revision
        self._is_moving = False  # its present scheduler takes it for a draining worker
        self.scheduler: str | None = None  # where this worker is registered now

    @property
    def is_connected(self) -> bool:
        """Registered somewhere."""
        return self.scheduler is not None

    def update(self, schedulers: Sequence[str]) -> None:
        """These are the schedulers of this worker now."""
        self._candidates.update(schedulers)

    async def run(self) -> None:
        """Register, send heartbeats, and change schedulers."""
        candidate = await self._candidates.choose()
        while True:
            outcome = await self._session(candidate)
            async with self._acknowledgement:
                self._acknowledgement.notify_all()  # no acknowledgement will come from this session
            if self._lifecycle.is_draining:
                return
            candidate = outcome if isinstance(outcome, SchedulerCandidate) else await self._next(candidate, outcome)

    async def acknowledged(self, state: types_pb2.WorkerState.ValueType, timeout_s: float) -> bool:
        """Wait until the scheduler has acknowledged `state`. False after `timeout_s`, or without a scheduler."""
        if not self.is_connected:
            return False
        try:
            async with asyncio.timeout(timeout_s), self._acknowledgement:
                await self._acknowledgement.wait_for(lambda: self._acknowledged_state == state or not self.is_connected)
        except TimeoutError:
            return False
        return self._acknowledged_state == state

    # -- which scheduler -----------------------------------------------------------------------------------------------

    async def _next(self, candidate: SchedulerCandidate, end: SessionEnd) -> SchedulerCandidate:
        """The next scheduler to try, after a pause if all must wait."""
        self._record_end(candidate, end, asyncio.get_running_loop().time())
        if end.may_retry_first and candidate in self._candidates:
            return candidate  # it may have sequences that need this worker or its cached blocks
        self._on_unavailable()
        return await self._candidates.choose()

    def _record_end(self, candidate: SchedulerCandidate, end: SessionEnd, now: float) -> None:
        """Log the end unless it repeats an earlier one; set when to try this scheduler again."""
        address, code = candidate.address, end.code
        if end.was_used:
            candidate.pause_s, candidate.next_return_at = FIRST_PAUSE_S, now
        if end.is_refusal:
            _log_once(candidate, logging.ERROR, f"scheduler {address} refuses this worker: {end.details}")
            candidate.next_try_at = now + (MAX_PAUSE_S if code is ID_IN_USE else self._refused_pause_s)
            candidate.next_return_at = candidate.next_try_at
        else:
            # Repetitions are recognized by code, because details contain changing addresses and times.
            reason = ": ".join(filter(None, (code.name, certificate_problem(end.details))))
            message = f"scheduler {address} is not available ({reason}); trying {self._next_target(end)}"
            _log_once(candidate, logging.WARNING, message, end.details)
            # Workers that lost one scheduler together must not retry at the same time.
            candidate.next_try_at = now + candidate.pause_s * self._rng.uniform(0.5, 1.0)
            candidate.pause_s = min(2 * candidate.pause_s, MAX_PAUSE_S)

    def _next_target(self, end: SessionEnd) -> str:
        return "again" if end.may_retry_first or len(self._candidates) == 1 else "another scheduler"

    async def _wait_for_move(self, current: SchedulerCandidate) -> SchedulerCandidate:
        """Wait until this worker should move to a scheduler with fewer workers. Returns that scheduler."""
        loop, since = asyncio.get_running_loop(), None
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S * self._rng.uniform(0.75, 1.25))
            target = await self._find_target(current)
            if target is None:
                since = None
                continue
            since = since or loop.time()
            if self._is_unused() or loop.time() - since >= self._busy_move_s:
                target.next_return_at = loop.time() + self._refused_pause_s  # if it refuses
                return target

    async def _find_target(self, current: SchedulerCandidate) -> SchedulerCandidate | None:
        """The scheduler with the fewest workers, if this worker should move there."""
        if self._lifecycle.is_draining or not self._share.should_move(0):
            return None
        now = asyncio.get_running_loop().time()
        others = [c for c in self._candidates if c is not current and c.next_return_at <= now]
        counts = {c.address: await count_workers(c.address, self._open_channel) for c in others}
        counted = [(found.num_workers, i) for i, c in enumerate(others) if (found := counts[c.address]) is not None]
        if not counted or self._lifecycle.is_draining:
            return None
        fewest, i = min(counted)
        return others[i] if self._share.should_move(fewest) else None

    def _is_unused(self) -> bool:
        work = self._work
        return not work.rows_used and work.idle_s >= UNUSED_S

    # -- one stream ----------------------------------------------------------------------------------------------------

    async def _session(self, candidate: SchedulerCandidate) -> SessionEnd | SchedulerCandidate:
        """One stream, from start to end. Returns how it ended, or the scheduler to move to."""
        # A new channel per session: no state of a dead connection, such as its back-off, remains.
        async with self._open_channel(candidate.address) as channel:
            call: Call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Register()
            started_at, orders_before = asyncio.get_running_loop().time(), self._work.num_orders
            following = asyncio.ensure_future(self._follow(call, candidate))
            leaving = asyncio.ensure_future(self._wait_for_move(candidate))
            try:
                await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    return await self._hand_over(candidate, leaving.result(), following)
                is_steady = asyncio.get_running_loop().time() - started_at >= STEADY_S
                return await _end_of(call, following, was_used=is_steady and self._work.num_orders > orders_before)
            finally:
                self.scheduler, self._share, self._is_moving = None, Share(), False
                self._is_agreed = False
                call.cancel()
                await cancel(following, leaving)

    async def _hand_over(
        self, current: SchedulerCandidate, target: SchedulerCandidate, following: asyncio.Future[NoReturn]
    ) -> SchedulerCandidate:
        """Leave a scheduler that works. It continues the rows of this worker on other workers, then ends the stream."""
        log.info("scheduler %s has fewer workers; leaving scheduler %s", target.address, current.address)
        if self._lifecycle.state == READY:
            self._is_moving = True
            self._lifecycle.changed.set()
            await asyncio.wait([following], timeout=HANDOVER_TIMEOUT_S)
        self._work.release("the worker moves to another scheduler")
        return target

    async def _follow(self, call: Call, candidate: SchedulerCandidate) -> NoReturn:
        """Register and send heartbeats. Raises when the stream ends."""
        call.add_done_callback(lambda _: self._lifecycle.changed.set())  # notice the end before the next heartbeat
        address = await asyncio.to_thread(self._address_towards, candidate.address)
        report = functools.partial(self._report, call, candidate, address)
        answer = await report(OPEN_TIMEOUT_S)
        interval_s = answer.accepted.heartbeat_interval_s or DEFAULT_HEARTBEAT_S
        ack_timeout_s = max(MIN_ACK_TIMEOUT_S, ACK_TIMEOUT_INTERVALS * interval_s)
        await report(ack_timeout_s)  # the scheduler refuses a worker that does not fit
        self._record_registered(candidate, interval_s)
        while True:
            await self._wait_for_update(interval_s)
            await report(ack_timeout_s)

    async def _report(
        self, call: Call, candidate: SchedulerCandidate, address: str, timeout_s: float
    ) -> scheduler_pb2.RegisterResponse:
        """Send the state and get the answer. A worker that is ready first compares its revision with the other
        schedulers'."""
        if self._lifecycle.state == READY and not self._is_agreed:
            await self._check_revision(candidate)
            self._is_agreed = True
        return await self._exchange(call, address, timeout_s)

    async def _exchange(self, call: Call, address: str, timeout_s: float) -> scheduler_pb2.RegisterResponse:
        """Send the state and get the answer."""
        self._lifecycle.changed.clear()
        message = self._message(address)
        response = await _answer_within(_ask(call, message), timeout_s)
        async with self._acknowledgement:
            self._acknowledged_state = message.state
            self._acknowledgement.notify_all()
        acknowledgement = response.heartbeat_ack
        self._share = Share(acknowledgement.num_workers, acknowledgement.num_earlier)
        return response

    def _message(self, address: str) -> scheduler_pb2.RegisterRequest:
        return scheduler_pb2.RegisterRequest(
            worker_id=self._worker_id,
            address=address,
            worker_epoch=self._worker_epoch,
            state=DRAINING if self._is_moving else self._lifecycle.state,
            load_progress=self._lifecycle.load_progress,
            capacity=self._lifecycle.capacity,
            adapters=self._lifecycle.adapters,
            replaces_revision=self._replaces_revision,
            weights=self._lifecycle.weights,
            is_asleep=self._lifecycle.is_asleep,
            is_stuck=self._work.is_stuck,
        )

    async def _check_revision(self, candidate: SchedulerCandidate) -> None:
        """Raise OtherRevisionError if another scheduler serves another revision of this worker's model.

        Schedulers do not know each other, but a worker knows all of them. Two first workers at the same moment may miss
        each other; with Redis the schedulers find that (PrefixIndex.claim_revision).
        """
        info = None if self._lifecycle.capacity is None else self._lifecycle.capacity.info
        if info is None or self._replaces_revision:
            return
        others = [other.address for other in self._candidates if other is not candidate]
        answers = await asyncio.gather(*(count_workers(other, self._open_channel) for other in others))
        for other, served in zip(others, answers, strict=True):
            if served is not None and served.model == info.model and served.revision != info.revision:
                raise OtherRevisionError(
                    f"scheduler {other} serves revision {served.revision!r} of model {info.model!r}, and this worker "
                    f"has {info.revision!r}; stop the workers of that revision first, or start this one with "
                    "--replace-revision"
                )

    async def _wait_for_update(self, interval_s: float) -> None:
        await asyncio.sleep(min(MIN_UPDATE_INTERVAL_S, interval_s))
        try:
            async with asyncio.timeout(interval_s):
                await self._lifecycle.changed.wait()
        except TimeoutError:
            return

    def _record_registered(self, candidate: SchedulerCandidate, interval_s: float) -> None:
        log.info("registered with scheduler %s; a heartbeat every %g s", candidate.address, interval_s)
        self.scheduler = candidate.address
        candidate.logged.clear()


async def _answer_within(asking: Awaitable[T], timeout_s: float) -> T:
    """The scheduler's answer; TimeoutError if it does not come in time."""
    task = asyncio.ensure_future(asking)
    try:
        if not await wait_for_peer(task, timeout_s=timeout_s):
            raise TimeoutError
        return task.result()
    finally:
        await cancel(task)


async def _ask(call: Call, message: scheduler_pb2.RegisterRequest) -> scheduler_pb2.RegisterResponse:
    await call.write(message)
    response = await call.read()
    if not isinstance(response, scheduler_pb2.RegisterResponse):
        raise StreamEndedError
    return response


async def _end_of(call: Call, following: asyncio.Future[NoReturn], *, was_used: bool) -> SessionEnd:
    """The reason for which the stream of `following` ended."""
    error = following.exception()
    if isinstance(error, StreamEndedError):
        return SessionEnd(grpc.StatusCode.OK, "the scheduler ended the stream", was_used)
    if isinstance(error, OtherRevisionError):
        return SessionEnd(grpc.StatusCode.FAILED_PRECONDITION, str(error), was_used)
    if isinstance(error, TimeoutError):
        return SessionEnd(grpc.StatusCode.UNAVAILABLE, "the scheduler does not answer", was_used, is_silent=True)
    # grpc raises one or the other, depending on whether the stream or the wait ended first; the status is the same.
    if isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
        return SessionEnd(await call.code(), await call.details() or "no details", was_used)
    raise error or RuntimeError("`_follow` returned")  # a bug


def _log_once(candidate: SchedulerCandidate, level: int, message: str, details: str = "") -> None:
    if message in candidate.logged:
        return
    candidate.logged.add(message)
    log.log(level, "%s", f"{message}: {details}" if details else message)
