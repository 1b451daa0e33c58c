"""How fast something goes, measured while there is something to do."""

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
