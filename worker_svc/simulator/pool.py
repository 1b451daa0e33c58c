"""The KV pool and the row histories of a simulated worker: digests of token prefixes in place of keys and values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, U32
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.block_payload import PoolPart
from worker_svc.simulator.tokens import GOLDEN, MIX_1, MIX_2

U64 = npt.NDArray[np.uint64]


def mix(values: U64) -> U64:
    """`tokens.mix` of each value."""
    values = values + np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


def digest_terms(positions: I64, token_ids: I64) -> U64:
    """The term that each token at its position adds to the digest of a context."""
    return mix((positions.astype(np.uint64) << np.uint64(32)) | token_ids.astype(np.uint64))


class Histories:
    """Digests of the prefixes of every row's tokens, and their sums per full block."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        width = -(-(max_model_len + 1) // block_size) * block_size
        self._block_size = block_size
        self._weights = block_weights(block_size)
        # [r, p]: digest of the first p tokens of row r. One column more than tokens, and one for a row's last sample.
        self.digests: U64 = np.zeros((max_num_seqs, width + 2), np.uint64)
        self.sums: U64 = np.zeros((max_num_seqs, width // block_size), np.uint64)

    def set(self, row: int, places: I64, token_ids: I64, start: int = 0) -> None:
        """Replaces the tokens of a row, and their positions. `start`: digest of the empty context."""
        num_tokens, size = len(token_ids), self._block_size
        self.digests[row, 0] = start
        self.digests[row, 1 : num_tokens + 1] = np.uint64(start) + np.cumsum(digest_terms(places, token_ids))
        num_full = num_tokens // size
        full = self.digests[row, 1 : num_full * size + 1].reshape(num_full, size)
        self.sums[row, :num_full] = (full * self._weights).sum(axis=1)

    def append(self, rows: I64, positions: I64, places: I64, token_ids: U32) -> None:
        """Appends a token at this index, and this position, to the history of each row."""
        self.digests[rows, positions + 1] = self.digests[rows, positions] + digest_terms(
            places, token_ids.astype(np.int64)
        )
        is_last = (positions + 1) % self._block_size == 0
        rows, ends = rows[is_last], positions[is_last] + 1
        columns = ends[:, None] + np.arange(1 - self._block_size, 1)
        sums = (self.digests[rows[:, None], columns] * self._weights).sum(axis=1)
        self.sums[rows, ends // self._block_size - 1] = sums


class SimPool(BlockContents):
    """Blocks whose content is a digest per slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._weights = block_weights(block_size)
        self.digests: U64 = np.zeros(num_blocks * block_size, np.uint64)
        self.sums: U64 = np.zeros(num_blocks, np.uint64)  # weighted, to detect exchanged slots

    def write(self, slots: I64, token_ids: I64, digests: U64) -> None:
        """Stores the tokens and digests of computed slots."""
        self.write_tokens(slots, token_ids)
        self.digests[slots] = digests
        blocks = np.unique(slots // self.block_size)
        self.sums[blocks] = (self.digests.reshape(-1, self.block_size)[blocks] * self._weights).sum(axis=1)

    def copy(self, src: I64, dst: I64) -> None:
        """Copies blocks, one pair after the other; the copies are not committed."""
        self.uncommit(dst)
        content = self.digests.reshape(-1, self.block_size)
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            content[target] = content[source]
            self.sums[target] = self.sums[source]
        self.copy_tokens(src, dst)

    def block_parts(self) -> list[PoolPart]:
        """The arrays of which a block has a part."""
        arrays = self.digests.reshape(1, self.num_blocks, -1), self.sums.reshape(1, self.num_blocks, 1)
        return [PoolPart("uint64", array.shape[2:], array.view(np.uint8)) for array in arrays]


def block_weights(block_size: int) -> U64:
    """An odd weight per offset."""
    return np.arange(1, 2 * block_size, 2, dtype=np.uint64)
