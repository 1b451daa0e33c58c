"""What a tier is: a place outside the pool for the records of committed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker_svc.engine.decoder.pool.block_payload import Bytes

OnChange = Callable[[bytes], None]  # a digest whose record came or went


@dataclass(slots=True)
class TierCounts:
    """What a tier has done. Written by its threads, read by metrics."""

    num_written: int = 0
    num_dropped: int = 0  # blocks that were not written: the writer was behind, or the disk failed
    num_errors: int = 0  # of the file system
    num_hits: int = 0
    num_misses: int = 0
    num_corrupt: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    read_s: float = 0.0


class Tier(Protocol):
    """At most `max_bytes` of records; the least recently used ones leave first. Any thread may read, one thread writes.
    Faults are counted and logged, never raised: a record that cannot be had is a miss.
    """

    name: str
    counts: TierCounts
    num_bytes: int

    @property
    def is_writer(self) -> bool:
        """Whether it takes new records."""

    def open(self) -> None:
        """Find what it holds."""

    def close(self) -> None:
        """Release what it has open."""

    def digests(self) -> list[bytes]:
        """The blocks of this layout that it holds."""

    def holds(self, digest: bytes) -> bool:
        """Whether it has a record of this block."""

    def touch(self, digest: bytes) -> bool:
        """Mark a record as used now. Returns whether there is one."""

    def read(self, digest: bytes) -> bytes | memoryview | None:
        """The bytes of a record, not checked; None if there is none."""

    def forget(self, digest: bytes) -> None:
        """Remove a record, because it is damaged or gone."""

    def put(self, digest: bytes, record: Bytes) -> bool:
        """Write a record, which the caller does not change any more. Returns whether the tier has it."""
