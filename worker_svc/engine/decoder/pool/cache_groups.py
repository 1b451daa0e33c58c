"""Cache groups: which layers of a model share blocks, and how many blocks each group gets.

A block of a model whose layers keep the same of a sequence holds all layers. If some layers attend to all tokens and
others to a window, the layers of each window form a group with blocks of its own, so that rows free what is behind it
(docs/adr/0093-cache-groups.md). The first group has the layers that attend to all tokens.

A row needs a fixed number of a window group's blocks, however long it is. So such a group gets what all rows need, and
more for cached prefixes; the first group gets the rest of the memory. Where that would not save memory, because the
pool is small or the window wide, the layers stay in the first group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from request_fields.sizes import blocks_of_row, largest_pool
from step_protocol.types import CacheGroup
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool, LayerGroups

CACHED_SHARE = 8  # a group has a block for cached prefixes per so many blocks of the first group
DEPTH = 2  # messages in flight, and steps whose chunks hold blocks


def divide_pool(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, memory: int) -> LayerGroups | None:
    """The groups of a pool of `memory` bytes, or with `config.num_blocks` blocks of the first one. None: one group."""
    per_layer = [KVCachePool.bytes_per_block([one], config.block_size, dtype) for one in model.kv_layouts()]
    windows = _windows(config, model)
    while any(window is not None for window in windows):
        kinds = sorted({window for window in windows if window is not None})
        needs = [_needed_blocks(config, window) for window in kinds]
        sizes = [_bytes_of(window, windows, per_layer) for window in (None, *kinds)]
        num_blocks = config.num_blocks or min(_first_blocks(memory, sizes, needs), largest_pool(config.block_size))
        groups = tuple(
            CacheGroup(window, need + num_blocks // CACHED_SHARE, size)
            for window, need, size in zip(kinds, needs, sizes[1:], strict=True)
        )
        wide = {group.attention_window for group in groups if group.num_blocks >= num_blocks}
        if not wide:
            of_layer = tuple(0 if window is None else 1 + kinds.index(window) for window in windows)
            return LayerGroups(of_layer, num_blocks, groups)
        windows = [None if window in wide else window for window in windows]
    return None


def _windows(config: EngineConfig, model: ModelConfig) -> list[int | None]:
    """The window of each layer that may leave the first group; None for the others."""
    model = model.within(config.max_model_len or model.max_position_embeddings)
    windows = [layer.window or layer.chunk for layer in model.layers]  # a chunk begins at most so many tokens before
    windows = [
        window if layer.kv_owner is None else windows[layer.kv_owner]
        for window, layer in zip(windows, model.layers, strict=True)
    ]
    sees_all = [w is None and layer.attends for w, layer in zip(windows, model.layers, strict=True)]
    return windows if any(sees_all) else [None] * len(windows)


def _needed_blocks(config: EngineConfig, window: int) -> int:
    """Blocks for all rows, and for the chunks of the steps in flight."""
    chunks = DEPTH * -(-config.max_num_batched_tokens // config.block_size)
    return config.max_num_seqs * blocks_of_row(window, config.block_size, DEPTH) + chunks


def _bytes_of(window: int | None, windows: Sequence[int | None], per_layer: Sequence[int]) -> int:
    return sum(size for size, other in zip(per_layer, windows, strict=True) if other == window)


def _first_blocks(memory: int, sizes: Sequence[int], needs: Sequence[int]) -> int:
    """Blocks of the first group: what the other groups leave. `sizes`: bytes of a block of each group."""
    left = memory - sum(size * need for size, need in zip(sizes[1:], needs, strict=True))
    per_block = CACHED_SHARE * sizes[0] + sum(sizes[1:])
    return max(0, left * CACHED_SHARE // max(1, per_block))
