# Generated from quire_client/aio/calls.py by scripts/gen_sync.py. Edit that file.
"""Chooses the gateway of a call, and retries the call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from quire_client.channel import Metadata
from quire_client.errors import ConnectionFailed, DeadlineExceeded, QuireError
from quire_client.log import log
from quire_client.retry import CONNECT_RETRY, Deadline, RetryPolicy, probe_timeout_s
from quire_client.sync.transport import Gateway, Gateways, in_thread, sleep
from quire_client.watch import StallWatch

T = TypeVar("T")


class Calls:
    """The calls of one client."""

    def __init__(
        self,
        openers: Sequence[Callable[[], grpc.Channel]],
        metadata: Metadata,
        retry: RetryPolicy,
        explain: Callable[[QuireError], QuireError],
    ) -> None:
        self.gateways = Gateways(openers, metadata)
        self._explain = explain  # adds the cause if no gateway was ever reached; blocks
        self._was_reached = False
        self.ring = self.gateways.ring
        self.watch = StallWatch(self.ring, self.gateways.probe)
        self.rng = random.Random()
        self._retry = retry

    def close(self) -> None:
        self.watch.close()
        self.gateways.close()

    def wait_until_reachable(self, connect_timeout_s: float) -> None:
        """Return as soon as one gateway answers. If none answers, raises the error of one of them."""
        deadline = Deadline(connect_timeout_s)
        num_attempts = 0
        while True:
            error = self.gateways.first_answer(probe_timeout_s(deadline))
            if error is None:
                self._was_reached = True
                return
            num_attempts += 1
            delay_s = CONNECT_RETRY.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise self._explained(error)
            sleep(delay_s)

    def unary(
        self,
        method: Callable[[Gateway], Callable[..., T]],
        request: Any,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> T:
        """A unary call with retries; `timeout_s` limits all attempts together."""
        deadline = Deadline(timeout_s)

        def attempt(target: int) -> T:
            return self.gateways.unary(target, method, request, deadline.remaining_s(), metadata)

        return self.retrying(attempt, deadline)

    def retrying(
        self,
        attempt: Callable[[int], T],
        deadline: Deadline,
        wait: Callable[[float], object] = sleep,
    ) -> T:
        """Try one gateway after the other: without delay while one works, then with the delays of the retry policy."""
        num_attempts = num_moves = 0
        while True:
            target = self.ring.next(time.monotonic())
            try:
                result = attempt(target)
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
                raise self._explained(error)
            log.info("attempt %d failed (%s); retrying in %.2f s", num_attempts, error.message, delay_s)
            wait(delay_s)

    def _explained(self, error: QuireError) -> QuireError:
        """Add the cause to the error of a call if no gateway was ever reached."""
        if self._was_reached or not isinstance(error, ConnectionFailed | DeadlineExceeded):
            return error
        return in_thread(partial(self._explain, error))
