"""Keys and values in fp8 (e4m3: 4 exponent bits, 3 mantissa bits), with one power of two per layer and head as scale.

Dividing by a power of two changes only the exponent, so the rounding to 3 mantissa bits is the only error: at most 1/16
of a value whose size is between 2^-6 and 448 times the scale.
"""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.language import tl, triton

LARGEST = 448.0
TYPICAL = 4.0  # scaled root mean square of a head; normal numbers range from 1/256 of this to 112 times this


@triton.jit
def round_e4m3(x):
    """Rounds to the nearest e4m3 value, ties to even, saturating; NaN stays NaN. The result is a float32 that converts
    without rounding, so hardware and interpreter cannot differ."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14: float32 values there are 2^-9 apart, like e4m3 subnormals
    rounded = tl.where(tl.abs(x) < 0.015625, small, normal)
    rounded = tl.where(rounded > 448.0, 448.0, tl.where(rounded < -448.0, -448.0, rounded))
    return tl.where(x == x, rounded, x)


def scale_for(root_mean_square: torch.Tensor) -> torch.Tensor:
    """The power of two that scales values of this size to about TYPICAL; 1 if all values are zero."""
    exponents = (root_mean_square.double() / TYPICAL).log2().round().clamp(-126, 127)
    return torch.where(root_mean_square > 0, exponents.exp2(), 1.0).float()


def reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x divided by its scale, in e4m3."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def reference_widened(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values that attention reads."""
    return x.float() * scale
