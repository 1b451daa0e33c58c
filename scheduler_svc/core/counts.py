"""What the core counts as it happens, since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.messages import MigrationReason


def counted(meaning: str, unit: str = "") -> Any:
    """A count that is also a metric: quire_<name of the field>_total, with this help text."""
    return field(default=0, metadata={"meaning": meaning, "unit": unit})


@dataclass(slots=True)
class Counts:
    """One object per core. The parts that get it add to it."""

    steps: int = counted("steps sent to workers")
    prefix_cache_queries: int = counted("prompt tokens of admitted sequences", "tokens")
    prefix_cache_hits: int = counted("prompt tokens of admitted sequences that were cached", "tokens")
    num_preemptions: int = counted("sequences requeued for lack of blocks or for a more urgent one")
    refused_deadline: int = 0  # requests whose first token would come too late
    migrations: Counter[MigrationReason] = field(default_factory=Counter)  # sequences requeued for another worker
