"""Linear layers in torch: through oneDNN, in exact fixed point and in int8. kernel_linear.py has the compiled layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from worker_svc.engine.kernels.exact_ops import FixedPoint, fixed_point_product, step_bits, to_fixed_point

INT8_MAX = 127.0
INT8_SMALLEST = 1e-35  # rows and weights up to this magnitude become 0, because the inverse overflows
MAX_INT8_INPUTS = 65_536  # more products of 255 * 127 could overflow 32 bits
WEIGHTS_AT_ONCE = 1 << 18  # weights widened to float64 at a time, so that they stay in the cache


class PackedLinear:
    """A weight [out, in] with its bias in oneDNN's layout, called on [n, in]. For best_effort only: oneDNN chooses the
    order of its additions by the number of rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self._bias = bias
        self._packed = _pack(weight)
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default if self._packed is not None else None
        self._weight = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]
        result: torch.Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return result


class FixedPointLinear:
    """A weight [out, in] with its bias, called on [n, in]. Sums are integers that float64 holds exactly, so no order of
    additions, number of rows or threads changes a result. About eight times slower than `PackedLinear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bits = step_bits(weight.shape[1])
        whole = to_fixed_point(weight, self._bits)
        outputs = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
        parts = (whole.high.float(), whole.low.float(), whole.exponent, whole.is_finite)
        self._weights = list(zip(*(torch.split(part, outputs) for part in parts), strict=True))
        self._bias = None if bias is None else bias.double()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).to(x.dtype)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """The result in float32."""
        rows = to_fixed_point(x, self._bits)
        parts = (FixedPoint(high.double(), low.double(), *rest) for high, low, *rest in self._weights)
        y = torch.cat([fixed_point_product(rows, part, self._bits) for part in parts], dim=1)
        return (y if self._bias is None else y + self._bias).float()


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """A weight [out, in] in int8 with the scale of each output [out], as a checkpoint stores it."""

    steps: torch.Tensor
    scales: torch.Tensor


class Int8Linear:
    """A weight [out, in] as int8 with one scale per output, called on [n, in] of any float type: the results of
    linear.cpp, bit for bit. Each row of x has its own scale, so it does not depend on the other rows.
    """

    def __init__(self, weight: torch.Tensor | Int8Rows, bias: torch.Tensor | None) -> None:
        if isinstance(weight, torch.Tensor):
            check_int8_width(weight.shape[1])
            steps, scales = int8_steps(weight)
            weight = Int8Rows(steps.to(torch.int8), scales)
        self._weight, self._scales = weight.steps, weight.scales
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, scales = int8_steps(x)
        sums = (q.double() @ self._weight.double().T).float()  # exact: integers below 2^53
        y = sums * (scales[:, None] * self._scales)
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def check_int8_width(in_features: int) -> None:
    """Raises ValueError for a layer that is too wide to be summed in 32 bits."""
    if in_features > MAX_INT8_INPUTS:
        raise ValueError(
            f"quantize=int8 supports at most {MAX_INT8_INPUTS} inputs per linear layer, this model has a layer with "
            f"{in_features}; start the worker without --quantize"
        )


def int8_steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of [n, dim] in steps of its own scale: steps [n, dim] from -127 to 127 as float32, scales [n]."""
    wide = x.float()
    top = wide.abs().amax(dim=1)
    inverse = torch.where(top > INT8_SMALLEST, torch.div(torch.tensor(INT8_MAX), top), 0.0)
    return (wide * inverse[:, None]).round(), top / INT8_MAX


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's own layout, or None where this build of torch cannot."""
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(4, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return packed
