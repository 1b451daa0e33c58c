"""The scheduler's policies as small pure functions, each with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, Bools

F64 = npt.NDArray[np.float64]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def projected_peak(num_tokens: I64, remaining: I64, saved_blocks: I64, block_size: int) -> int:
    """The largest number of blocks that these sequences will hold together, if each ends after `remaining` more tokens.
    Sequences are sorted by `remaining`, longest first.

    The peak is reached in the last step of one of the sequences. When the k-th sequence ends, exactly the first k are
    still running, each as long as it has grown by then. Reserving every maximum at once would waste the pool; without
    a projection too much is admitted and preempted later. `saved_blocks` is the number of blocks that a sequence
    shares with an earlier one; that one outlives it and counts them.
    Source: the future-peak admission of LightLLM, with the blocks of each sequence counted exactly.
    """
    if not len(remaining):
        return 0
    growth = _growth(remaining)
    last = num_tokens - 1  # position of the newest token
    num_now = np.cumsum(last // block_size + 1 - saved_blocks)
    num_whole = np.arange(1, len(remaining) + 1) * (growth // block_size)
    num_more = count_within(block_size - last % block_size, growth % block_size, block_size)
    return int((num_now + num_whole + num_more).max())


def final_blocks(num_tokens: I64, remaining: I64, block_size: int) -> I64:
    """Number of blocks of each sequence when it has grown by `remaining` tokens, if it frees none before."""
    count: I64 = (num_tokens + _growth(remaining) + block_size - 1) // block_size
    return count


def _growth(remaining: I64) -> I64:
    """Number of tokens that still get KV: all remaining tokens except the last, which is never computed."""
    return np.maximum(remaining - 1, 0)


def count_within(values: I64, limits: I64, top: int) -> I64:
    """For each k, the number of the first k + 1 `values` that are at most `limits[k]`. Values are from 1 to `top`."""
    n = len(values)
    if n <= PART:
        few: I64 = ((values <= limits[:, None]) & EARLIER[:n, :n]).sum(axis=1)
        return few
    num_parts = -(-n // PART)
    v, k = np.full((2, num_parts, PART), top, dtype=np.int64)
    v.flat[:n], k.flat[:n] = values, limits
    parts = np.arange(num_parts)[:, None]
    width = top + 1
    histograms = np.bincount((parts * width + v).ravel(), minlength=num_parts * width).reshape(num_parts, width)
    up_to = histograms.cumsum(axis=1)  # [num_parts, limit]
    before = (up_to.cumsum(axis=0) - up_to)[parts, k]
    within = ((v[:, None, :] <= k[:, :, None]) & EARLIER).sum(axis=2)
    counts: I64 = (before + within).ravel()[:n]
    return counts


PART = 32  # values that are compared one by one; the values of earlier parts are counted by histograms
EARLIER = np.tri(PART, dtype=np.bool_)  # [k, i]: i is at most k


def expected_remaining(limit: I64, num_output: I64, may_stop: npt.NDArray[np.bool_], mean_output: float) -> I64:
    """Expected number of tokens still to generate. A sequence that cannot stop early reaches its limit. Others are
    expected to reach the mean output length or, once they are longer than half of it, twice their current output.
    """
    guess = np.maximum(mean_output - num_output, np.maximum(num_output, 16)).astype(np.int64)
    return np.where(may_stop, np.minimum(limit, guess), limit)


def placement_scores(expected_prefill: I64, uncached_tokens: I64, alpha: float) -> F64:
    """For each worker, its pending work plus the work that this request would add. Lower is better.

    Placing by the longest prefix alone would send all load to one worker when all requests share a block. Placing by
    load alone would compute every prefix on every worker. Added work counts more than pending work (`alpha` above 1),
    because blocks that are computed twice also evict other blocks.
    """
    return expected_prefill + alpha * uncached_tokens


LOAD_FRACTION = 0.1  # of the slack: how much higher the load of a worker that ties may be


def ties(score: Any, load: Any, best_score: float, best_load: float, slack: float) -> Any:
    """Whether a worker with this score and load, or each of several, ties with the best one: its score is within
    `slack`, and its load is hardly higher.

    Without the slack, a short prefix that all requests share would keep idle workers idle: they do not hold the prefix,
    so they would never get a request, while the other workers evict blocks. Little of the slack is for load: it
    depends on the length of the prompt, so it would let long prompts wait behind others.
    """
    return (score <= best_score + slack) & (load <= best_load + LOAD_FRACTION * slack)


def places_near_best(scores: F64, slack: float, load: I64, allowed: Bools) -> I64:
    """Positions of the allowed workers that tie with the one of the best score. At least one must be allowed."""
    if np.count_nonzero(allowed) < len(allowed):
        scores = np.where(allowed, scores, np.inf)
    best = scores.argmin()
    near: I64 = ties(scores, load, scores[best], load[best], slack).nonzero()[0]
    return near


def least_pressed(places: I64, pressure: F64) -> int:
    """The one of these positions whose pool is under the lowest pressure, which breaks ties."""
    return int(places[pressure[places].argmin()] if len(places) > 1 else places[0])


def virtual_arrival(arrival: float, uncached_tokens: int, aging_tokens_per_s: float) -> float:
    """Sort key of the queue: fewest tokens to compute first, with ageing.

    `uncached - aging * seconds waited` falls at the same rate for all sequences, so a constant key gives the same
    order: each uncached token counts as a later arrival. No sequence starves: one that arrives much later never
    overtakes it, however short it is. In overload this shortens the mean wait; without overload there is no queue.
    """
    return arrival + uncached_tokens / aging_tokens_per_s


def is_worth_leaving(extra_tokens: int, waited_s: float, tokens_per_s: float | None, fraction: float) -> bool:
    """Whether a request should leave its best worker, which has no room, for a worker where `extra_tokens` more tokens
    must be computed: only if computing them takes less than a fraction of the saved wait.

    The remaining wait is unknown, so the time waited so far is the estimate. Without extra tokens there is no reason
    to wait.
    """
    if extra_tokens <= 0 or tokens_per_s is None:
        return True
    return extra_tokens / tokens_per_s < fraction * waited_s


def is_queue_full(num_waiting: int, num_of_tenant: int, num_tenants: int, limit: int) -> bool:
    """A full queue refuses requests, except those of tenants below their fair share. One tenant that floods the queue
    therefore cannot block the others. The queue holds at most twice its limit.
    """
    if num_waiting < limit:
        return False
    return num_of_tenant * num_tenants >= limit or num_waiting >= 2 * limit


def first_token_wait_s(
    tokens_ahead: int, queue_tokens_per_s: float | None, own_tokens: int, prefill_tokens_per_s: float | None
) -> float:
    """Estimated seconds until the first token of a new request: the queue ahead of it, then its own prompt.

    The two rates differ: sequences in the queue also wait for rows and blocks, the request's own prompt only for the
    model. An unknown rate counts as no wait, so that an idle machine refuses no request because of a guess.
    """
    wait = tokens_ahead / queue_tokens_per_s if queue_tokens_per_s else 0.0
    return wait + (own_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0)


DEADLINE_FRACTION = 0.8


def is_too_late(first_token_wait: float, timeout_s: float) -> bool:
    """Whether a request should be refused instead of queued. A first token just before the deadline is useless, because
    the rest of the output needs time too, and rates vary. Work that is cancelled at its deadline delays other requests.
    """
    return first_token_wait > DEADLINE_FRACTION * timeout_s


def expected_tokens(num_known: int, remaining: int, num_samples: int, mean_output: float) -> int:
    """Expected final number of tokens of a waiting sequence and the samples that will fork from it: the known tokens
    and outputs of mean length. Counting max_tokens would fill the queue with tokens that are never generated.
    """
    return num_known + num_samples * min(remaining, int(mean_output))
