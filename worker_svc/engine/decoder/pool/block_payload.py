"""The blocks of a pool as bytes: the one description of what a block holds, for tiers and transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from step_protocol.columns import U32
from worker_svc.engine.decoder.pool.block_contents import BlockContents

Bytes = npt.NDArray[np.uint8]


class PoolPart(NamedTuple):
    """An array of the pool, as bytes [layers, num_blocks, bytes]. `dtype` and `shape` are of one block in one layer."""

    dtype: str
    shape: tuple[int, ...]
    array: Bytes


class Filled(NamedTuple):
    """What a block gets."""

    block: int
    tokens: U32
    payload: Bytes


class Reader(Protocol):
    """Payloads of committed blocks."""

    def read(self, block: int, digest: bytes, into: Bytes | None = None) -> tuple[U32, Bytes] | None:
        """The tokens and the payload of a block, which may be written to `into`. None if it is not committed with this
        digest, or was written during the read.
        """


class Movable(Reader, Protocol):
    """What can leave a worker and enter another one, as numbered payloads of equal size."""

    @property
    def others(self) -> Sequence[Movable]:
        """What else moves, under ids that follow these."""

    @property
    def block_size(self) -> int:
        """Tokens of each, or words that say what it is."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def layout(self) -> list[tuple[str, list[int]]]:
        """Number type and shape of each part of a payload."""

    @property
    def is_on_device(self) -> bool:
        """Whether `reading` and `writing` wait for copies."""

    def digests_of(self, block_ids: U32) -> tuple[U32, list[bytes]]:
        """Those of the blocks that are committed, and their digests. Called in the model thread."""

    def reading(self, wanted: Sequence[tuple[int, bytes]]) -> AbstractContextManager[Reader]:
        """For reads of these blocks, by their digests, in this thread: those on a device are copied at once."""

    def write(self, block: int, tokens: U32, payload: Bytes) -> None:
        """Fills a block. It is not committed. Called in the model thread."""

    def writing(self, filled: Sequence[Filled]) -> Callable[[], None]:
        """Copies payloads to where the blocks are, in any thread. The result fills the blocks, in the model thread."""


class InHostMemory(ABC):
    """The part of `Movable` that needs no copies, because host memory has the blocks."""

    is_on_device = False

    def reading(self, wanted: Sequence[tuple[int, bytes]]) -> AbstractContextManager[Self]:
        return nullcontext(self)

    @abstractmethod
    def write(self, block: int, tokens: U32, payload: Bytes) -> None: ...

    def writing(self, filled: Sequence[Filled]) -> Callable[[], None]:
        def write() -> None:
            for one in filled:
                self.write(*one)

        return write


class MovableBlocks(InHostMemory):
    """Reads committed blocks in any thread while steps run, and writes blocks in the model thread.

    The payload of a block is the concatenation of its parts, in the order of the parts and of the layers. These are the
    `blocks` of `contents`; None: all. `kind`: which blocks they are, besides their parts. `others`: blocks of
    other cache groups, then snapshots of recurrent states.
    """

    def __init__(
        self,
        contents: BlockContents,
        parts: Sequence[PoolPart],
        others: Sequence[Movable] = (),
        *,
        blocks: range | None = None,
        kind: str = "",
    ) -> None:
        self.others = others
        self._contents = contents
        self._parts = parts
        self._blocks = blocks or range(contents.num_blocks)
        self._kind = kind
        contents.count_writes()
        self.block_size = contents.block_size
        self.num_blocks = len(self._blocks)
        self.payload_bytes = sum(len(part.array) * part.array.shape[2] for part in parts)

    @property
    def layout(self) -> list[tuple[str, list[int]]]:
        kind: list[tuple[str, list[int]]] = [(self._kind, [])] if self._kind else []
        own = [(part.dtype, [len(part.array), *part.shape]) for part in self._parts]
        return kind + own + [part for other in self.others for part in other.layout]

    def digests_of(self, block_ids: U32) -> tuple[U32, list[bytes]]:
        first = np.uint32(self._blocks.start)
        found, digests = self._contents.digests_of(block_ids + first)
        return found - first, digests

    def read(self, block: int, digest: bytes, into: Bytes | None = None) -> tuple[U32, Bytes] | None:
        place = self._blocks.start + block
        version = self._contents.version(place, digest) if block < self.num_blocks else None
        if version is None:
            return None
        tokens = self._contents.tokens_of(place)
        payload = np.empty(self.payload_bytes, np.uint8) if into is None else into
        for part, of_part in self._places(payload):
            of_part[:] = part.array[:, block]
        return (tokens, payload) if self._contents.version(place, digest) == version else None

    def write(self, block: int, tokens: U32, payload: Bytes) -> None:
        self._contents.write_block(self._blocks.start + block, tokens)
        for part, place in self._places(payload):
            part.array[:, block] = place

    def _places(self, payload: Bytes) -> list[tuple[PoolPart, Bytes]]:
        """The part of the payload that belongs to each array, [layers, bytes]."""
        places, start = [], 0
        for part in self._parts:
            layers, size = len(part.array), part.array.shape[2]
            places.append((part, payload[start : start + layers * size].reshape(layers, size)))
            start += layers * size
        return places
