"""Keeps this worker registered with one of its schedulers, for as long as the process lives.

    LOADING (progress) ... READY (capacity) -> heartbeats ... DRAINING

Several schedulers may serve one model; each leases some of the workers. A worker has an order of preference that
spreads workers over schedulers (rendezvous hashing of its id and their addresses). It is registered with one at a time:

    unreachable, refuses, falls silent, ends the stream   -> the next one, at once
    all of them                                           -> a growing pause, then from the first on
    an earlier one answers again, and nothing runs here   -> back to it

A new scheduler's lease fences the old one's; the pool and its committed blocks stay and are adopted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeVar

import grpc
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

from svc_common.serve import open_channel
from svc_common.silence import wait_for_peer
from svc_common.tasks import cancel
from worker_svc.lifecycle import Lifecycle

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
REFUSED_PAUSE_S = 15.0
OPEN_TIMEOUT_S = 3.0
MIN_ACK_TIMEOUT_S = 2.0
ACK_TIMEOUT_INTERVALS = 2  # a heartbeat is sent one interval after the last sign of life: three in all
MIN_NEWS_INTERVAL_S = 0.1  # so that load progress does not become a flood
DEFAULT_HEARTBEAT_S = 2.0
STEADY_S = 2.0  # a session that lasted so long was no failed attempt
UNUSED_S = 3.0  # without a step, until nobody would miss this worker
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 1.0

# What only another setting can mend, and an id that its last user may still be about to leave.
REFUSALS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
)
ID_IN_USE = grpc.StatusCode.ALREADY_EXISTS

Call = grpc.aio.StreamStreamCall[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]


class Work(Protocol):
    """What the registration asks of the executor."""

    rows_used: int
    num_orders: int  # leases and steps so far

    @property
    def idle_s(self) -> float: ...
    def release(self, reason: str) -> None: ...


class StreamEndedError(Exception):
    """The scheduler has ended the stream, without an error."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One scheduler, and when to try it again. Times are the event loop's."""

    address: str
    next_try_at: float = 0.0
    next_return_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    complaints: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class End:
    """How a session ended. `was_taken`: it was steady, and the scheduler has leased or stepped this worker in it."""

    code: grpc.StatusCode
    details: str
    was_taken: bool = False
    is_silent: bool = False

    @property
    def is_refusal(self) -> bool:
        return self.code in REFUSALS or self.code is ID_IN_USE

    @property
    def is_worth_asking_again(self) -> bool:
        """The scheduler may only have lost patience with this worker."""
        return self.was_taken and not self.is_silent and not self.is_refusal


def preference(worker_id: str, schedulers: Sequence[str]) -> list[str]:
    """The schedulers in this worker's order: a fixed one, other for every worker, and stable when one is added."""
    return sorted(set(schedulers), key=lambda address: xxhash.xxh3_64_intdigest(f"{worker_id}\n{address}".encode()))


class Registration:
    """One worker's Register stream, wherever it is. `run` goes on until its owner cancels it, or a draining worker has
    been let go. `address_towards(scheduler)` tells where that scheduler reaches this worker; it may block."""

    def __init__(
        self,
        *,
        schedulers: Sequence[str],
        worker_id: str,
        address_towards: Callable[[str], str],
        worker_epoch: int,
        lifecycle: Lifecycle,
        work: Work,
        refused_pause_s: float = REFUSED_PAUSE_S,
        rng: random.Random | None = None,
    ) -> None:
        self._candidates = [Candidate(address) for address in preference(worker_id, schedulers)]
        self._worker_id = worker_id
        self._address_towards = address_towards
        self._worker_epoch = worker_epoch
        self._lifecycle = lifecycle
        self._work = work
        self._refused_pause_s = refused_pause_s
        self._rng = rng or random.Random()
        self._told = asyncio.Condition()
        self._told_state: scheduler_pb2.WorkerState.ValueType = scheduler_pb2.WORKER_STATE_UNSPECIFIED
        self.scheduler: str | None = None  # where this worker is registered now

    @property
    def is_connected(self) -> bool:
        """Registered somewhere."""
        return self.scheduler is not None

    async def run(self) -> None:
        """Register, heartbeat, go elsewhere."""
        candidate = self._candidates[0]
        while True:
            outcome = await self._session(candidate)
            async with self._told:
                self._told.notify_all()  # nobody is there to be told any more
            if self._lifecycle.is_draining:
                return
            candidate = outcome if isinstance(outcome, Candidate) else await self._next(candidate, outcome)

    async def told(self, state: scheduler_pb2.WorkerState.ValueType, timeout_s: float) -> bool:
        """Wait until the scheduler has acknowledged `state`. False if that takes too long or nobody is there."""
        if not self.is_connected:
            return False
        try:
            async with asyncio.timeout(timeout_s), self._told:
                await self._told.wait_for(lambda: self._told_state == state or not self.is_connected)
        except TimeoutError:
            return False
        return self._told_state == state

    # -- which scheduler -----------------------------------------------------------------------------------------------

    async def _next(self, candidate: Candidate, end: End) -> Candidate:
        """The scheduler to try now, after a pause if none is worth it at once."""
        now = asyncio.get_running_loop().time()
        self._note_end(candidate, end, now)
        if end.is_worth_asking_again:
            return candidate  # if it is still there, it may have work for this worker's warm blocks
        chosen = next((c for c in self._candidates if c.next_try_at <= now), None)
        if chosen is None:
            chosen = min(self._candidates, key=lambda c: c.next_try_at)
            await asyncio.sleep(chosen.next_try_at - now)
        return chosen

    def _note_end(self, candidate: Candidate, end: End, now: float) -> None:
        """Log what is new about it; set when to try again."""
        address, code = candidate.address, end.code
        if end.was_taken:
            candidate.pause_s, candidate.next_return_at = FIRST_PAUSE_S, now
        if end.is_refusal:
            _complain(candidate, logging.ERROR, f"scheduler {address} refuses this worker: {end.details}")
            candidate.next_try_at = now + (MAX_PAUSE_S if code is ID_IN_USE else self._refused_pause_s)
            candidate.next_return_at = candidate.next_try_at
        else:
            # Only the code makes it a new complaint: details hold changing addresses and times.
            message = f"scheduler {address} is not available ({code.name}); trying {self._whom(end)}"
            _complain(candidate, logging.WARNING, message, end.details)
            # Workers that lost one scheduler together must not come back in step.
            candidate.next_try_at = now + candidate.pause_s * self._rng.uniform(0.5, 1.0)
            candidate.pause_s = min(2 * candidate.pause_s, MAX_PAUSE_S)

    def _whom(self, end: End) -> str:
        return "again" if end.is_worth_asking_again or len(self._candidates) == 1 else "another one"

    async def _wait_for_better(self, current: Candidate) -> Candidate:
        """An earlier scheduler, once it answers and nobody would miss this worker where it is."""
        earlier = self._candidates[: self._candidates.index(current)]
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S * self._rng.uniform(0.75, 1.25))
            for candidate in earlier:
                is_due = candidate.next_return_at <= loop.time() and self._is_unused()
                if is_due and await answers(candidate.address) and self._is_unused():
                    candidate.next_return_at = loop.time() + self._refused_pause_s  # unless it takes this worker
                    return candidate

    def _is_unused(self) -> bool:
        work = self._work
        return not self._lifecycle.is_draining and not work.rows_used and work.idle_s >= UNUSED_S

    # -- one stream ----------------------------------------------------------------------------------------------------

    async def _session(self, candidate: Candidate) -> End | Candidate:
        """One stream from its first message to its end. Returns how it ended, or an earlier scheduler to go back to."""
        # A new channel per session: nothing of a dead connection, nor of its back-off, is left.
        async with open_channel(candidate.address) as channel:
            call: Call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Register()
            started_at, orders_before = asyncio.get_running_loop().time(), self._work.num_orders
            following = asyncio.ensure_future(self._follow(call, candidate))
            leaving = asyncio.ensure_future(self._wait_for_better(candidate))
            try:
                await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    return self._leave(candidate, leaving.result())
                is_steady = asyncio.get_running_loop().time() - started_at >= STEADY_S
                return await _end_of(call, following, was_taken=is_steady and self._work.num_orders > orders_before)
            finally:
                self.scheduler = None
                call.cancel()
                await cancel(following, leaving)

    def _leave(self, candidate: Candidate, better: Candidate) -> Candidate:
        """Let go of a scheduler that works, so that it knows before the next one does."""
        log.info("scheduler %s is back: leaving %s", better.address, candidate.address)
        self._work.release("the worker goes back to another scheduler")
        return better

    async def _follow(self, call: Call, candidate: Candidate) -> NoReturn:
        """Register and heartbeat. Raises when the stream ends."""
        call.add_done_callback(lambda _: self._lifecycle.changed.set())  # notice its end before the next heartbeat
        address = await asyncio.to_thread(self._address_towards, candidate.address)
        answer = await self._exchange(call, address, OPEN_TIMEOUT_S)
        interval_s = answer.accepted.heartbeat_interval_s or DEFAULT_HEARTBEAT_S
        ack_timeout_s = max(MIN_ACK_TIMEOUT_S, ACK_TIMEOUT_INTERVALS * interval_s)
        await self._exchange(call, address, ack_timeout_s)  # a worker that does not fit is refused only now
        self._note_registered(candidate, interval_s)
        while True:
            await self._wait_for_news(interval_s)
            await self._exchange(call, address, ack_timeout_s)

    async def _exchange(self, call: Call, address: str, timeout_s: float) -> scheduler_pb2.RegisterResponse:
        """Tell the state, get the answer."""
        self._lifecycle.changed.clear()
        message = self._message(address)
        response = await _answer_within(_ask(call, message), timeout_s)
        async with self._told:
            self._told_state = message.state
            self._told.notify_all()
        return response

    def _message(self, address: str) -> scheduler_pb2.RegisterRequest:
        return scheduler_pb2.RegisterRequest(
            worker_id=self._worker_id,
            address=address,
            worker_epoch=self._worker_epoch,
            state=self._lifecycle.state,
            load_progress=self._lifecycle.load_progress,
            capacity=self._lifecycle.capacity,
        )

    async def _wait_for_news(self, interval_s: float) -> None:
        await asyncio.sleep(min(MIN_NEWS_INTERVAL_S, interval_s))
        try:
            async with asyncio.timeout(interval_s):
                await self._lifecycle.changed.wait()
        except TimeoutError:
            return

    def _note_registered(self, candidate: Candidate, interval_s: float) -> None:
        log.info("registered with scheduler %s; a heartbeat every %g s", candidate.address, interval_s)
        self.scheduler = candidate.address
        candidate.complaints.clear()


async def answers(scheduler: str) -> bool:
    """Whether a process answers there and takes workers. A frozen one does not, one that drains says so."""
    async with open_channel(scheduler) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


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


async def _end_of(call: Call, following: asyncio.Future[NoReturn], *, was_taken: bool) -> End:
    """How the stream ended that `following` has followed to its end."""
    error = following.exception()
    if isinstance(error, StreamEndedError):
        return End(grpc.StatusCode.OK, "it ended the stream", was_taken)
    if isinstance(error, TimeoutError):
        return End(grpc.StatusCode.UNAVAILABLE, "it does not answer", was_taken, is_silent=True)
    # Which of the two grpc raises depends on what ended first, the stream or our wait; the status is the same.
    if isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
        return End(await call.code(), await call.details() or "no details", was_taken)
    assert error is not None  # `_follow` never returns
    raise error  # a bug


def _complain(candidate: Candidate, level: int, message: str, details: str = "") -> None:
    if message in candidate.complaints:
        return
    candidate.complaints.add(message)
    log.log(level, "%s", f"{message}: {details}" if details else message)
