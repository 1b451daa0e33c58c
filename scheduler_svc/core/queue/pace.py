"""How fast something goes, measured while there is something to do, and how long answers are."""

from __future__ import annotations

import math


class Pace:
    """Amount per second of busy time, its last `HORIZON_S` weighing most. Unknown until it was busy for a while."""

    HORIZON_S = 10.0
    LEAST_BUSY_S = 1.0

    def __init__(self) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    def note(self, amount: float, busy_s: float) -> None:
        """So much was done in so many seconds in which there was something to do."""
        keep = math.exp(-busy_s / self.HORIZON_S)
        self._amount = self._amount * keep + amount
        self._busy_s = self._busy_s * keep + busy_s
        self._seen_s += busy_s

    @property
    def per_s(self) -> float | None:
        """None while it is not known."""
        if self._seen_s < self.LEAST_BUSY_S or self._amount <= 0:
            return None
        return self._amount / self._busy_s


class Measures:
    """What the core has seen of its own past, from which it tells how long a new request would wait and grow."""

    MEAN_OUTPUT_WEIGHT = 0.05  # of the newest answer in the running mean

    def __init__(self, expected_output_tokens: int) -> None:
        self.mean_output = float(expected_output_tokens)  # tokens of an answer that ended by itself
        self.queue = Pace()  # tokens that leave the queue
        self.prefill = Pace()  # prompt tokens that one worker computes
        self._num_admitted_tokens = 0  # since the last look at the queue
        self._waited_since: float | None = None  # the last look, if something waited then

    def note_output(self, num_tokens: int) -> None:
        """An answer of this length ended by itself."""
        self.mean_output += self.MEAN_OUTPUT_WEIGHT * (num_tokens - self.mean_output)

    def note_admitted(self, num_tokens: int) -> None:
        """So many tokens have left the queue."""
        self._num_admitted_tokens += num_tokens

    def look_at_queue(self, now: float, *, is_served: bool) -> None:
        """How fast the queue has moved since the last look, if something waited then and somebody served it."""
        if self._waited_since is not None:
            self.queue.note(self._num_admitted_tokens, now - self._waited_since)
        self._num_admitted_tokens = 0
        self._waited_since = now if is_served else None
