"""Linear layers on the device, by how their weights are stored.

float   cuBLAS; in exact mode, and for few rows, the Triton kernel of linears/linear.py
int8    the Triton kernel of linears/int8_linear.py, whose sums are integers, in every mode
fp8     torch._scaled_mm (cuBLAS, CUTLASS) with one scale per row, or the Triton kernel of linears/scaled_linear.py:
        in exact mode, for scales of groups of inputs, and for shapes and dtypes that the library refuses
int4    torch._weight_int4pack_mm (tinygemm) in bfloat16, or the Triton kernel of linears/int4_linear.py: in exact mode
        and in other dtypes; for many rows cuBLAS, with a copy of the weight in the model's dtype
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import Linear
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels.linears import int4_linear, linear
from worker_svc.engine.gpu.kernels.linears.int4_linear import Int4Weight
from worker_svc.engine.gpu.kernels.linears.int8_linear import int8_linear, int8_rows
from worker_svc.engine.gpu.kernels.linears.scaled_linear import (
    Fp8Weight,
    ScaledRows,
    quantize_rows,
    quantized,
    reference,
    reference_rows,
    scaled_linear,
)
from worker_svc.engine.kernels.torch_linear import Int8Rows

logger = logging.getLogger(__name__)

WeightFormat = Literal["fp8", "int4", "int8"]
FP8_CAPABILITY = (8, 9)  # first compute capability with e4m3
LIBRARY_MULTIPLE = 16  # sizes of a product that torch._scaled_mm accepts on a GPU
FEW_ROWS = 64  # up to here int4 is multiplied; beyond it a copy in a float type costs less (not measured)
PROBE_ERROR = 0.02  # of the norm of the output: rounding to bfloat16 is 0.002, a wrong scale or order about 1


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3. The interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def has_int4(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights in int4 are multiplied in this dtype. Tensor cores do not multiply float32, and without them the
    kernel needs more registers than there are."""
    return dtype is not torch.float32 or device.type != "cuda"


@runtime_checkable
class StoredWeight(Protocol):
    """A linear layer whose weight can be read back."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    def widened(self) -> torch.Tensor:
        """The weight [out, in] that the layer multiplies by, in a float type."""


class DeviceLinears:
    """Makes linear layers of a device, for one dtype of inputs and outputs."""

    copies_weights = False

    def __init__(self, determinism: Determinism, dtype: torch.dtype) -> None:
        self.is_exact = determinism == "exact"
        self._product = linear.linear if self.is_exact else linear.short_linear
        self._dtype = dtype

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return DeviceLinear(self._product, weight, bias)

    def make_fp8_linear(self, weight: Fp8Weight, bias: torch.Tensor | None) -> Linear:
        may_use_library = not (
            self.is_exact or weight.is_grouped or any(size % LIBRARY_MULTIPLE for size in weight.steps.shape)
        )
        if may_use_library and library_serves(self._dtype, weight.steps.device):
            return Fp8Linear(weight, bias, library_product)
        return Fp8Linear(weight, bias, partial(scaled_linear, is_exact=self.is_exact))

    def make_int8_linear(self, rows: Int8Rows, bias: torch.Tensor | None) -> Linear:
        return DeviceInt8Linear(rows, bias)

    def make_int4_linear(self, weight: Int4Weight, bias: torch.Tensor | None) -> Linear:
        may_use_library = self._dtype is torch.bfloat16 and not self.is_exact and weight.group in int4_linear.GROUPS
        if may_use_library and library_serves_int4(weight.words.device):
            return Int4Linear(weight, bias, library_int4_product)
        return Int4Linear(weight, bias, partial(int4_linear.int4_linear, is_exact=self.is_exact), self.is_exact)


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
    """A weight in fp8 and the function that multiplies by it. Inputs are rounded, each row with its own scales."""

    weight: Fp8Weight
    bias: torch.Tensor | None
    product: Callable[[ScaledRows, Fp8Weight, torch.Tensor | None, torch.dtype], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_rows(quantize_rows(x, self.weight.group), x.dtype)

    def of_rows(self, rows: ScaledRows, dtype: torch.dtype) -> torch.Tensor:
        """The result for inputs that are rounded."""
        return self.product(rows, self.weight, self.bias, dtype)

    def widened(self) -> torch.Tensor:
        return self.weight.widened()


@dataclass(frozen=True, slots=True)
class DeviceInt8Linear:
    """A weight in int8. Inputs are rounded, each row with its own scale."""

    weight: Int8Rows
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return int8_linear(int8_rows(x), self.weight, self.bias, x.dtype)

    def widened(self) -> torch.Tensor:
        return self.weight.steps.float() * self.weight.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A weight in int4 and the function that multiplies few rows by it, in exact mode all."""

    weight: Int4Weight
    bias: torch.Tensor | None
    product: Callable[[torch.Tensor, Int4Weight, torch.Tensor | None], torch.Tensor]
    is_exact: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        if self.is_exact or len(x) <= FEW_ROWS:
            return self.product(x, self.weight, self.bias)
        return F.linear(x, int4_linear.widened(self.weight), self.bias)

    def widened(self) -> torch.Tensor:
        weight = int4_linear.widened(self.weight)
        if self.weight.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.weight.order, weight)


def library_product(rows: ScaledRows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [n, in] @ weight [out, in].T + bias, with scales [n, 1] and [1, out]; the second operand is column-major."""
    if not len(rows.steps):
        return torch.empty(0, len(weight.steps), dtype=dtype, device=rows.steps.device)
    return torch._scaled_mm(
        rows.steps, weight.steps.T, scale_a=rows.scales, scale_b=weight.scales, bias=bias, out_dtype=dtype
    )


def library_int4_product(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] @ weight [out, in].T + bias in bfloat16."""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    found = torch._weight_int4pack_mm(x.contiguous(), weight.words, weight.group, weight.scales_and_zeros)
    return found if bias is None else found.add_(bias)


@cache
def library_serves_int4(device: torch.device) -> bool:
    """Whether torch._weight_int4pack_mm multiplies correctly by words in the order of int4_linear.py."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (16, 256), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.rand(16, 8, generator=generator) + 0.5, 15 * torch.rand(16, 8, generator=generator)
    parts = int4_linear.packed(steps), int4_linear.scales_and_zeros(scales, zeros, torch.bfloat16)
    words, numbers = (part.to(device) for part in parts)
    weight = Int4Weight(words, numbers, 32)
    x = torch.randn(20, 256, generator=generator).bfloat16().to(device)
    try:
        found = library_int4_product(x, weight, None)
    except (RuntimeError, AttributeError) as error:
        logger.info("torch._weight_int4pack_mm does not serve here, Triton's kernel is used: %s", error)
        return False
    expected = x.double() @ int4_linear.reference(weight).double().T
    if (found.double() - expected).norm() < PROBE_ERROR * expected.norm():
        return True
    logger.warning("torch._weight_int4pack_mm is wrong here, Triton's kernel is used")
    return False


@cache
def library_serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch._scaled_mm computes rows with their own scales in this dtype on this device, correctly."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator).to(device) for size in ((24, 64), (48, 64), (48,)))
    rows, columns, bias = reference_rows(x, 64), quantized(weight), bias.to(dtype)
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
