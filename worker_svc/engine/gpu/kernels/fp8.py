"""Keys and values in 8 bits (e4m3: 4 of exponent, 3 of mantissa), with a power of two per layer and head as scale.

A power of two moves the exponent only, so the one rounding is that to 3 bits: at most 1/16 of a value, where values are
between 2^-6 and 448 scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0
TYPICAL = 4.0  # where a head's root mean square is placed: 112 times that is the largest, 1/256 the smallest in full


@triton.jit
def round_e4m3(x):
    """The nearest float32 that e4m3 holds, ties to even, at most the largest; NaN stays. What converts it next, in
    hardware or in the interpreter, has nothing left to round."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14: its neighbours are 2^-9 apart, as the smallest of e4m3 are
    rounded = tl.where(tl.abs(x) < 0.015625, small, normal)
    rounded = tl.where(rounded > 448.0, 448.0, tl.where(rounded < -448.0, -448.0, rounded))
    return tl.where(x == x, rounded, x)


def scale_for(root_mean_square: torch.Tensor) -> torch.Tensor:
    """The power of two that takes numbers of this size to about TYPICAL; 1 where there is nothing but zeros."""
    exponents = (root_mean_square.double() / TYPICAL).log2().round().clamp(-126, 127)
    return torch.where(root_mean_square > 0, exponents.exp2(), 1.0).float()


def reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x in e4m3, divided by its scale."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def reference_widened(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What attention reads, in float32."""
    return x.float() * scale
