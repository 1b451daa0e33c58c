"""The KV block pool of a worker: its memory, the token of each slot, and the committed prefixes."""

from __future__ import annotations

import math

import torch

from step_protocol.columns import I64
from worker_svc.engine.backend import Backend
from worker_svc.engine.decoder.block_contents import BlockContents
from worker_svc.engine.kernels.memory import lazy_zeros

GIB = 1 << 30
DEFAULT_MEMORY = GIB


class KVCachePool(BlockContents):
    """Keys and values of `num_blocks` blocks in all layers, and their content as tokens.

    Memory is claimed when it is first written.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.keys = _lazy_zeros((num_layers, num_blocks, kv_heads, head_dim, block_size), dtype)
        self.values = _lazy_zeros((num_layers, num_blocks, kv_heads, block_size, head_dim), dtype)
        super().__init__(num_blocks, block_size)
        self._layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * block_size * kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_blocks, kv_heads, head_dim, block_size] and values [num_blocks, kv_heads, block_size, head_dim]."""
        return self._layers[index]

    def copy(self, backend: Backend, src: I64, dst: I64) -> None:
        """Copies blocks with their tokens, in the given order. The copies are not committed."""
        backend.copy_blocks(self.keys, src, dst)
        backend.copy_blocks(self.values, src, dst)
        self.copy_tokens(src, dst)
        self.uncommit(dst)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory when they are first written: blocks are used one by one. Raises ValueError."""
    size = math.prod(shape) * dtype.itemsize
    try:
        return lazy_zeros(size).view(dtype).view(shape)
    except OSError as error:
        words = f"keys and values of {shape[1]} blocks need {2 * size / GIB:.1f} GiB"
        raise ValueError(f"{words}: {error.strerror}; lower num_blocks or kv_cache_memory") from None
