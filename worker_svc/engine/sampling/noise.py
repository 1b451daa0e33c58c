"""The specification of sampling, as a numpy reference. docs/adr/0004-sampling-without-state.md gives the reasons.

Random words: Philox4x32-10 with key = (seed low, seed high) and counter = (v >> 2, output position, sample index, 0);
vocabulary id v takes word v & 3. With u = (word + 0.5) / 2^32 in double, its noise is g = float32(-log(-log1p(-u))),
and the token is the argmax of float32(z) + g over the ids that were kept, ties to the lowest id.

The logits are those of the model, after processing (processors.py) for rows that ask for it.
z = logits / temperature in float32, and an id weighs floor(exp(z - max(z)) * 2^40 + 0.5), an integer, so that the order
of sums does not matter. An id is kept when z passes, in this order,
  min_p:  z >= max(z) + float32(log(min_p));
  top_a:  z >= max(z) + float32(log(top_a * 2^40 / W)), which is p >= top_a * max(p)^2;
  top_k:  z >= the k-th largest;
  top_p:  z >= t, for the largest t whose ids weigh ceil(top_p * W) or more,
where W is the weight of the ids that the filters before have kept.
Equal values are kept or dropped together. Below a temperature of 1e-5 the token is the argmax of the logits, ties to
the lowest id, without noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from request_fields.fields import SamplingParams
from step_protocol.columns import F32, U32

U64 = npt.NDArray[np.uint64]

GREEDY_BELOW = 1e-5  # temperature
MAX_NOISE = 22.9  # above the maximum, 22.873
MASS_UNIT = 2.0**40

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox_words(counter: tuple[U32, int, int, int], key: tuple[int, int]) -> tuple[U64, U64, U64, U64]:
    """Philox4x32-10 for an array of first counter words and constant others. Words come as uint64 below 2^32."""
    c0 = counter[0].astype(np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel_noise(seed: int, position: int, sample_index: int, ids: U32) -> F32:
    """Noise of vocabulary ids at one output position of one sample. float32, the shape of `ids`."""
    words = philox_words((ids >> np.uint32(2), position, sample_index, 0), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.choose((ids & np.uint32(3)).astype(np.intp), words)
    u = (word.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-u))).astype(np.float32)


def log_of(min_p: float) -> np.float32:
    """The logarithm of min_p; -inf if it is off."""
    return np.float32(np.log(np.float64(np.float32(min_p)))) if min_p > 0 else np.float32(-np.inf)


def keep_threshold(z: F32, params: SamplingParams, log_min_p: np.float32 | None = None) -> np.float32:
    """The smallest z [vocab] that the filters keep; -inf if they are off. `log_min_p`: in place of that of `params`."""
    top = z.max()
    lowest = np.float32(top + (log_of(params.min_p) if log_min_p is None else log_min_p))
    kept = np.sort(z[z >= lowest])[::-1]
    if params.top_a > 0:
        least = np.float64(np.float32(params.top_a)) * MASS_UNIT / np.float64(_weights(kept, top).sum())
        lowest = max(lowest, np.float32(top + np.float32(np.log(least))))
        kept = kept[kept >= lowest]
    if 0 < params.top_k < len(kept):
        lowest = kept[params.top_k - 1]
        kept = kept[kept >= lowest]
    top_p = np.float32(params.top_p)
    if top_p >= 1:
        return lowest
    total = np.cumsum(_weights(kept, top))
    need = max(int(np.ceil(np.float64(top_p) * np.float64(total[-1]))), 1)
    threshold: np.float32 = kept[np.searchsorted(total, need)]
    return threshold


def _weights(z: F32, top: np.float32) -> npt.NDArray[np.int64]:
    return np.floor(np.exp(z.astype(np.float64) - np.float64(top)) * MASS_UNIT + 0.5).astype(np.int64)


def sample_token(logits: F32, params: SamplingParams, sample_index: int, position: int) -> int | None:
    """The sampled token for logits [vocab] at an output position; None for NaN, +inf or no finite number."""
    if not has_token(logits):
        return None
    if np.float32(params.temperature) < np.float32(GREEDY_BELOW):  # float32, as in the protocol and the kernels
        return int(logits.argmax())
    z = logits / np.float32(params.temperature)
    return pick_token(z, keep_threshold(z, params), params.seed, sample_index, position)


def filtered(logits: F32, params: SamplingParams) -> F32:
    """z [vocab] of the distribution from which `sample_token` draws, minus infinity for ids that it cannot return. NaN
    if there is no token."""
    if not has_token(logits):
        return np.full_like(logits, np.nan)
    if np.float32(params.temperature) < np.float32(GREEDY_BELOW):
        only = np.full_like(logits, -np.inf)
        only[logits.argmax()] = 0
        return only
    z = logits / np.float32(params.temperature)
    return np.where(z >= keep_threshold(z, params), z, np.float32(-np.inf))


def has_token(logits: F32) -> bool:
    """Whether a token can be sampled: no NaN, no +inf, and some finite number."""
    return not (np.isnan(logits).any() or (logits == np.inf).any()) and bool(np.isfinite(logits).any())


def pick_token(z: F32, lowest: np.float32, seed: int, sample_index: int, position: int) -> int:
    """The id with the largest z + noise among those from `lowest` on."""
    ids = np.flatnonzero(z >= max(lowest, z.max() - np.float32(2 * MAX_NOISE))).astype(np.uint32)
    return int(ids[(z[ids] + gumbel_noise(seed, position, sample_index, ids)).argmax()])
