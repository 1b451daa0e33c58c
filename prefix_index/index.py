"""The prefix index: the workers that hold each prefix, for readers outside the scheduler.

The index is a hint with which gateways choose a replica, and schedulers find blocks on workers of other schedulers. For
its own workers a scheduler never reads it, because its block managers are exact. So the index may lag, lose data or be
down without any effect on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Holder(NamedTuple):
    """One worker process: a restarted worker has a new epoch."""

    worker_id: str
    worker_epoch: int


@dataclass(frozen=True, slots=True)
class RemoteHolder:
    """A worker that another scheduler leases, and how many leading blocks of a prefix it holds."""

    holder: Holder
    scheduler: str  # host:port
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Changes of cached prefixes on one worker, in order. True: a block was cached. False: it was evicted or reused."""

    holder: Holder
    blocks: Sequence[tuple[bytes, bool]]  # digest, is cached


class PrefixIndex:
    """Publishes the prefixes of a scheduler's workers. No method raises when the server fails. Only async methods wait
    for the server.

    This class is the index of a scheduler without Redis: it has no readers and stores nothing.
    """

    is_shared = False
    """Whether the index has readers. If not, the caller need not collect changes for it."""

    def publish(self, changes: Sequence[PrefixChanges]) -> None:
        """Publish changes of cached prefixes, in order."""

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None:
        """Publish a worker that this scheduler has leased. Entries of its other epochs are ignored from now on."""

    def forget(self, worker_id: str, worker_epoch: int) -> None:
        """Remove a worker that is lost or has left."""

    async def claim_revision(self, model: str, revision: str, *, replaces: bool) -> str:
        """Record that the workers of this scheduler serve this revision, until `release_revision`.

        Returns another revision of the model that another scheduler serves; then nothing is recorded, unless this one
        `replaces` it. Empty: there is none, or the server does not answer.
        """
        return ""

    async def read_weights(self, model: str, revision: str) -> str | None:
        """The record of the newest weights of a revision; empty: there is none. None: the server does not answer."""
        return ""

    async def write_weights(self, model: str, revision: str, version: int, record: str) -> str | None:
        """Record newer weights of a revision. Returns the record that holds now: this one, or that of a version that is
        not lower. None: the server does not answer, and nothing may have been recorded.
        """
        return record

    def release_revision(self) -> None:
        """This scheduler has no worker any more."""

    async def next_scheduler_epoch(self) -> int:
        """An epoch above the epochs of all earlier leases; 0 leaves the choice to the worker."""
        return 0

    def record_scheduler_epoch(self, epoch: int) -> None:
        """Record an epoch that a worker has granted. Later epochs must be above it."""

    def state(self) -> str:
        """For status reports: memory, redis, or redis (down)."""
        return "memory"

    async def close(self) -> None:
        """Stop the background task. Entries expire by themselves."""
