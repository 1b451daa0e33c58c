"""Linear layers on the device, by how their weights are stored.

float   cuBLAS, or in exact mode the Triton kernel of kernels/linear.py
fp8     torch._scaled_mm (cuBLAS, CUTLASS) with one scale per row, or the Triton kernel of kernels/scaled_linear.py:
        in exact mode, for scales of groups of inputs, and for shapes and dtypes that the library refuses
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import Linear
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels import linear
from worker_svc.engine.gpu.kernels.scaled_linear import (
    Fp8Weight,
    ScaledRows,
    quantize_rows,
    quantized,
    reference,
    scaled_linear,
)

logger = logging.getLogger(__name__)

WeightFormat = Literal["fp8", "int4"]
FP8_CAPABILITY = (8, 9)  # first compute capability with e4m3
LIBRARY_MULTIPLE = 16  # sizes of a product that torch._scaled_mm accepts on a GPU
PROBE_ERROR = 0.02  # of the norm of the output: rounding to bfloat16 is 0.002, a wrong scale or order about 1


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3. The interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@runtime_checkable
class StoredWeight(Protocol):
    """A linear layer whose weight can be read back."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    def widened(self) -> torch.Tensor:
        """The weight [out, in] that the layer multiplies by, in a float type."""
        ...


class DeviceLinears:
    """Makes linear layers of a device, for one dtype of inputs and outputs."""

    copies_weights = False

    def __init__(self, determinism: Determinism, dtype: torch.dtype) -> None:
        self.is_exact = determinism == "exact"
        self._product = linear.linear if self.is_exact else F.linear
        self._dtype = dtype

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return DeviceLinear(self._product, weight, bias)

    def make_fp8_linear(self, weight: Fp8Weight, bias: torch.Tensor | None) -> Linear:
        may_use_library = not (
            self.is_exact or weight.is_grouped or any(size % LIBRARY_MULTIPLE for size in weight.steps.shape)
        )
        if may_use_library and library_serves(self._dtype, weight.steps.device):
            return LibraryFp8Linear(weight, bias)
        return Fp8Linear(weight, bias, self.is_exact)


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A weight [out, in] on the device and the function that multiplies by it."""

    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)

    def widened(self) -> torch.Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A weight in fp8 for the Triton kernel. Inputs are rounded to fp8, each row with its own scales."""

    weight: Fp8Weight
    bias: torch.Tensor | None
    is_exact: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantize_rows(x, self.weight.group)
        return scaled_linear(rows, self.weight, self.bias, x.dtype, is_exact=self.is_exact)

    def widened(self) -> torch.Tensor:
        return self.weight.widened()


@dataclass(frozen=True, slots=True)
class LibraryFp8Linear:
    """A weight in fp8 with one scale per output, for torch._scaled_mm."""

    weight: Fp8Weight
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return library_product(quantize_rows(x, self.weight.group), self.weight, self.bias, x.dtype)

    def widened(self) -> torch.Tensor:
        return self.weight.widened()


def library_product(rows: ScaledRows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [n, in] @ weight [out, in].T + bias, with scales [n, 1] and [1, out]; the second operand is column-major."""
    if not len(rows.steps):
        return torch.empty(0, len(weight.steps), dtype=dtype, device=rows.steps.device)
    return torch._scaled_mm(
        rows.steps, weight.steps.T, scale_a=rows.scales, scale_b=weight.scales, bias=bias, out_dtype=dtype
    )


@cache
def library_serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch._scaled_mm computes rows with their own scales in this dtype on this device, correctly."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator).to(device) for size in ((24, 64), (48, 64), (48,)))
    rows, columns, bias = quantize_rows(x, 64), quantized(weight), bias.to(dtype)
    try:
        found = library_product(rows, columns, bias, dtype)
    except (RuntimeError, ValueError) as error:
        logger.info("torch._scaled_mm does not serve %s here, Triton's kernel is used: %s", dtype, error)
        return False
    expected = reference(rows, columns, bias)
    if (found.double() - expected).norm() < PROBE_ERROR * expected.norm():
        return True
    logger.warning("torch._scaled_mm is wrong here in %s, Triton's kernel is used", dtype)
    return False
