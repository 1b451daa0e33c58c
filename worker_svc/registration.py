"""Keeps this worker registered with its scheduler, for as long as the process lives.

    LOADING (progress) ... READY (capacity) -> heartbeats ... DRAINING

A scheduler that restarts, or is not there yet, is normal: the stream is opened again with a growing pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import NoReturn

import grpc
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

from worker_svc.lifecycle import Lifecycle

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
REFUSED_PAUSE_S = 15.0
OPEN_TIMEOUT_S = 10.0
MIN_ACK_TIMEOUT_S = 5.0
MIN_NEWS_INTERVAL_S = 0.1  # so that load progress does not become a flood
DEFAULT_HEARTBEAT_S = 2.0

# What only another setting can mend, and an id that its last user may still be about to leave.
REFUSALS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
)
ID_IN_USE = grpc.StatusCode.ALREADY_EXISTS

Call = grpc.aio.StreamStreamCall[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]


class StreamEndedError(Exception):
    """The scheduler has ended the stream, without an error."""


class Registration:
    """One worker's Register stream. `run` goes on until its owner cancels it, or a draining worker has been let go."""

    def __init__(
        self,
        *,
        channel: grpc.aio.Channel,
        scheduler: str,
        worker_id: str,
        address: str,
        worker_epoch: int,
        lifecycle: Lifecycle,
        refused_pause_s: float = REFUSED_PAUSE_S,
        rng: random.Random | None = None,
    ) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._scheduler = scheduler
        self._worker_id = worker_id
        self._address = address
        self._worker_epoch = worker_epoch
        self._lifecycle = lifecycle
        self._refused_pause_s = refused_pause_s
        self._rng = rng or random.Random()
        self._pause_s = FIRST_PAUSE_S
        self._complaints: set[str] = set()
        self._told = asyncio.Condition()
        self._told_state: scheduler_pb2.WorkerState.ValueType = scheduler_pb2.WORKER_STATE_UNSPECIFIED
        self.is_connected = False

    async def run(self) -> None:
        """Register, heartbeat, reconnect."""
        while True:
            code, details = await self._session()
            async with self._told:
                self._told.notify_all()  # nobody is there to be told any more
            if self._lifecycle.is_draining:
                return
            pause_s = self._note_end(code, details)
            # Workers that lost one scheduler together must not come back in step.
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

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

    async def _session(self) -> tuple[grpc.StatusCode, str]:
        """One stream from its first message to its end. Returns how it ended."""
        call: Call = self._stub.Register()
        try:
            await self._follow(call)
        except StreamEndedError:
            return grpc.StatusCode.OK, "it ended the stream"
        except TimeoutError:
            return grpc.StatusCode.UNAVAILABLE, "it does not answer"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # Which of the two grpc raises depends on what ended first, the stream or our wait; the status is the same.
            return await call.code(), await call.details() or "no details"
        finally:
            self.is_connected = False
            call.cancel()

    async def _follow(self, call: Call) -> NoReturn:
        """Register and heartbeat. Raises when the stream ends."""
        call.add_done_callback(lambda _: self._lifecycle.changed.set())  # notice its end before the next heartbeat
        answer = await self._exchange(call, OPEN_TIMEOUT_S)
        interval_s = answer.accepted.heartbeat_interval_s or DEFAULT_HEARTBEAT_S
        ack_timeout_s = max(MIN_ACK_TIMEOUT_S, 3 * interval_s)
        await self._exchange(call, ack_timeout_s)  # a worker that does not fit is refused only now
        self._note_registered(interval_s)
        while True:
            await self._wait_for_news(interval_s)
            await self._exchange(call, ack_timeout_s)

    async def _exchange(self, call: Call, timeout_s: float) -> scheduler_pb2.RegisterResponse:
        """Tell the state, get the answer."""
        self._lifecycle.changed.clear()
        message = self._message()
        async with asyncio.timeout(timeout_s):
            await call.write(message)
            response = await call.read()
        if not isinstance(response, scheduler_pb2.RegisterResponse):
            raise StreamEndedError
        async with self._told:
            self._told_state = message.state
            self._told.notify_all()
        return response

    def _message(self) -> scheduler_pb2.RegisterRequest:
        return scheduler_pb2.RegisterRequest(
            worker_id=self._worker_id,
            address=self._address,
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

    def _note_registered(self, interval_s: float) -> None:
        log.info("registered with scheduler %s; a heartbeat every %g s", self._scheduler, interval_s)
        self.is_connected = True
        self._pause_s = FIRST_PAUSE_S
        self._complaints.clear()

    def _note_end(self, code: grpc.StatusCode, details: str) -> float:
        """Log what is new about it; returns how long to wait."""
        if code in REFUSALS or code is ID_IN_USE:
            self._complain(logging.ERROR, f"scheduler {self._scheduler} refuses this worker: {details}")
            return MAX_PAUSE_S if code is ID_IN_USE else self._refused_pause_s
        # Only the code makes it a new complaint: details hold changing addresses and times.
        self._complain(
            logging.WARNING, f"scheduler {self._scheduler} is not available ({code.name}); trying again", details
        )
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return pause_s

    def _complain(self, level: int, message: str, details: str = "") -> None:
        if message in self._complaints:
            return
        self._complaints.add(message)
        log.log(level, "%s", f"{message}: {details}" if details else message)
