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
        outputs, inputs = _shape_of(weight)
        self._multiply, self._threads, self.kind, self._outputs = kernels.quire_linear, threads, kind, outputs
        scales, unit, order = torch.zeros(0), 0, None
        if isinstance(weight, FourBitUnits):
            unit, order, numbers = weight.unit, weight.order, (weight.codes, weight.scales, weight.zeros)
            self.packed = zeros(kernels.quire_linear_4bit_bytes(kind, outputs, inputs, unit))
            kernels.quire_linear_4bit_pack(kind, *numbers, outputs, inputs, unit, self.packed, threads)
        else:
            self.packed = zeros(kernels.quire_linear_packed_bytes(kind, outputs, inputs))
            scales = torch.zeros(outputs + (-outputs % PANEL))
            if isinstance(weight, Int8Rows):
                kernels.quire_linear_pack_steps(weight.steps.contiguous(), outputs, inputs, self.packed, threads)
                scales[:outputs] = weight.scales
            else:
                is_bf16, rows = weight.dtype is torch.bfloat16, weight.contiguous()
                kernels.quire_linear_pack(kind, is_bf16, rows, outputs, inputs, scales, self.packed, threads)
        sizes = {"in": inputs, "out": outputs, "unit": unit}
        self.struct = LINEAR_STRUCT(kind=kind, packed=self.packed, scales=scales, bias=bias, order=order, **sizes)
        self._pointer = ctypes.byref(self.struct)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), self._outputs)
        self._multiply(x.dtype is torch.bfloat16, self._pointer, x, y, len(x), self._threads)
        return y


def linear_struct(linear: object) -> Struct:
    """The struct of a layer that kernels compute."""
    if not isinstance(linear, KernelLinear):
        raise TypeError(f"kernels compute layers of type KernelLinear, not {type(linear).__name__}")
    return linear.struct


def linear_structs(linears: Sequence[object]) -> ctypes.Array[Any]:
    """The structs of layers, one after the other."""
    return array([linear_struct(linear) for linear in linears])


def _shape_of(weight: torch.Tensor | Int8Rows | FourBitUnits) -> torch.Size:
    if isinstance(weight, Int8Rows):
        return weight.steps.shape
    return weight.codes.shape if isinstance(weight, FourBitUnits) else weight.shape
