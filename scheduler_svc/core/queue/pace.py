"""Measured rates of prefill and of the queue, and the mean length of answers."""

from __future__ import annotations

import math


class Pace:
    """Rate per second of busy time, weighted towards the last `HORIZON_S`. Unknown in the first `LEAST_BUSY_S`."""

    HORIZON_S = 10.0
    LEAST_BUSY_S = 1.0

    def __init__(self) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    def note(self, amount: float, busy_s: float) -> None:
        """Record an amount of work done in `busy_s` seconds of busy time."""
        keep = math.exp(-busy_s / self.HORIZON_S)
        self._amount = self._amount * keep + amount
        self._busy_s = self._busy_s * keep + busy_s
        self._seen_s += busy_s

    @property
    def per_s(self) -> float | None:
        """The rate; None while it is unknown."""
        if self._seen_s < self.LEAST_BUSY_S or self._amount <= 0:
            return None
        return self._amount / self._busy_s


class Measures:
    """Running measurements. The core uses them to estimate the wait and the output length of a new request."""

    MEAN_OUTPUT_WEIGHT = 0.05  # weight of the newest answer in the running mean

    def __init__(self, expected_output_tokens: int) -> None:
        self.mean_output = float(expected_output_tokens)  # tokens of answers that ended before max_tokens
        self.queue = Pace()  # tokens that leave the queue
        self.prefill = Pace()  # prompt tokens that one worker computes
        self._num_admitted_tokens = 0  # since the last `observe_queue`
        self._waited_since: float | None = None  # time of the last `observe_queue`, if sequences waited then

    def note_output(self, num_tokens: int) -> None:
        """Record the length of an answer that ended before max_tokens."""
        self.mean_output += self.MEAN_OUTPUT_WEIGHT * (num_tokens - self.mean_output)

    def note_admitted(self, num_tokens: int) -> None:
        """Record prompt tokens that left the queue."""
        self._num_admitted_tokens += num_tokens

    def observe_queue(self, now: float, *, is_served: bool) -> None:
        """Record how fast the queue moved since the last call, if `is_served` was true in that call."""
        if self._waited_since is not None:
            self.queue.note(self._num_admitted_tokens, now - self._waited_since)
        self._num_admitted_tokens = 0
        self._waited_since = now if is_served else None
