"""The scheduler's policies as pure functions, each with its reason, and the measurements that they are given.

Order of this file: whether a sequence fits on a worker, alone and next to the running sequences once all of them have
grown; on which worker it should run; when it is its turn; which requests are refused; how fast the work proceeds.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from step_protocol.columns import I64, U32, Bools

F64 = npt.NDArray[np.float64]


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


def excess_blocks(
    table: RowTable,
    pool: BlockManager,
    seq: Sequence,
    hits: I64,
    num_forks: int,
    mean_output: float,
    max_blocks: int,
) -> int:
    """Number of blocks beyond `max_blocks` at the projected peak of the rows, a new sequence and `num_forks` samples
    that fork from it; 0 if they fit.

    `hits` are the cached blocks from which the new sequence starts. Rows that are less urgent than it do not count,
    because they would be preempted. A sequence that does not fit on an idle worker is never queued.
    """
    group, num_new = seq.group, 1 + num_forks
    limit = len(group.prompt) + group.stop.max_tokens
    if table.max_blocks + num_new * table.max_blocks_of(limit) <= max_blocks:
        return 0
    rows = table.active()
    rows = rows[table.priority[rows] <= seq.group.priority]
    if not len(rows):
        return 0
    tokens = np.concatenate((table.num_tokens[rows], [seq.data.num_tokens] * num_new))
    limits = np.concatenate((table.limit[rows], [limit] * num_new)) - tokens
    outputs = tokens - np.concatenate((table.prompt_len[rows], [len(group.prompt)] * num_new))
    stops = ~table.ignore_eos[rows] | table.may_end_anywhere[rows]
    stops = np.concatenate((stops, [may_stop(group)] * num_new))
    remaining = expected_remaining(limits, outputs, stops, mean_output)
    final, shared_prompt = final_blocks(tokens, remaining, table.block_size), len(group.prompt) // table.block_size
    if table.blocks_before is None:
        num_saved = len(hits) - pool.num_unused(hits) + num_forks * shared_prompt
        num_opened = int(final.sum()) - int(table.num_blocks[rows].sum()) - num_saved
        if pool.num_used + num_opened + _num_copies(table, pool, rows) <= max_blocks:
            return 0
    else:
        # A sequence that outgrows the window holds about the same number of blocks from then on. It counts with this
        # number from the start, and as if it shared none: it frees shared blocks before the others do.
        max_held = table.blocks_before + 1
        if np.minimum(final, max_held).sum() <= max_blocks:
            return 0
        stays = final <= max_held
        max_blocks -= max_held * int(np.count_nonzero(~stays))
        hits = hits if stays[-1] else hits[:0]
        rows, tokens, remaining = rows[stays[: len(rows)]], tokens[stays], remaining[stays]
    order = np.argsort(-remaining, kind="stable")
    saved = np.append(shared_before(table, pool, rows, hits, order), [shared_prompt] * num_forks)[: len(tokens)]
    return max(0, projected_peak(tokens[order], remaining[order], saved[order], table.block_size) - max_blocks)


def may_stop(group: SequenceGroup) -> bool:
    """Whether sequences of the request may end before max_tokens. Those of a gang end together."""
    return not group.features.is_gang and (not group.stop.ignore_eos or group.stop.may_end_anywhere)


def _num_copies(table: RowTable, pool: BlockManager, rows: I64) -> int:
    """Number of rows that will copy a shared block before they write to it (a lower bound)."""
    index = np.minimum(table.num_computed_tokens[rows] // table.block_size, table.num_blocks[rows] - 1)
    return int(np.count_nonzero(pool.refs[table.table[rows, index]] > 1))


def steps_to_retry(num_excess: int, num_growing: int, block_size: int) -> int:
    """Number of steps after which the projected peak may have fallen by `num_excess` blocks, if no running sequence
    ends.

    A decoding row grows as projected. A sequence that does not decode yet (the refused sequence, prompts in chunks;
    `num_growing` in all) falls one token per step behind its projection, so one block per `block_size` steps. The
    sequence may fit at any step of the last block, so it is retried four times per block.
    """
    num_whole = -(-num_excess // num_growing) - 1
    return num_whole * block_size + max(1, block_size // 4)


def shared_before(table: RowTable, pool: BlockManager, rows: I64, hits: I64, order: I64) -> I64:
    """For each row, and for a new sequence that starts from `hits`, the number of full blocks that an earlier sequence
    in `order` holds too.

    Shared blocks are a prefix of each table, and each holder of a block also holds every block before it. So a run of
    blocks with the same number of holders has the same holders, and one comparison counts the whole run:

        block          0    1    2    3    4
        row a          7    8    9   12   13
        row b          7    8    9   14
        row c          7    8   15
        num_holders    3    3    2    1    1     runs of a: [7, 8] with b and c, then [9] with b
    """
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    num_holders = pool.refs.astype(np.int64)
    if table.blocks_before is not None:  # rows that are not in `rows` may hold blocks without those before
        num_holders = table.num_holders(rows, pool.num_blocks)
    num_holders[hits] += 1
    saved = np.zeros(len(rows) + 1, dtype=np.int64)
    i = np.flatnonzero(num_holders[table.table[rows, 0]] > 1)
    full = table.num_full_blocks(rows[i])
    if len(hits):
        i, full = np.append(i, len(rows)), np.append(full, len(hits))
    start = np.zeros(len(i), dtype=np.int64)
    while len(i):
        blocks = _blocks_at(table, rows, hits, i, start)
        _, sample, group, size = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
        first = np.full(len(size), len(order))
        np.minimum.at(first, group, rank[i])
        length = np.zeros(len(size), dtype=np.int64)
        many = size > 1
        sample = sample[many]  # always a row, because the new sequence is last
        length[many] = _run_lengths(table.table, rows[i[sample]], start[sample], full[sample], num_holders)
        saved[i] += np.where(first[group] == rank[i], 0, length[group])
        start += length[group]
        remains = many[group] & (start < full)
        i, full, start = i[remains], full[remains], start[remains]
    return saved


def _blocks_at(table: RowTable, rows: I64, hits: I64, i: I64, start: I64) -> I64:
    """The block at index `start` of each row's table and, if `i` ends with the new sequence, of its hits."""
    is_row = i < len(rows)
    return np.append(table.table[rows[i[is_row]], start[is_row]], hits[start[~is_row]]).astype(np.int64)


def _run_lengths(tables: U32, rows: I64, start: I64, end: I64, num_holders: I64) -> I64:
    """For each row, the number of blocks from `start`, before `end`, up to the first with another number of holders."""
    index = start[:, None] + np.arange(int((end - start).max(initial=0)))
    holders = num_holders[tables[rows[:, None], np.minimum(index, tables.shape[1] - 1)]]
    lengths: I64 = ((holders == holders[:, :1]) & (index < end[:, None])).sum(axis=1)
    return lengths


def placement_scores(expected_prefill: I64, uncached_tokens: I64, alpha: float, num_delayed: I64 | int = 0) -> F64:
    """For each worker, its pending work plus the work that this request would add. Lower is better.

    Placing by the longest prefix alone would send all load to one worker when all requests share a block. Placing by
    load alone would compute every prefix on every worker. Added work counts more than pending work (`alpha` above 1),
    because blocks that are computed twice also evict other blocks. Each token also counts once for each of the streams
    (`num_delayed`) that it would delay.
    """
    return expected_prefill + (alpha + num_delayed) * uncached_tokens


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


def least_busy(places: I64, num_rows: I64, written: F64, slowness: F64) -> int:
    """The one of these positions where a row more costs least, which breaks ties: rows x time of a step. Where that is
    equal, the pool of which the smaller fraction was written lately, because it evicts older blocks.
    """
    return int(places[((num_rows[places] + 1 + written[places]) * slowness[places]).argmin()])


def slowness(times: F64) -> tuple[F64, F64]:
    """How much longer a decode step, and the prefill of a token, take on each worker than on the fastest one; 1 where
    that is unknown. `times` [2, num_workers]: seconds of a step and of a token; inf: unknown. The second factor is
    rounded down to a power of 2: less is noise, and a factor that follows noise would undo the ties of scores.
    """
    step, token = times / times.min(axis=1, keepdims=True, initial=1e9)  # not inf
    step = np.where(step < np.inf, step, 1.0)
    return step, np.exp2(np.floor(np.log2(np.where(token < np.inf, token, step))))


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


def late_by_s(first_token_wait: float, output_s: float, timeout_s: float) -> float:
    """By how many seconds a request is too late to be queued; 0 or less: it is not. The whole output must come before
    the deadline, and the first token well before it, because rates vary. Work that is cancelled at its deadline delays
    other requests.
    """
    return first_token_wait - min(DEADLINE_FRACTION * timeout_s, timeout_s - output_s)


def sure_output(group: SequenceGroup, mean_output: float | None) -> int:
    """Number of tokens that are still to generate per sample, as far as that is known. It refuses requests, so samples
    that may end early count as nothing before their mean length is measured.
    """
    limit = group.stop.max_tokens - max(map(len, group.outputs), default=0)
    return limit if not may_stop(group) else min(limit, int(mean_output or 0))


def expected_tokens(num_known: int, remaining: int, num_samples: int, mean_output: float) -> int:
    """Expected final number of tokens of a waiting sequence and the samples that will fork from it: the known tokens
    and outputs of mean length. Counting max_tokens would fill the queue with tokens that are never generated.
    """
    return num_known + num_samples * min(remaining, int(mean_output))


class Rate:
    """Rate per second of busy time, weighted towards the last `HORIZON_S`. Unknown in the first `MIN_BUSY_S`."""

    HORIZON_S = 10.0
    MIN_BUSY_S = 1.0

    def __init__(self) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        self._seen_s = 0.0

    def add(self, amount: float, busy_s: float) -> None:
        """Record an amount of work done in `busy_s` seconds of busy time."""
        keep = math.exp(-busy_s / self.HORIZON_S)
        self._amount = self._amount * keep + amount
        self._busy_s = self._busy_s * keep + busy_s
        self._seen_s += busy_s

    @property
    def per_s(self) -> float | None:
        """The rate; None while it is unknown."""
        return self.early_per_s if self._seen_s >= self.MIN_BUSY_S else None

    @property
    def early_per_s(self) -> float | None:
        """The rate as soon as there is one, where a wrong estimate refuses nothing."""
        return self._amount / self._busy_s if self._amount > 0 and self._busy_s > 0 else None


class Throughput:
    """Running measurements. The core uses them to estimate the wait and the output length of a new request."""

    MEAN_OUTPUT_WEIGHT = 0.05  # weight of the newest answer in the running mean

    def __init__(self, expected_output_tokens: int) -> None:
        self.mean_output = float(expected_output_tokens)  # tokens of answers that ended before max_tokens
        self.measured_output: float | None = None  # the same without an initial estimate; None: unknown
        self.queue = Rate()  # tokens that leave the queue
        self.prefill = Rate()  # prompt tokens that one worker computes
        self._num_admitted_tokens = 0  # since the last `observe_queue`
        self._waited_since: float | None = None  # time of the last `observe_queue`, if sequences waited then

    def add_output(self, num_tokens: int) -> None:
        """Record the length of an answer that ended before max_tokens."""
        self.mean_output += self.MEAN_OUTPUT_WEIGHT * (num_tokens - self.mean_output)
        known = num_tokens if self.measured_output is None else self.measured_output
        self.measured_output = known + self.MEAN_OUTPUT_WEIGHT * (num_tokens - known)

    def add_admitted(self, num_tokens: int) -> None:
        """Record prompt tokens that left the queue."""
        self._num_admitted_tokens += num_tokens

    def observe_queue(self, now: float, *, is_served: bool) -> None:
        """Record how fast the queue moved since the last call, if `is_served` was true in that call."""
        if self._waited_since is not None:
            self.queue.add(self._num_admitted_tokens, now - self._waited_since)
        self._num_admitted_tokens = 0
        self._waited_since = now if is_served else None


class TierKind(Enum):
    """Where a worker keeps blocks outside its pool."""

    MEMORY = "memory"
    DISK = "disk"


class MoveSpeed:
    """How fast blocks come from one place to one worker: a time per move and a time per block, as measured.

    A measurement corrects both, each by its share of the estimate: short moves say what a move costs, long ones what a
    block costs. An estimate that is too high would never be measured again, so each sequence that moves nothing brings
    it a little closer to the first guess.
    """

    GUESS_MOVE_S = 0.005  # two messages and the start of a read
    GUESS_BLOCK_S = 0.0002  # besides its bytes
    GUESS_BYTES_PER_S = 500e6
    GUESS_MEMORY_BYTES_PER_S = 4e9
    WEIGHT = 0.3  # of the newest move
    RETURN = 0.002  # of the distance to the guess

    def __init__(self, block_bytes: int, bytes_per_s: float = GUESS_BYTES_PER_S) -> None:
        self._guess = self.GUESS_MOVE_S, self.GUESS_BLOCK_S + block_bytes / bytes_per_s
        self.move_s, self.block_s = self._guess

    def seconds(self, num_blocks: float) -> float:
        """Expected duration of a move."""
        return self.move_s + num_blocks * self.block_s

    def add(self, num_blocks: float, took_s: float) -> None:
        """Record a move."""
        if num_blocks:
            factor = 1 + self.WEIGHT * (took_s / self.seconds(num_blocks) - 1)
            in_blocks = num_blocks * self.block_s / self.seconds(num_blocks)
            self.move_s *= 1 + (factor - 1) * (1 - in_blocks)
            self.block_s *= 1 + (factor - 1) * in_blocks

    def add_unmoved(self) -> None:
        """Record that a sequence moved nothing."""
        self.move_s += self.RETURN * min(0.0, self._guess[0] - self.move_s)
        self.block_s += self.RETURN * min(0.0, self._guess[1] - self.block_s)


def moved_tokens_gain(num_tokens: int, move_s: float, tokens_per_s: float | None) -> int:
    """The gain of moving the KV of tokens instead of computing it, as tokens that are computed in the time saved. 0 or
    less: compute. `tokens_per_s`: the pace of prefill; while it is unknown, blocks are moved.
    """
    return num_tokens if tokens_per_s is None else num_tokens - math.ceil(move_s * tokens_per_s)
