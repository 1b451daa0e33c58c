"""The prefix index: which worker holds which prefix, for readers outside the scheduler.

The index is a hint for gateways, which choose a replica by it. A scheduler never reads it: its own block managers are
exact. So the index may lag, forget or be down without any effect on an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefix_index.changes import PrefixChanges


class PrefixIndex(Protocol):
    """Where a scheduler publishes its workers' prefixes. No method raises when a server fails, and only those that are
    `async` wait for one.
    """

    @property
    def is_shared(self) -> bool:
        """The index has readers. If not, the caller need not collect changes for it."""

    def publish(self, changes: Sequence[PrefixChanges]) -> None:
        """Blocks that became cached prefixes or stopped being ones, in order."""

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None:
        """This scheduler has leased the worker. Entries of the worker's other epochs are ignored from now on."""

    def forget(self, worker_id: str, worker_epoch: int) -> None:
        """The worker is lost or has left."""

    async def next_scheduler_epoch(self) -> int:
        """A number above those of all earlier leases; 0 leaves the choice to the worker."""

    def note_scheduler_epoch(self, epoch: int) -> None:
        """A worker has granted this epoch: later ones must be above it."""

    def state(self) -> str:
        """For status reports: memory, redis, or redis (down)."""

    async def close(self) -> None:
        """Stop the background task. Entries expire by themselves."""


class NoPrefixIndex:
    """The index of a scheduler without Redis: it has no readers and stores nothing."""

    is_shared = False

    def publish(self, changes: Sequence[PrefixChanges]) -> None: ...

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None: ...

    def forget(self, worker_id: str, worker_epoch: int) -> None: ...

    async def next_scheduler_epoch(self) -> int:
        return 0

    def note_scheduler_epoch(self, epoch: int) -> None: ...

    def state(self) -> str:
        return "memory"

    async def close(self) -> None: ...
