"""The KV block pool of a worker: its memory, the token of each slot, and the committed prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch

from step_protocol.columns import I64
from step_protocol.types import CacheGroup
from worker_svc.engine.backend import Cache, KVLayout, LayerBackend
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.decoder.pool.block_payload import Movable, MovableBlocks, PoolPart
from worker_svc.engine.kernels.memory import lazy_zeros
from worker_svc.engine.recurrent import StatePool

GIB = 1 << 30
DEFAULT_MEMORY = GIB


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers, with their numbers of blocks."""

    of_layer: tuple[int, ...]  # the group of each layer; 0: the first one
    num_blocks: int  # of the first group
    groups: tuple[CacheGroup, ...]  # the others

    @property
    def sizes(self) -> tuple[int, ...]:
        """The blocks of each group."""
        return (self.num_blocks, *(group.num_blocks for group in self.groups))


class KVCachePool(BlockContents):
    """Keys and values of all layers in blocks, and their content as tokens; the `states` of layers that keep a state
    instead.

    A block of a cache group is a block of each of its layers that has keys and values of its own: their layouts may
    differ. Blocks are numbered through all groups. Memory is claimed when it is first written.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        states: StatePool | None = None,
        groups: LayerGroups | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`groups`: with `num_blocks` of the first one. None: all layers have the same blocks. `device` None: the pool
        is in host memory."""
        self.states = states
        sizes, self.group_of = (
            ((num_blocks,), (0,) * len(layouts)) if groups is None else (groups.sizes, groups.of_layer)
        )
        self._ends = np.cumsum(sizes)
        self.tensors: list[torch.Tensor] = []  # [layers of one layout and group, blocks of the group, ...]
        self._groups: list[int] = []  # of `tensors`
        owned: dict[int, tuple[torch.Tensor, ...]] = {}
        kinds = list(zip(layouts, self.group_of, strict=True))
        size = sum(
            self.bytes_per_block([one for one, other in kinds if other == group], block_size, dtype) * count
            for group, count in enumerate(sizes)
        )
        for layout, group in dict.fromkeys(kind for kind in kinds if kind[0].owner is None):
            layers = [index for index, other in enumerate(kinds) if other == (layout, group)]
            shapes = ((len(layers), sizes[group], *shape) for shape in layout.shapes(block_size))
            tensors = [_zeros(shape, dtype, size, device) for shape in shapes]
            self.tensors += tensors
            self._groups += [group] * len(tensors)
            owned |= zip(layers, zip(*tensors, strict=True), strict=True)
        self._layers = [owned[index if one.owner is None else one.owner] for index, one in enumerate(layouts)]
        super().__init__(int(self._ends[-1]), block_size)

    @staticmethod
    def bytes_per_block(layouts: Sequence[KVLayout], block_size: int, dtype: torch.dtype) -> int:
        shapes = [shape for layout in layouts if layout.owner is None for shape in layout.shapes(block_size)]
        return sum(map(math.prod, shapes)) * dtype.itemsize

    def layers_from(self, first: int) -> KVCachePool:
        """The same pool for a model whose layers are those from `first` on."""
        pool = copy(self)
        pool._layers, pool.group_of, pool.states = self._layers[first:], self.group_of[first:], None
        return pool

    def layer(self, index: int) -> Cache:
        """Keys [num_blocks, kv_heads, head_dim, block_size] and values [num_blocks, kv_heads, block_size, head_dim]."""
        keys, values = self._layers[index]
        return keys, values

    def parts(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a layer: keys and values, or latents."""
        return self._layers[index]

    def latents(self, index: int) -> torch.Tensor:
        """Latents [num_blocks, block_size, width]."""
        (latents,) = self._layers[index]
        return latents

    def copy(self, backend: LayerBackend, src: I64, dst: I64) -> None:
        """Copies blocks with their tokens, in the given order. The copies are not committed."""
        self.uncommit(dst)
        of_src, of_dst = (np.searchsorted(self._ends, blocks, side="right") for blocks in (src, dst))
        for tensor, group in zip(self.tensors, self._groups, strict=True):
            own, first = (of_src == group) & (of_dst == group), int(self._ends[group]) - tensor.shape[1]
            if own.any():
                backend.copy_blocks(tensor, src[own] - first, dst[own] - first)
        self.copy_tokens(src, dst)

    def _parts_of(self, group: int) -> list[PoolPart]:
        return [
            PoolPart(str(tensor.dtype), tuple(tensor.shape[2:]), tensor.flatten(2).view(torch.uint8).numpy())
            for tensor, other in zip(self.tensors, self._groups, strict=True)
            if other == group
        ]

    def movable(self, kinds: Sequence[str], others: Sequence[Movable] = ()) -> MovableBlocks:
        """The blocks as bytes. `kinds`: of the groups after the first one. `others`: what moves with them."""
        ends = self._ends.tolist()
        groups = [
            MovableBlocks(self, self._parts_of(group), blocks=range(*ends[group - 1 : group + 1]), kind=kind)
            for group, kind in enumerate(kinds, 1)
        ]
        return MovableBlocks(self, self._parts_of(0), [*groups, *others], blocks=range(ends[0]))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, pool_size: int, device: torch.device | None) -> torch.Tensor:
    """In host memory they take memory when they are first written: blocks are used one by one. Raises ValueError."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        return lazy_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    except OSError as error:
        words = f"keys and values of {shape[1]} blocks need {pool_size / GIB:.1f} GiB"
        raise ValueError(f"{words}: {error.strerror}; lower num_blocks or kv_cache_memory") from None
