"""Counters of the core since its start."""

from __future__ import annotations

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
