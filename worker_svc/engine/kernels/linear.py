"""Linear layers computed by linear.cpp: in float32, bfloat16 or int8, or with weights in 4 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

from worker_svc.engine.kernels.four_bits import FourBitUnits
from worker_svc.engine.kernels.memory import aligned_zeros
from worker_svc.engine.kernels.torch_linear import Int8Rows

BFLOAT16, INT8, FLOAT32 = 0, 1, 2  # `Kind` of products.h
PANEL = 32  # outputs that linear.cpp packs together


_Bytes = ctypes.c_char * 0


def address_of(x: npt.NDArray[Any]) -> int:
    """The address of a writable array. Takes a third of the time of `array.ctypes`."""
    return ctypes.addressof(_Bytes.from_buffer(x.data))


class LinearStruct(ctypes.Structure):
    """`Linear` of forward.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("unit", ctypes.c_int64),
        ("order", ctypes.c_void_p),
    )


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
        self._addresses = (
            self.packed.data_ptr(),
            self._scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )
        self._units = self._unit, None if self._order is None else self._order.data_ptr()

    def _pack(self, kernels: ctypes.CDLL, weight: torch.Tensor) -> None:
        kernels.quire_linear_pack(
            self._kind,
            int(weight.dtype is torch.bfloat16),
            weight.data_ptr(),
            self._out_features,
            self._in_features,
            self._scales.data_ptr(),
            self.packed.data_ptr(),
            self._threads,
        )

    def _pack_steps(self, kernels: ctypes.CDLL, weight: Int8Rows) -> None:
        steps = weight.steps.contiguous()
        kernels.quire_linear_pack_steps(
            steps.data_ptr(), self._out_features, self._in_features, self.packed.data_ptr(), self._threads
        )
        self._scales[: self._out_features] = weight.scales

    def _pack_units(self, kernels: ctypes.CDLL, weight: FourBitUnits) -> None:
        kernels.quire_linear_4bit_pack(
            weight.kind,
            weight.codes.data_ptr(),
            weight.scales.data_ptr(),
            None if weight.zeros is None else weight.zeros.data_ptr(),
            self._out_features,
            self._in_features,
            weight.unit,
            self.packed.data_ptr(),
            self._threads,
        )

    def struct(self) -> LinearStruct:
        """This layer for forward.cpp, valid as long as this object exists."""
        return LinearStruct(self._kind, *self._addresses, self._in_features, self._out_features, *self._units)

    @property
    def kind(self) -> int:
        """`Kind` of products.h."""
        return self._kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        y = x.new_empty(n, self._out_features)
        self._multiply(
            self._kind,
            int(x.dtype is torch.bfloat16),
            x.data_ptr(),
            *self._addresses,
            y.data_ptr(),
            n,
            self._in_features,
            self._out_features,
            *self._units,
            self._threads,
        )
        return y


def _shape_of(weight: torch.Tensor | Int8Rows | FourBitUnits) -> torch.Size:
    if isinstance(weight, Int8Rows):
        return weight.steps.shape
    return weight.codes.shape if isinstance(weight, FourBitUnits) else weight.shape
