"""Operations in torch and numpy whose result for an element depends only on its inputs.

Library calls choose their order of additions by shape, threads and processor, and their vector and scalar versions of
exp or cos differ in the last bit. Everything here is built from two kinds of operations that cannot differ:
- element-wise +, -, *, / and square root, whose rounding IEEE 754 defines, in an order that the code fixes;
- sums of integers that stay below 2^53 in float64: no addition rounds, so any order gives the same result.
docs/adr/0017-exact-by-construction.md has the reasoning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from step_protocol.columns import F32, U32

EXACT_BITS = 53  # size of a float64's significand
MAX_STEP_BITS = 23  # so that a part of a weight is exact in float32
ANGLES_AT_ONCE = 1 << 20

# pi / 2 in three parts of at most 33 bits: products with integers below 2^20 are exact.
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_SIN = (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800, -1 / 1307674368000)
_COS = (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600, -1 / 87178291200, 1 / 20922789888000)
_EXP = (1.0, 1.0, 5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)

_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """x [.., k] as (high + low * 2^-bits) * 2^(exponent - bits), where high and low are integers of about `bits` bits.

    All elements of a vector along k share the exponent of its largest magnitude. A vector that is not finite is stored
    as 0.
    """

    high: torch.Tensor  # [.., k] float64
    low: torch.Tensor
    exponent: torch.Tensor  # [.., 1] int64
    is_finite: torch.Tensor  # [.., 1] bool


def step_bits(length: int) -> int:
    """Number of bits per part for which sums of `length` products stay below 2^53."""
    return min((EXACT_BITS - (length - 1).bit_length()) // 2, MAX_STEP_BITS)


def to_fixed_point(x: torch.Tensor, bits: int) -> FixedPoint:
    """Splits vectors along the last dimension; about 2 * bits bits below the largest magnitude are kept."""
    top = x.abs().amax(-1, keepdim=True).double()
    is_finite = torch.isfinite(top)
    wide = x.double().where(is_finite, 0.0)
    exponent = torch.frexp(top.where(is_finite, 0.0)).exponent.long()
    scaled = wide * power_of_two(bits - exponent)
    high = scaled.round()
    return FixedPoint(high, ((scaled - high) * 2.0**bits).round(), exponent, is_finite)


def fixed_point_product(a: FixedPoint, b: FixedPoint, bits: int) -> torch.Tensor:
    """a [.., n, k] times b [.., m, k] transposed: float64 [.., n, m]. A vector that is not finite gives NaN."""
    b_high = b.high.mT
    cross = a.high @ b.low.mT + a.low @ b_high
    sums = (a.high @ b_high) * 2.0**bits + cross  # low * low is below float32's precision
    y = sums * power_of_two(a.exponent - 3 * bits) * power_of_two(b.exponent.mT)
    return y.where(a.is_finite & b.is_finite.mT, torch.nan)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [.., n, k] times b [.., k, m] in float32, more precise than a float32 product."""
    bits = step_bits(a.shape[-1])
    return fixed_point_product(to_fixed_point(a, bits), to_fixed_point(b.mT, bits), bits).float()


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, for exponents from -1022 to 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, which keeps size 1: adds the second half to the first until one number is left."""
    x = F.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of float32 to about 1 ulp, as `exp16` in vec.h; 0 below -87.3, NaN stays NaN."""
    clamped = x.clamp(-87.3, 88.3)
    n = (clamped * 1.44269504088896341).round()
    r = (clamped + n * -0.693145751953125) + n * -1.428606765330187045e-06
    y = torch.full_like(r, _EXP[-1])
    for coefficient in reversed(_EXP[:-1]):
        y = y * r + coefficient
    power = ((n.nan_to_num().int() + 127) << 23).view(torch.float32)
    return (y * power).masked_fill(x < -87.3, 0.0)


def top_logprobs(logits: torch.Tensor, chosen: int, num_top: int) -> tuple[F32, U32, int]:
    """Values [1 + num_top], ids [1 + num_top] and the rank of `chosen` for float32 logits [vocab], as logprobs.py
    specifies them."""
    shifted = logits - logits.max()
    log_total = math.log(float(ordered_sum(exp(shifted).double())))
    top = torch.sort(logits, descending=True, stable=True).indices[:num_top]
    ids = np.concatenate(([chosen], top.numpy())).astype(np.uint32)
    values = (shifted.double().numpy()[ids] - log_total).astype(np.float32)
    return values, ids, 1 + int((logits > logits[chosen]).sum())


def erf(x: torch.Tensor) -> torch.Tensor:
    """The error function to 2e-7: Abramowitz and Stegun 7.1.26."""
    size = x.abs()
    t = 1.0 / (1.0 + 0.3275911 * size)
    y = torch.full_like(t, _ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        y = y * t + coefficient
    return torch.sign(x) * (1.0 - y * t * exp(-size * size))


def cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of float32 angles below 2^20, correctly rounded except for rare ties."""
    flat = angles.reshape(-1).numpy()
    starts = range(0, max(len(flat), 1), ANGLES_AT_ONCE)
    parts = [_cos_sin(flat[start : start + ANGLES_AT_ONCE]) for start in starts]
    cos, sin = (torch.from_numpy(np.concatenate(values)).view(angles.shape) for values in zip(*parts, strict=True))
    return cos, sin


def _cos_sin(angles: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    x = angles.astype(np.float64)
    n = np.rint(x * (2 / np.pi))
    r = ((x - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    square = r * r
    cos, sin = _polynomial(_COS, square), _polynomial(_SIN, square) * r
    quadrant = n.astype(np.int64) & 3
    is_odd = (quadrant & 1).astype(np.bool_)
    turned_cos = np.where(is_odd, sin, cos) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    turned_sin = np.where(is_odd, cos, sin) * np.where(quadrant >= 2, -1.0, 1.0)
    return turned_cos.astype(np.float32), turned_sin.astype(np.float32)


def _polynomial(coefficients: tuple[float, ...], x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    y = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = y * x + coefficient
    return y
