"""A language model made of digests: a KV entry identifies its exact prefix, and the next token follows from it.

The prefix digest of position i is a 64-bit sum over mix(token_j, j) for j <= i, started at the request's root. It
depends on every token and its place, and it is cheap both one at a time and as a cumulative sum over a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

U64 = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
_TOKEN, _PLACE, _SEED, _SAMPLE, _ROOT = (
    0x9E3779B97F4A7C15,
    0xD1B54A32D192ED03,
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3,
)
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_N_TOKEN, _N_PLACE, _N_SEED, _N_SAMPLE = (np.uint64(c) for c in (_TOKEN, _PLACE, _SEED, _SAMPLE))
_N_MUL1, _N_MUL2 = np.uint64(_MUL1), np.uint64(_MUL2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix(x: int) -> int:
    """splitmix64's finalizer: one wrong bit anywhere changes half of the result."""
    x = ((x ^ (x >> 30)) * _MUL1) & MASK
    x = ((x ^ (x >> 27)) * _MUL2) & MASK
    return x ^ (x >> 31)


def mix_column(x: U64) -> U64:
    """`mix` for every element."""
    x = (x ^ (x >> _S30)) * _N_MUL1
    x = (x ^ (x >> _S27)) * _N_MUL2
    return x ^ (x >> _S31)


def root(root_key: bytes) -> int:
    """Digest of the empty prefix; another cache salt or adapter is another root."""
    return mix(int.from_bytes(root_key, "little") * _ROOT + 1 & MASK)


def number_of(state: int) -> float:
    """A number that float32 holds exactly."""
    return float(mix(state & MASK) >> 40)


def pooled_number(prompt: Sequence[int], root_key: bytes, kind: str) -> float:
    """The number of a prompt: of its last state, or for `mean` of the sum of all states."""
    states, state = [], root(root_key)
    for position, token in enumerate(prompt):
        state = (state + term(token, position)) & MASK
        states.append(state)
    return number_of(sum(states) if kind == "mean" else states[-1])


def key(root_key: bytes, adapter: bytes) -> bytes:
    """Inputs of KV besides tokens: the adapter itself, whatever the scheduler has put into the root key."""
    return xxh3_64_digest(root_key + adapter) if adapter else root_key


def term(token: int, position: int) -> int:
    """The contribution of one token to the prefix digest."""
    return mix((token * _TOKEN + (position + 1) * _PLACE) & MASK)


def term_column(tokens: U64, positions: U64) -> U64:
    """`term` for every element."""
    return mix_column(tokens * _N_TOKEN + (positions + np.uint64(1)) * _N_PLACE)


def next_token(digest: int, seed: int, sample_index: int, output_position: int, vocab_size: int) -> int:
    """The token that follows a prefix: a pure function, like logits plus counter-based noise."""
    noise = (seed * _SEED + (sample_index + 1) * _SAMPLE + (output_position + 1) * _PLACE) & MASK
    return mix(digest ^ mix(noise)) % vocab_size


def logprobs(digest: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Log probabilities of all tokens after a prefix, for beam search: [vocab_size], negative and hardly ever equal."""
    draws = mix_column(np.uint64(digest) ^ mix_column(np.arange(1, vocab_size + 1, dtype=np.uint64) * _N_TOKEN))
    return -(draws >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)


def best_candidates(digest: int, vocab_size: int, count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Ids and log probabilities of the most likely tokens, in falling order."""
    values = logprobs(digest, vocab_size)
    ids = np.argsort(-values, kind="stable")[:count]
    return ids.astype(np.uint32), values[ids]


def next_token_column(digests: U64, seeds: U64, samples: U64, positions: U64, vocab_size: int) -> U64:
    """`next_token` for every element."""
    one = np.uint64(1)
    noise = seeds * _N_SEED + (samples + one) * _N_SAMPLE + (positions + one) * _N_PLACE
    return mix_column(digests ^ mix_column(noise)) % np.uint64(vocab_size)
