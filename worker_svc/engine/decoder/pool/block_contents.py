"""The content of a KV pool on any device: the token of each slot, and the committed prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, U32, Bools

HASH_BYTES = 16
LIST_CHUNK = 1024


class BlockContents:
    """Tokens and digests of `num_blocks` blocks. Any write to a block makes it uncommitted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._slot_tokens: U32 = np.zeros(num_blocks * block_size, np.uint32)
        self._is_committed: Bools = np.zeros(num_blocks, np.bool_)
        self._hashes: npt.NDArray[np.uint8] = np.zeros((num_blocks, HASH_BYTES), np.uint8)
        self._num_writes: I64 | None = None  # of each block; None: no other thread reads blocks

    def uncommit(self, block_ids: I64) -> None:
        """Marks blocks that are about to be written as uncommitted."""
        self._is_committed[block_ids] = False
        if self._num_writes is not None:
            self._num_writes[block_ids] += 1

    def count_writes(self) -> None:
        """From now on, `version` tells another thread whether a block was written while it read the block."""
        if self._num_writes is None:
            self._num_writes = np.zeros(self.num_blocks, np.int64)

    @property
    def has_readers(self) -> bool:
        """Whether other threads read blocks."""
        return self._num_writes is not None

    def version(self, block: int, digest: bytes) -> int | None:
        """Changes with each write of the block; None unless the block is committed with this digest. Any thread may
        call it.
        """
        version = 0 if self._num_writes is None else int(self._num_writes[block])
        is_same = self._is_committed[block] and self._hashes[block].tobytes() == digest
        return version if is_same else None

    def digests_of(self, block_ids: U32) -> tuple[U32, list[bytes]]:
        """Those of the blocks that are committed, and their digests."""
        committed = block_ids[self._is_committed[block_ids]]
        hashes = self._hashes[committed].tobytes()
        return committed, [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]

    def tokens_of(self, block: int) -> U32:
        """A copy of the tokens of a block."""
        return self._slot_tokens[block * self.block_size : (block + 1) * self.block_size].copy()

    def write_tokens(self, slots: I64, token_ids: I64) -> None:
        """Records the tokens whose keys and values are being written."""
        self.uncommit(slots // self.block_size)
        self.fill_tokens(slots, token_ids)

    def write_block(self, block: int, token_ids: U32) -> None:
        """The same for all tokens of a block."""
        first = block * self.block_size
        self.write_tokens(np.arange(first, first + self.block_size), token_ids.astype(np.int64))

    def fill_tokens(self, slots: I64, token_ids: I64) -> None:
        """Records tokens that became known after they were written; committed blocks stay committed."""
        self._slot_tokens[slots] = token_ids

    def copy_tokens(self, src: I64, dst: I64) -> None:
        """Copies the tokens of blocks, in the given order."""
        tokens = self._slot_tokens.reshape(self.num_blocks, self.block_size)
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            tokens[target] = tokens[source]

    def commit(self, block_ids: I64, hashes: list[bytes]) -> None:
        """Marks full blocks as cached prefixes with these digests."""
        self._hashes[block_ids] = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
        self._is_committed[block_ids] = True  # last: another thread may look at a block in between

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        """Block ids [N], their digests, and their tokens [N, block_size], in pieces."""
        tokens = self._slot_tokens.reshape(self.num_blocks, self.block_size)
        ids = np.flatnonzero(self._is_committed).astype(np.uint32)
        for start in range(0, len(ids), LIST_CHUNK):
            part = ids[start : start + LIST_CHUNK]
            yield part, [row.tobytes() for row in self._hashes[part]], tokens[part]
