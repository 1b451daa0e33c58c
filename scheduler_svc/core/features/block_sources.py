"""Where a move reads its blocks, if not in a tier: a worker of this scheduler, or blocks that another one has lent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import I64, U32


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The worker process to read blocks from."""

    worker_id: str
    worker_epoch: int
    block_ids: I64
    address: str = ""  # of its WorkerService; empty: it is a worker of this scheduler


class ExtrasSource(Protocol):
    """What a source holds besides the blocks, for one part; see `WorkerPart`."""

    def holds(self, digest: bytes) -> bool: ...
    def lend(self, digests: Sequence[bytes]) -> list[int]: ...
    def take_back(self, ids: Sequence[int]) -> None: ...


class Source(Protocol):
    """A worker that holds leading blocks of a prefix."""

    @property
    def worker_id(self) -> str: ...

    def committed(self, digests: Sequence[bytes], token_ids: U32, end: int) -> I64:
        """Its leading committed blocks, at most `end`."""

    def part(self, number: int) -> ExtrasSource | None:
        """What it holds besides the blocks, by position in `parts_of_all`; None: nothing that it gives away."""

    def share(self, block_ids: I64) -> None:
        """Keep these blocks while they are read."""

    def describe(self, block_ids: I64) -> BlockSource:
        """For the worker that reads these blocks."""


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A worker of this scheduler."""

    worker: WorkerState

    @property
    def worker_id(self) -> str:
        return self.worker.capacity.worker_id

    def committed(self, digests: Sequence[bytes], token_ids: U32, end: int) -> I64:
        pool = self.worker.pool
        held = pool.match(digests, token_ids, end)
        committed = pool.are_committed(held)
        return held if committed.all() else held[: int(committed.argmin())]

    def part(self, number: int) -> ExtrasSource:
        return self.worker.parts_of_all[number]

    def share(self, block_ids: I64) -> None:
        self.worker.pool.share(block_ids)

    def free(self, block_ids: I64) -> None:
        """The blocks are read."""
        self.worker.pool.free(block_ids[::-1])
        self.worker.room_version += 1

    def describe(self, block_ids: I64) -> BlockSource:
        return BlockSource(self.worker_id, self.worker.capacity.worker_epoch, block_ids)


@dataclass(frozen=True, slots=True)
class LentExtras:
    """What another scheduler keeps besides the blocks, for one part: ids by the digest of their block."""

    ids: Mapping[bytes, int]

    def holds(self, digest: bytes) -> bool:
        return digest in self.ids

    def lend(self, digests: Sequence[bytes]) -> list[int]:
        return [self.ids[digest] for digest in digests]

    def take_back(self, ids: Sequence[int]) -> None:
        """The other scheduler keeps them as long as the blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class LentBlocks:
    """Leading blocks of a prefix that another scheduler keeps for a short time, on one of its workers. If it does not,
    the read ends at the first block that has gone.
    """

    source: BlockSource
    digests: Sequence[bytes]
    extras: Sequence[LentExtras] = ()

    @property
    def worker_id(self) -> str:
        return self.source.worker_id

    def num_held(self, digests: Sequence[bytes], end: int) -> int:
        """How many of these leading digests it has, at most `end`."""
        pairs = zip(self.digests, digests[:end], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def committed(self, digests: Sequence[bytes], token_ids: U32, end: int) -> I64:
        """The reader compares the tokens."""
        return self.source.block_ids[: self.num_held(digests, end)]

    def part(self, number: int) -> ExtrasSource | None:
        return self.extras[number] if number < len(self.extras) else None

    def share(self, block_ids: I64) -> None:
        """The other scheduler has taken the references."""

    def describe(self, block_ids: I64) -> BlockSource:
        return replace(self.source, block_ids=block_ids)
