"""When conversations begin. No clock: times come out as seconds since the start."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """`count` times at `rate` per second on average, the first at 0; an infinite rate is all at once.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
