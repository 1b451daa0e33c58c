"""Start times of conversations, in seconds since the start of the run. No clock."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """`count` times at `rate` per second on average, the first at 0. An infinite rate starts all at 0.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 is bursty, above 1 is
    more even.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
