"""Adapters for adapters.cpp and forward.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from step_protocol.columns import I32
from worker_svc.engine.adapters.adapter import Adapter
from worker_svc.engine.adapters.packed import AdapterRows, Linear, LowRank, PackedAdapter
from worker_svc.engine.adapters.targets import SITES
from worker_svc.engine.kernels.linear import BFLOAT16, FLOAT32, KernelLinear, LinearStruct, address_of

MAX_PARTS = 3  # `kAdapterParts` of kernels.h
_LONG = ctypes.c_int64


class LowRankStruct(ctypes.Structure):
    """`LowRank` of kernels.h."""

    _fields_ = (
        ("shrink", LinearStruct),
        ("num_parts", _LONG),
        ("expand", LinearStruct * MAX_PARTS),
        ("first_rank", _LONG * MAX_PARTS),
        ("first_output", _LONG * MAX_PARTS),
    )


class AdapterStruct(ctypes.Structure):
    """`Adapter` of forward.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sites", "tokens", "heads")),
        *((name, _LONG) for name in ("num_tokens", "num_heads")),
    )


class LowRankRowsStruct(ctypes.Structure):
    """`LowRankRows` of kernels.h."""

    _fields_ = (("layer", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("n", _LONG))


class KernelAdapter(PackedAdapter):
    """A packed adapter whose matrices are KernelLinear, and its structs."""

    def __init__(self, kernels: ctypes.CDLL, adapter: Adapter, num_layers: int) -> None:
        def make_linear(weight: torch.Tensor) -> Linear:
            kind = BFLOAT16 if weight.dtype is torch.bfloat16 else FLOAT32
            return KernelLinear(kernels, kind, weight, None, threads=1)

        super().__init__(adapter, num_layers, make_linear)
        self.structs = (LowRankStruct * len(self.sites))(*map(_struct, self.sites))

    def address(self, layer: int, site: int) -> int:
        """Of the struct of a site."""
        return ctypes.addressof(self.structs) + (layer * len(SITES) + site) * ctypes.sizeof(LowRankStruct)


def _struct(low_rank: LowRank | None) -> LowRankStruct:
    if low_rank is None:
        return LowRankStruct()
    parts = low_rank.expansions
    return LowRankStruct(
        _linear(low_rank.shrink),
        len(parts),
        (LinearStruct * MAX_PARTS)(*(_linear(part.linear) for part in parts)),
        (_LONG * MAX_PARTS)(*(part.first_rank for part in parts)),
        (_LONG * MAX_PARTS)(*(part.first_output for part in parts)),
    )


def _linear(linear: Linear) -> LinearStruct:
    if not isinstance(linear, KernelLinear):
        raise TypeError(f"adapters.cpp computes layers of type KernelLinear, not {type(linear).__name__}")
    return linear.struct()


def adapter_structs(rows: Sequence[AdapterRows]) -> ctypes.Array[AdapterStruct]:
    """The adapters of a step. Valid as long as `rows`."""
    structs = []
    for part in rows:
        if not isinstance(part.adapter, KernelAdapter):
            raise TypeError(f"forward.cpp computes adapters of type KernelAdapter, not {type(part.adapter).__name__}")
        addresses = ctypes.addressof(part.adapter.structs), address_of(part.tokens), address_of(part.heads)
        structs.append(AdapterStruct(*addresses, len(part.tokens), len(part.heads)))
    return (AdapterStruct * len(structs))(*structs)


def site_rows(layer: int, site: int, rows: Sequence[tuple[PackedAdapter, I32]]) -> ctypes.Array[LowRankRowsStruct]:
    """The rows of each adapter that changes a site. Valid as long as `rows`."""
    structs = [
        LowRankRowsStruct(adapter.address(layer, site), address_of(indices), len(indices))
        for adapter, indices in rows
        if isinstance(adapter, KernelAdapter) and adapter.at(layer, site) is not None and len(indices)
    ]
    return (LowRankRowsStruct * len(structs))(*structs)
