"""A loaded model with its KV pool, and what the loaders of all kinds of models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from request_fields.sizes import largest_pool
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.backend import Backend, ForwardBatch, KVLayout, LayerBackend
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.pool.kv_cache import DEFAULT_MEMORY, KVCachePool
from worker_svc.engine.kernels.machine import available_memory
from worker_svc.engine.rows.images import ImageEncoder
from worker_svc.engine.rows.tables import RowTables
from worker_svc.engine.step import StepPart


class Model(Protocol):
    """A loaded decoder or encoder; see DecoderModel."""

    @property
    def hidden(self) -> torch.Tensor: ...

    def fuse(self, pool: KVCachePool) -> None: ...

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor: ...

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model is loaded from, and what computes it."""

    checkpoint: Checkpoint
    config: EngineConfig
    backend: Backend
    layers: LayerBackend  # computes the layers of models that are no decoders
    dtype: torch.dtype
    threads: int  # that compute the digest of the weights while they load
    progress: Callable[[float], None] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with everything that belongs to it."""

    model: Model
    pool: KVCachePool
    facts: Mapping[str, Any]  # the fields of EngineInfo that the model determines
    features: Callable[[], Mapping[str, Any]]  # makes those of its rows: arguments of `add_tables`
    inputs: Callable[[RowTables], StepPart]  # makes the part that reads the inputs of rows
    adapters: AdapterStore[Any, Any] | None = None  # None: the model takes none
    weights: Any = None  # the DecoderWeights of a decoder

    @property
    def images(self) -> ImageEncoder | None:
        """What computes images; None: the model takes none."""
        return None if self.weights is None else self.weights.images


def pool_memory(config: EngineConfig, reserved: int) -> int:
    """`reserved`: memory for adapters and images, which the default size of the pool leaves free."""
    return config.kv_cache_memory or min(DEFAULT_MEMORY, max(available_memory() - reserved, 0) // 2)


def fitting_blocks(
    config: EngineConfig,
    layouts: Sequence[KVLayout],
    dtype: torch.dtype,
    reserved: int,
    beside: int = 0,
) -> int:
    """The blocks of a pool in which a block holds all layers. `beside`: bytes that each block takes in another pool."""
    memory = pool_memory(config, reserved)
    per_block = max(1, KVCachePool.bytes_per_block(layouts, config.block_size, dtype) + beside)
    if memory < per_block:
        raise ValueError(
            f"kv_cache_memory of {memory} bytes is below one block of {per_block} bytes; raise kv_cache_memory"
        )
    return min(memory // per_block, largest_pool(config.block_size))
