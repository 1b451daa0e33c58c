"""Chooses the gateway of a call, and retries the call."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from quire_client.aio.transport import AsyncGateways, Gateway, in_thread, sleep
from quire_client.connection.channel import Metadata
from quire_client.connection.watch import AsyncStallWatch
from quire_client.errors import ConnectionFailed, DeadlineExceeded, QuireError
from quire_client.log import log
from quire_client.retry import CONNECT_RETRY, Deadline, RetryPolicy, probe_timeout_s

T = TypeVar("T")


class AsyncCalls:
    """The calls of one client."""

    def __init__(
        self,
        openers: Sequence[Callable[[], grpc.aio.Channel]],
        metadata: Metadata,
        retry: RetryPolicy,
        explain: Callable[[QuireError], QuireError],
    ) -> None:
        self.gateways = AsyncGateways(openers, metadata)
        self._explain = explain  # adds the cause if no gateway was ever reached; blocks
        self._was_reached = False
        self.ring = self.gateways.ring
        self.watch = AsyncStallWatch(self.ring, self.gateways.probe)
        self.rng = random.Random()
        self._retry = retry

    async def close(self) -> None:
        self.watch.close()
        await self.gateways.close()

    async def wait_until_reachable(self, connect_timeout_s: float) -> None:
        """Return as soon as one gateway answers. If none answers, raises the error of one of them."""
        deadline = Deadline(connect_timeout_s)
        num_attempts = 0
        while True:
            error = await self.gateways.first_answer(probe_timeout_s(deadline))
            if error is None:
                self._was_reached = True
                return
            num_attempts += 1
            delay_s = CONNECT_RETRY.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise await self._explained(error)
            await sleep(delay_s)

    async def unary(
        self,
        method: Callable[[Gateway], Callable[..., Awaitable[T]]],
        request: Any,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> T:
        """A unary call with retries; `timeout_s` limits all attempts together."""
        deadline = Deadline(timeout_s)

        async def attempt(target: int) -> T:
            return await self.gateways.unary(target, method, request, deadline.remaining_s(), metadata)

        return await self.retrying(attempt, deadline)

    async def retrying(
        self,
        attempt: Callable[[int], Awaitable[T]],
        deadline: Deadline,
        wait: Callable[[float], Awaitable[object]] = sleep,
    ) -> T:
        """Try one gateway after the other: without delay while one works, then with the delays of the retry policy."""
        num_attempts = num_moves = 0
        while True:
            target = self.ring.next(time.monotonic())
            try:
                result = await attempt(target)
                self.ring.works(target, time.monotonic())
                self._was_reached = True
                return result
            except QuireError as quire_error:
                error = quire_error
            now = time.monotonic()
            if isinstance(error, ConnectionFailed):
                self.gateways.leave(target, now)
                num_moves += 1
                if num_moves % len(self.ring) and self.ring.has_working(now):
                    continue
            num_attempts += 1
            delay_s = self._retry.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise await self._explained(error)
            log.info("attempt %d failed (%s); retrying in %.2f s", num_attempts, error.message, delay_s)
            await wait(delay_s)

    async def _explained(self, error: QuireError) -> QuireError:
        """Add the cause to the error of a call if no gateway was ever reached."""
        if self._was_reached or not isinstance(error, ConnectionFailed | DeadlineExceeded):
            return error
        return await in_thread(partial(self._explain, error))
