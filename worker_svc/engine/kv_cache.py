"""The KV block pool of a worker: memory, which tokens each slot holds, which blocks are committed prefixes."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.engine.backend import I64, Backend
from worker_svc.engine.batch import U32, Bools
from worker_svc.engine.plan import HASH_BYTES

DEFAULT_MEMORY = 1 << 30
LIST_CHUNK = 1024


class KVCachePool:
    """Keys and values of `num_blocks` blocks in all layers, and what is known of their content.

    Memory is claimed when it is first written. Any write to a block makes it uncommitted.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = _lazy_zeros((num_layers, num_blocks, kv_heads, head_dim, block_size), dtype)
        self.values = _lazy_zeros((num_layers, num_blocks, kv_heads, block_size, head_dim), dtype)
        self._layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self._slot_tokens: U32 = np.zeros(num_blocks * block_size, np.uint32)
        self._is_committed: Bools = np.zeros(num_blocks, np.bool_)
        self._hashes: npt.NDArray[np.uint8] = np.zeros((num_blocks, HASH_BYTES), np.uint8)

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * block_size * kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_blocks, kv_heads, head_dim, block_size] and values [num_blocks, kv_heads, block_size, head_dim]."""
        return self._layers[index]

    def write_tokens(self, slots: I64, token_ids: I64) -> None:
        """Notes the tokens whose keys and values are about to be written."""
        self._slot_tokens[slots] = token_ids
        self._is_committed[slots // self.block_size] = False

    def copy(self, backend: Backend, src: I64, dst: I64) -> None:
        """Copies blocks with their tokens, pair after pair; the copies are not committed."""
        backend.copy_blocks(self.keys, src, dst)
        backend.copy_blocks(self.values, src, dst)
        tokens = self._slot_tokens.reshape(self.num_blocks, self.block_size)
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            tokens[target] = tokens[source]
        self._is_committed[dst] = False

    def commit(self, block_ids: I64, hashes: list[bytes]) -> None:
        """From now on these full blocks are cached prefixes under these hashes."""
        self._is_committed[block_ids] = True
        self._hashes[block_ids] = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        """Block ids [N], their hashes, and the tokens they hold [N, block_size], in pieces."""
        tokens = self._slot_tokens.reshape(self.num_blocks, self.block_size)
        ids = np.flatnonzero(self._is_committed).astype(np.uint32)
        for start in range(0, len(ids), LIST_CHUNK):
            part = ids[start : start + LIST_CHUNK]
            yield part, [row.tobytes() for row in self._hashes[part]], tokens[part]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out on first write, in huge pages if it can: blocks lie scattered, and with
    small pages nearly every block read would miss the address cache. torch.zeros would touch all of it at once.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
