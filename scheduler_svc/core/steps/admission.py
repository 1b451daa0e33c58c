"""Whether a sequence fits on a worker: alone, and next to the running sequences once all of them have grown.

Blocks that sequences share (prefix hits and prompts of samples) count once.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.policy import expected_remaining, final_blocks, projected_peak
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.rows import RowTable
from step_protocol.columns import I64, U32


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
    stops = ~table.ignore_eos[rows] | table.has_stop_ids[rows]
    may_stop = np.concatenate((stops, [_may_stop(group)] * num_new))
    remaining = expected_remaining(limits, outputs, may_stop, mean_output)
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


def _may_stop(group: SequenceGroup) -> bool:
    """Whether sequences of the request may end before max_tokens. Those of a gang end together."""
    return not group.features.is_gang and (not group.stop.ignore_eos or bool(group.stop.stop_token_ids))


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
