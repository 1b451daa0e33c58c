"""The noise of `engine/noise.py` on the device: exact in float64, and an approximation with an error bound."""

from __future__ import annotations

import triton
import triton.language as tl

# Bound of |approximate - exact|: the series is cut off at 1e-8, and the fast logarithm has an error of 2^-22.
APPROXIMATION_ERROR = 5e-5


@triton.jit
def philox_words(seed_low, seed_high, position, sample_index, first_id, BLOCK: tl.constexpr):
    """Random words of the ids [first_id, first_id + BLOCK). `first_id` is a multiple of 4: one call makes 4 words."""
    key = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    counter = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(
        key, counter, zero + position.to(tl.uint32, bitcast=True), zero + sample_index.to(tl.uint32, bitcast=True), zero
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def approximate_noise(word):
    """-log(-log1p(-u)) in float32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u without cancellation
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.03125, series, -tl.log(rest)))


@triton.jit
def exact_noise(word):
    """As specified: 1 - u has 33 bits, so a float64 holds it exactly and its logarithm is log1p(-u)."""
    rest = ((word ^ 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)
