"""Blocks that running sequences share: prefix hits and the prompts of samples."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.steps.rows import I64, U32, RowTable


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
