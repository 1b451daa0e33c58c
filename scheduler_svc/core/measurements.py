"""What the core throughput: counters since its start, rates of prefill and of the queue, the mean length of answers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.messages import MigrationReason


def counted(meaning: str, unit: str = "") -> Any:
    """A counter that is also the metric quire_<name of the field>_total, with this help text."""
    return field(default=0, metadata={"meaning": meaning, "unit": unit})


@dataclass(slots=True)
class Counts:
    """The counters of one core. Its components share the object and increment it."""

    steps: int = counted("steps sent to workers")
    prefix_cache_queries: int = counted("prompt tokens of admitted sequences", "tokens")
    prefix_cache_hits: int = counted("prompt tokens of admitted sequences that were cached", "tokens")
    num_preemptions: int = counted("sequences requeued because blocks ran out or a more urgent sequence needed them")
    refused_deadline: int = 0  # requests whose first token would come too late
    migrations: Counter[MigrationReason] = field(default_factory=Counter)  # sequences requeued for another worker

    @property
    def num_requeued(self) -> int:
        """Number of times that a sequence lost its row and was queued again."""
        return self.num_preemptions + self.migrations.total()


class Rate:
    """Rate per second of busy time, weighted towards the last `HORIZON_S`. Unknown in the first `MIN_BUSY_S`."""

    HORIZON_S = 10.0
    MIN_BUSY_S = 1.0

    def __init__(self) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    def add(self, amount: float, busy_s: float) -> None:
        """Record an amount of work done in `busy_s` seconds of busy time."""
        keep = math.exp(-busy_s / self.HORIZON_S)
        self._amount = self._amount * keep + amount
        self._busy_s = self._busy_s * keep + busy_s
        self._seen_s += busy_s

    @property
    def per_s(self) -> float | None:
        """The rate; None while it is unknown."""
        if self._seen_s < self.MIN_BUSY_S or self._amount <= 0:
            return None
        return self._amount / self._busy_s


class Throughput:
    """Running measurements. The core uses them to estimate the wait and the output length of a new request."""

    MEAN_OUTPUT_WEIGHT = 0.05  # weight of the newest answer in the running mean

    def __init__(self, expected_output_tokens: int) -> None:
        self.mean_output = float(expected_output_tokens)  # tokens of answers that ended before max_tokens
        self.queue = Rate()  # tokens that leave the queue
        self.prefill = Rate()  # prompt tokens that one worker computes
        self._num_admitted_tokens = 0  # since the last `observe_queue`
        self._waited_since: float | None = None  # time of the last `observe_queue`, if sequences waited then

    def add_output(self, num_tokens: int) -> None:
        """Record the length of an answer that ended before max_tokens."""
        self.mean_output += self.MEAN_OUTPUT_WEIGHT * (num_tokens - self.mean_output)

    def add_admitted(self, num_tokens: int) -> None:
        """Record prompt tokens that left the queue."""
        self._num_admitted_tokens += num_tokens

    def observe_queue(self, now: float, *, is_served: bool) -> None:
        """Record how fast the queue moved since the last call, if `is_served` was true in that call."""
        if self._waited_since is not None:
            self.queue.add(self._num_admitted_tokens, now - self._waited_since)
        self._num_admitted_tokens = 0
        self._waited_since = now if is_served else None
