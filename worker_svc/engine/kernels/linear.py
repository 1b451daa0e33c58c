"""Linear layers computed by linear.cpp: in float32, bfloat16 or int8, or with weights in 4 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker_svc.engine.kernels.binding import Struct, array, struct
from worker_svc.engine.kernels.four_bits import FourBitUnits
from worker_svc.engine.kernels.memory import aligned_zeros
from worker_svc.engine.kernels.torch_linear import Int8Rows

BFLOAT16, INT8, FLOAT32 = 0, 1, 2  # `Kind` of products.h
PANEL = 32  # outputs that linear.cpp packs together


LINEAR_STRUCT = struct("Linear")


class KernelLinear:
    """A weight [out, in] with its bias, packed for linear.cpp, called on [n, in]. Rows do not affect each other."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        kind: int,
        weight: torch.Tensor | Int8Rows | FourBitUnits,
        bias: torch.Tensor | None,
        threads: int,
        zeros: Callable[[int], torch.Tensor] = aligned_zeros,
    ) -> None:
        self._out_features, self._in_features = _shape_of(weight)
        self._multiply = kernels.quire_linear
        self._kind = kind
        self._threads = threads
        self._bias = bias
        self._unit, self._order = 0, None
        if isinstance(weight, FourBitUnits):
            self._unit, self._order = weight.unit, weight.order
            self.packed = zeros(kernels.quire_linear_4bit_bytes(kind, *weight.codes.shape, weight.unit))
            self._scales = torch.zeros(0)
            self._pack_units(kernels, weight)
        else:
            self.packed = zeros(kernels.quire_linear_packed_bytes(kind, self._out_features, self._in_features))
            self._scales = torch.zeros(self._out_features + (-self._out_features % PANEL))
            if isinstance(weight, Int8Rows):
                self._pack_steps(kernels, weight)
            else:
                self._pack(kernels, weight.contiguous())

    def _pack(self, kernels: ctypes.CDLL, weight: torch.Tensor) -> None:
        is_bf16, sizes = weight.dtype is torch.bfloat16, weight.shape
        kernels.quire_linear_pack(self._kind, is_bf16, weight, *sizes, self._scales, self.packed, self._threads)

    def _pack_steps(self, kernels: ctypes.CDLL, weight: Int8Rows) -> None:
        steps = weight.steps.contiguous()
        kernels.quire_linear_pack_steps(steps, *steps.shape, self.packed, self._threads)
        self._scales[: self._out_features] = weight.scales

    def _pack_units(self, kernels: ctypes.CDLL, weight: FourBitUnits) -> None:
        kernels.quire_linear_4bit_pack(
            *(weight.kind, weight.codes, weight.scales, weight.zeros, self._out_features, self._in_features),
            *(weight.unit, self.packed, self._threads),
        )

    def struct(self) -> Struct:
        """This layer for other kernels."""
        return LINEAR_STRUCT(
            kind=self._kind,
            packed=self.packed,
            scales=self._scales,
            bias=self._bias,
            **{"in": self._in_features},
            out=self._out_features,
            unit=self._unit,
            order=self._order,
        )

    @property
    def kind(self) -> int:
        """`Kind` of products.h."""
        return self._kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        y = x.new_empty(n, self._out_features)
        self._multiply(
            *(self._kind, x.dtype is torch.bfloat16, x, self.packed, self._scales, self._bias, y, n),
            *(self._in_features, self._out_features, self._unit, self._order, self._threads),
        )
        return y


def linear_struct(linear: object) -> Struct:
    """The struct of a layer that kernels compute."""
    if not isinstance(linear, KernelLinear):
        raise TypeError(f"kernels compute layers of type KernelLinear, not {type(linear).__name__}")
    return linear.struct()


def linear_structs(linears: Sequence[object]) -> ctypes.Array[Any]:
    """The structs of layers, one after the other."""
    return array([linear_struct(linear) for linear in linears])


def _shape_of(weight: torch.Tensor | Int8Rows | FourBitUnits) -> torch.Size:
    if isinstance(weight, Int8Rows):
        return weight.steps.shape
    return weight.codes.shape if isinstance(weight, FourBitUnits) else weight.shape
