"""A model of tile products in numpy, for bfloat16 as raw bits. See tiles.h for the arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U16, U32, F32, F64 = npt.NDArray[np.uint16], npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.float64]
GROUPS = 16
SMALLEST_NORMAL = 2.0**-126


@np.errstate(all="ignore")
def bfloat16_product(rows: U16, weights: U16, sums: F32) -> F32:
    """sums [16, 16] plus the product of rows [16, 32] and weights [16 groups, 16 columns, 2]."""
    x, w = _widen(rows).reshape(16, GROUPS, 2), _widen(weights)
    chains = np.zeros((2, 16, 16))
    for group in range(GROUPS):
        for odd in range(2):
            products = x[:, group, odd, None] * w[group, None, :, odd]  # exact
            chains[odd] = _rounded_sum(chains[odd], products)
    return _rounded_sum(_widen_flushed(sums), _rounded_sum(chains[0], chains[1])).astype(np.float32)


def bfloat16_linear(x: F32, weight: F32) -> F32:
    """x [n, in] times weight [out, in], both of bfloat16 values, as one chain of products per output: [n, out]."""
    n, out = len(x), len(weight)
    width = -(-x.shape[1] // 32) * 32
    rows, columns = _bits(x, -(-n // 16) * 16, width), _bits(weight, -(-out // 16) * 16, width)
    y = np.zeros((len(rows), len(columns)), np.float32)
    for r in range(0, len(rows), 16):
        for c in range(0, len(columns), 16):
            for i in range(0, width, 32):
                weights = columns[c : c + 16, i : i + 32].reshape(16, GROUPS, 2).swapaxes(0, 1)
                sums = y[r : r + 16, c : c + 16]
                y[r : r + 16, c : c + 16] = bfloat16_product(rows[r : r + 16, i : i + 32], weights, sums)
    return y[:n, :out]


def _bits(values: F32, rows: int, width: int) -> U16:
    padded = np.zeros((rows, width), np.float32)
    padded[: values.shape[0], : values.shape[1]] = values
    return (padded.view(np.uint32) >> 16).astype(np.uint16)


def _widen(bits: U16) -> F64:
    return _widen_flushed((bits.astype(np.uint32) << 16).view(np.float32))


def _widen_flushed(x: F32) -> F64:
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(0.0, x), x).astype(np.float64)


def _rounded_sum(a: F64, b: F64) -> F64:
    """a + b, rounded once to the nearest float32, ties to even; a result that is a denormal becomes 0."""
    total = to_odd(a, b)
    scaled = (total * 2.0**64).astype(np.float32)  # small results are normal here, so rounded to 24 bits
    small = np.where(np.abs(scaled) < 2.0**-62, np.copysign(0.0, total), scaled * 2.0**-64)
    return np.where(np.abs(total) < 2.0**-100, small, total.astype(np.float32)).astype(np.float64)


def to_odd(a: F64, b: F64) -> F64:
    """a + b in float64, rounded to odd: rounding that to float32 gives the same as rounding the exact sum."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)  # exact
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    step = np.where((error != 0) & (bits % 2 == 0) & np.isfinite(total), np.where(away, 1, -1), 0)
    return (bits + step).view(np.float64)
