"""The noise of `engine/noise.py` on the device: exact in float64, and an approximation with an error bound."""

from __future__ import annotations

from worker_svc.engine.gpu.kernels.language import tl, triton

# Bound of |approximate - exact|: the series is cut off at 1e-8, and the fast logarithm has an error of 2^-22.
APPROXIMATION_ERROR = 5e-5
IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter runs no instructions of a GPU
LOG_2 = tl.constexpr(0.6931471805599453)


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
def _fast_log(x):
    """The natural logarithm. On a GPU it is one instruction instead of 20. It has an error of 2^-22 in the logarithm to
    base 2: absolute between 0.5 and 2, else relative."""
    if IS_COMPILED:
        instruction: tl.constexpr = "lg2.approx.f32 $0, $1;"
        result = LOG_2 * tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        result = tl.log(x)
    return result


@triton.jit
def approximate_noise(word):
    """-log(-log1p(-u)) in float32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u without cancellation
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return -_fast_log(tl.where(u < 0.03125, series, -_fast_log(rest)))


@triton.jit
def exact_noise(word):
    """As specified: 1 - u has 33 bits, so a float64 holds it exactly and its logarithm is log1p(-u)."""
    rest = ((word ^ 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)
