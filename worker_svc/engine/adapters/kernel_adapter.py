"""Adapters for adapters.cpp and forward.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from step_protocol.columns import I32
from worker_svc.engine.adapters.packed import low_ranks
from worker_svc.engine.backend import SITES, Adapter, AdapterRows, Linear, LowRank, PackedAdapter
from worker_svc.engine.kernels.binding import Struct, array, struct
from worker_svc.engine.kernels.linear import BFLOAT16, FLOAT32, KernelLinear, linear_struct

LOW_RANK, ADAPTER, LOW_RANK_ROWS = struct("LowRank"), struct("Adapter"), struct("LowRankRows")


class KernelAdapter(PackedAdapter):
    """A packed adapter whose matrices are KernelLinear, and its structs."""

    def __init__(self, kernels: ctypes.CDLL, adapter: Adapter, num_layers: int) -> None:
        def make_linear(weight: torch.Tensor) -> Linear:
            kind = BFLOAT16 if weight.dtype is torch.bfloat16 else FLOAT32
            return KernelLinear(kernels, kind, weight, None, threads=1)

        super().__init__(low_ranks(adapter, num_layers, make_linear))
        self.structs = array([_struct(site) for site in self.sites])

    def address(self, layer: int, site: int) -> int:
        """Of the struct of a site."""
        return ctypes.addressof(self.structs) + (layer * len(SITES) + site) * ctypes.sizeof(LOW_RANK)


def _struct(low_rank: LowRank | None) -> Struct:
    if low_rank is None:
        return LOW_RANK()
    found, parts = LOW_RANK(shrink=linear_struct(low_rank.shrink), num_parts=len(low_rank.expansions)), []
    for index, part in enumerate(low_rank.expansions):
        parts.append(linear_struct(part.linear))
        found.expand[index] = parts[-1]
        found.first_rank[index], found.first_output[index] = part.first_rank, part.first_output
    return found


def adapter_structs(rows: Sequence[AdapterRows]) -> ctypes.Array[Any]:
    """The adapters of a step."""
    structs = []
    for part in rows:
        if not isinstance(part.adapter, KernelAdapter):
            raise TypeError(f"forward.cpp computes adapters of type KernelAdapter, not {type(part.adapter).__name__}")
        structs.append(
            ADAPTER.of(part, sites=part.adapter.structs, num_tokens=len(part.tokens), num_heads=len(part.heads))
        )
    return array(structs)


def site_rows(layer: int, site: int, rows: Sequence[tuple[PackedAdapter, I32]]) -> ctypes.Array[Any]:
    """The rows of each adapter that changes a site."""
    structs = [
        LOW_RANK_ROWS(layer=adapter.address(layer, site), rows=indices, n=len(indices))
        for adapter, indices in rows
        if isinstance(adapter, KernelAdapter) and adapter.at(layer, site) is not None and len(indices)
    ]
    return array(structs, LOW_RANK_ROWS)
