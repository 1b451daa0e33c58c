"""Adapters on the device: slots for as many as open rows may use, and what they add to the linear layers of a step.

An adapter is copied to a slot when a row opens and no slot has it. The copy is in the stream of the steps: earlier
steps have finished with the slot when it begins, and the step that opened the row begins when it ends. A slot keeps its
adapter until another one needs the slot.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from worker_svc.engine.backend import SITES
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.linears.linear import Tile
from worker_svc.engine.gpu.kernels.linears.low_rank import (
    LINE,
    SiteOutputs,
    SlotBuffers,
    add_low_rank,
    reference,
    shape_for,
)
from worker_svc.engine.gpu.kernels.route import ExpertTiles, group
from worker_svc.engine.gpu.layers.adapter_shapes import AdapterShapes, DeviceAdapter

NO_ADAPTER = -1


class TokenAdapters:
    """The adapters of a step: the slot of each token, and the tiles of tokens with the same one."""

    def __init__(self, slots: DeviceSlots, of_tokens: torch.Tensor) -> None:
        self._slots = slots
        self._of_tokens = of_tokens  # int32 [n]
        self._shape = slots.shape_for(len(of_tokens))
        self._tiles: ExpertTiles | None = None

    def at(self, tokens: torch.Tensor) -> TokenAdapters:
        """Those of some tokens of the step."""
        return TokenAdapters(self._slots, self._of_tokens.index_select(0, tokens))

    def _add_in_torch(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(reference(x, y, self._slots.buffers, self._slots.site(layer, site), self._of_tokens.tolist()))

    @kernel("adapters", _add_in_torch, writes="y")
    def add(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [n, out] += what the adapters of its rows add to a linear layer of x [n, in]."""
        outputs = self._slots.site(layer, site)
        if self._tiles is None:
            self._tiles = group(self._of_tokens[:, None], self._slots.num_slots, self._shape.rows)
        add_low_rank(x, y, self._slots.buffers, outputs, self._tiles, self._shape)


class DeviceSlots:
    """Owns the device memory of adapters. Only the thread that launches steps may call it."""

    def __init__(self, shapes: AdapterShapes, num_slots: int, device: torch.device, *, is_exact: bool) -> None:
        self.shapes = shapes
        self.num_slots = num_slots
        self._device = device
        self._is_exact = is_exact
        self.buffers = SlotBuffers(
            torch.zeros(num_slots, shapes.capacity, dtype=shapes.dtype, device=device),
            torch.zeros(num_slots, len(shapes.sites), LINE, dtype=torch.int64, device=device),
        )
        self._slot_of: dict[bytes, int] = {}  # by digest; the least recently used one first

    def site(self, layer: int, site: int) -> SiteOutputs:
        """A linear layer that adapters may change."""
        shard = self.shapes.sites[layer * len(SITES) + site]
        if shard is None:
            raise LookupError(f"site {SITES[site]} of layer {layer} has no adapters: a bug in the engine")
        return shard.outputs

    def has(self, digest: bytes) -> bool:
        """Whether a slot has this adapter."""
        return digest in self._slot_of

    def place(self, adapters: Collection[DeviceAdapter]) -> None:
        """Copies to slots those adapters of open rows that are in none. There are at most as many as slots."""
        used = {adapter.digest for adapter in adapters}
        for adapter in adapters:
            slot = self._slot_of.pop(adapter.digest, None)
            if slot is None:
                slot = self._free_slot(used)
                self._copy(adapter, slot)
            self._slot_of[adapter.digest] = slot

    def _free_slot(self, used: Collection[bytes]) -> int:
        if len(self._slot_of) < self.num_slots:
            return next(slot for slot in range(self.num_slots) if slot not in self._slot_of.values())
        evicted = next((digest for digest in self._slot_of if digest not in used), None)
        if evicted is None:
            raise RuntimeError(f"open rows use more adapters than the {self.num_slots} slots: a bug in the engine")
        return self._slot_of.pop(evicted)

    def _copy(self, adapter: DeviceAdapter, slot: int) -> None:
        place = self.buffers.weights[slot, : len(adapter.numbers)]
        place.copy_(adapter.numbers, non_blocking=True)
        self.buffers.table[slot].copy_(adapter.lines, non_blocking=True)

    def slot_of(self, digest: bytes) -> int:
        """The slot of a placed adapter."""
        return self._slot_of[digest]

    def shape_for(self, num_tokens: int) -> Tile:
        """The tiles of a step with this number of tokens."""
        return shape_for(num_tokens, self.shapes.dtype, self._device, is_exact=self._is_exact)
