"""The scheduler's choices as pure functions: each small, with its reason."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def projected_peak(num_tokens: I64, remaining: I64, saved_blocks: I64, block_size: int) -> int:
    """Most blocks that these sequences will ever hold together, if each ends after `remaining` more tokens.

    The peak is reached just before one of them ends: when the one with the k-th longest rest ends, exactly the k
    longest are alive and each has grown by that rest. Full reservation would count every maximum at once and waste the
    pool; no foresight admits too much and preempts. `saved_blocks` are shared with others and counted there.
    Source: the future-peak admission of LightLLM, with block rounding.
    """
    order = np.argsort(-remaining, kind="stable")
    rest = remaining[order]
    alive = np.arange(1, len(rest) + 1)
    tokens = np.cumsum(num_tokens[order]) + alive * (rest + block_size - 1)
    return int((tokens // block_size - np.cumsum(saved_blocks[order])).max(initial=0))


def expected_remaining(limit: I64, num_output: I64, may_stop: npt.NDArray[np.bool_], mean_output: float) -> I64:
    """Tokens still to come: known if a sequence cannot stop early, else the mean answer or as much again as so far."""
    guess = np.maximum(mean_output - num_output, np.maximum(num_output, 16)).astype(np.int64)
    return np.where(may_stop, np.minimum(limit, guess), limit)


def placement_score(pending_prefill: int, uncached_tokens: int, alpha: float) -> float:
    """Lower is better: the work that waits on a worker, and the work this request would add there.

    Longest prefix alone is a trap: one block that everybody shares would put all load on one worker.
    """
    return pending_prefill + alpha * uncached_tokens
