"""The scheduler's choices as pure functions: each small, with its reason."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def projected_peak(num_tokens: I64, remaining: I64, saved_blocks: I64, block_size: int) -> int:
    """Most blocks that these sequences will ever hold together, if each ends after `remaining` more tokens. The longest
    `remaining` comes first.

    The peak is reached in the last step of one of them: in that of the k-th, exactly the first k are alive and each has
    grown as far as that one. Full reservation would count every maximum at once and waste the pool; no foresight admits
    too much and preempts. `saved_blocks` are shared with a sequence before it, which outlives it, and counted there.
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


def final_blocks(num_tokens: I64, remaining: I64, block_size: int) -> int:
    """Blocks of these sequences when each has grown by `remaining` tokens, if they share none."""
    return int(((num_tokens + _growth(remaining) + block_size - 1) // block_size).sum())


def _growth(remaining: I64) -> I64:
    """Tokens that still get KV after those known now: the last one that is sampled needs none."""
    return np.maximum(remaining - 1, 0)


def count_within(values: I64, limits: I64, top: int) -> I64:
    """For each k, how many of the first k + 1 `values` are at most `limits[k]`. Values are from 1 to `top`."""
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


PART = 32  # values compared one by one; those of earlier parts are counted by histograms
EARLIER = np.tri(PART, dtype=np.bool_)  # [k, i]: i is at most k


def expected_remaining(limit: I64, num_output: I64, may_stop: npt.NDArray[np.bool_], mean_output: float) -> I64:
    """Tokens still to come: known if a sequence cannot stop early, else the mean answer or as much again as so far."""
    guess = np.maximum(mean_output - num_output, np.maximum(num_output, 16)).astype(np.int64)
    return np.where(may_stop, np.minimum(limit, guess), limit)


def placement_scores(pending_prefill: I64, uncached_tokens: I64, alpha: float) -> F64:
    """Lower is better: the work that waits on each worker, and the work this request would add there.

    Longest prefix alone is a trap: one block that everybody shares would put all load on one worker. Load alone would
    compute everything everywhere. Own work counts more than what waits (`alpha` above 1), because what is computed
    twice also takes the room of something else that was cached.
    """
    return pending_prefill + alpha * uncached_tokens


def best_place(scores: F64, slack: float, pressure: F64, allowed: Bools) -> int:
    """Position of the best among the allowed (one at least). Scores within `slack` of it are as good; of these the
    pool wins of which least is in use and into which least was ever put, by its size: there least is lost.

    Without the slack a short prefix that everybody shares keeps idle workers idle for ever: they do not have it, so
    they never get it. The others' caches churn meanwhile, and a part of the memory is never used.
    """
    if np.count_nonzero(allowed) < len(allowed):
        scores = np.where(allowed, scores, np.inf)
    near = (scores <= scores[scores.argmin()] + slack).nonzero()[0]
    return int(near[pressure[near].argmin()] if len(near) > 1 else near[0])


def virtual_arrival(arrival: float, uncached_tokens: int, aging_tokens_per_s: float) -> float:
    """Who comes first: shortest work first, and waiting makes up for length.

    Ordering by `uncached - aging * seconds waited` would change all the time; but it changes equally fast for all, so
    the order is that of this constant: every uncached token counts like an arrival so much later. Nobody starves: who
    came late enough never passes, however short. In overload this divides the mean wait, otherwise nothing queues.
    """
    return arrival + uncached_tokens / aging_tokens_per_s


def is_worth_leaving(extra_tokens: int, waited_s: float, tokens_per_s: float | None, part: float) -> bool:
    """Whether a request should leave the worker that suits it best and has no room, for one where `extra_tokens` more
    must be computed: only if that costs less than a part of the wait it saves.

    How long the wait would still be, nobody knows; about as long as it has been is the guess that is never far wrong.
    Where nothing more has to be computed there is nothing to wait for.
    """
    if extra_tokens <= 0 or tokens_per_s is None:
        return True
    return extra_tokens / tokens_per_s < part * waited_s


def is_queue_full(num_waiting: int, num_of_tenant: int, num_tenants: int, limit: int) -> bool:
    """A full queue refuses, but not a tenant that holds less than its share of it: that would let one who floods the
    queue lock everybody else out. Shares can make it twice as long as its limit, never longer.
    """
    if num_waiting < limit:
        return False
    return num_of_tenant * num_tenants >= limit or num_waiting >= 2 * limit


def first_token_wait_s(
    tokens_ahead: int, queue_tokens_per_s: float | None, own_tokens: int, prefill_tokens_per_s: float | None
) -> float:
    """Seconds until a request that arrives now shows its first token: the line before it, then its own prompt.

    Two paces, because they differ: what leaves the queue waits for rows and blocks too, while the own prompt only waits
    for the model. An unknown pace counts as no wait: refusing on a guess would turn away what an idle machine could
    serve.
    """
    wait = tokens_ahead / queue_tokens_per_s if queue_tokens_per_s else 0.0
    return wait + (own_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0)


DEADLINE_PART = 0.8


def is_too_late(first_token_wait: float, timeout_s: float) -> bool:
    """Whether a request should be refused rather than started. A first token that comes just before the deadline helps
    nobody: the rest of the answer needs time too, and paces vary. What is started in vain delays those behind it.
    """
    return first_token_wait > DEADLINE_PART * timeout_s


def expected_tokens(num_known: int, remaining: int, num_samples: int, mean_output: float) -> int:
    """Tokens that a waiting sequence and the samples that will fork from it are expected to reach: the known tokens and
    answers of mean length. Counting max_tokens would fill the queue with tokens that are never generated.
    """
    return num_known + num_samples * min(remaining, int(mean_output))
