# Generated from quire_client/aio/calls.py by scripts/gen_sync.py. Edit that file.
"""Chooses the gateway of a call, and retries the call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from quire_client.errors import ConnectionFailed, QuireError
from quire_client.retry import CONNECT_RETRY, Deadline, RetryPolicy, probe_timeout_s
from quire_client.sync.transport import Gateway, Gateways, sleep
from quire_client.watch import StallWatch

T = TypeVar("T")


class Calls:
    """The calls of one client."""

    def __init__(
        self, channels: Sequence[grpc.Channel], metadata: tuple[tuple[str, str], ...], retry: RetryPolicy
    ) -> None:
        self.gateways = Gateways(channels, metadata)
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
                return
            num_attempts += 1
            delay_s = CONNECT_RETRY.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise error
            sleep(delay_s)

    def unary(self, method: Callable[[Gateway], Callable[..., T]], request: Any, timeout_s: float | None) -> T:
        """A unary call with retries; `timeout_s` limits all attempts together."""
        deadline = Deadline(timeout_s)

        def attempt(target: int) -> T:
            return self.gateways.unary(target, method, request, deadline.remaining_s())

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
                raise error
            wait(delay_s)
