"""Attention windows: rows free the blocks that their next tokens do not attend to.

Only workers of models whose layers all have a window have a `Windows` (docs/adr/0054-blocks-behind-a-window.md).

    table   | freed | freed | held | held | held |      first_block = 2, num_blocks = 5

A row frees blocks only when it is about to take one: steps in which no row takes a block do nothing here. Blocks that
are committed can be allocated at once, because the steps that read them precede the steps that could write them again.
Other blocks are kept until the step that fills them is answered, which may commit them.

Freed blocks are the head of the row's prefix, but they are put back before its tail. When the row ends they are taken
back and freed once more behind the other blocks: a hit needs all blocks of a prefix, so a prefix without its head would
occupy the pool for nothing.

A prompt may be longer than the window, so a row gets the blocks of its prompt as it computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from scheduler_svc.core.block_manager import BlockManager, ceil_div
from scheduler_svc.core.rows import BlockTables, RowTable
from step_protocol.columns import I64


class Windows:
    """Frees and gives blocks of one worker's rows. `release` keeps blocks until the steps in flight are answered,
    `on_room` is called when more blocks have become free than the rows take.
    """

    def __init__(
        self, rows: RowTable, pool: BlockManager, release: Callable[[I64], None], on_room: Callable[[], None]
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._release = release
        self._on_room = on_room

    def free_unneeded(self, rows: I64) -> int:
        """Free the blocks that the next and later tokens of these rows do not attend to. Returns their number."""
        r = self._rows
        if r.blocks_before is None:
            return 0
        count = free_behind(r, self._pool, rows, r.num_computed_tokens[rows], self._release)
        if count > len(rows):  # else the rows take as many blocks as they free
            self._on_room()
        return count

    def take_back(self, row: int) -> I64:
        """Take back the blocks that a row has freed and that are still cached, the last one first."""
        r = self._rows
        cached = self._pool.match(r.digests[row], r.known_tokens(row), int(r.first_block[row]))
        self._pool.share(cached)
        return cached[::-1]

    def num_without_block(self, prefill: I64) -> int:
        """Number of rows with a part of their prompt left that have no block for its next token. Each of them needs one
        block at least.
        """
        r = self._rows
        waiting = prefill[r.num_computed_tokens[prefill] >= r.num_blocks[prefill] * r.block_size]
        self.free_unneeded(waiting)
        return len(waiting)

    def give_prompt_blocks(self, row: int, count: int, tables: list[tuple[I64, I64, I64]]) -> int:
        """Append the blocks for the next `count` tokens of a row's prompt to its table. Returns the number of tokens
        that have a block: fewer than `count` if the pool has too few. Leaves one block for each other row if it can.
        """
        r, bs = self._rows, self._rows.block_size
        start, num_blocks = int(r.num_computed_tokens[row]), int(r.num_blocks[row])
        num_missing = ceil_div(start + count, bs) - num_blocks
        if num_missing < 1:
            return count
        self.free_unneeded(np.array([row]))
        num_free = self._pool.num_free
        num_new = min(num_missing, max(num_free - r.num_used, min(1, num_free)))
        if num_new:
            indices, blocks = np.arange(num_blocks, num_blocks + num_new), self._pool.allocate(num_new)
            r.table[row, indices] = blocks
            r.num_blocks[row] += num_new
            tables.append((np.full(num_new, row), indices, blocks))
        return min(count, (num_blocks + num_new) * bs - start)


def free_behind(
    tables: BlockTables, pool: BlockManager, rows: I64, num_computed: I64, release: Callable[[I64], None]
) -> int:
    """Free the blocks of these rows that the tokens after their computed ones do not attend to. Returns their number.
    Blocks that are not committed are passed to `release`.
    """
    firsts, needed = tables.first_block[rows], num_computed // tables.block_size - (tables.blocks_before or 0)
    frees = needed > firsts
    if not np.count_nonzero(frees):
        return 0
    tables.first_block[rows] = np.maximum(firsts, needed)
    blocks = tables.entries(rows[frees], firsts[frees], needed[frees])
    for part in _without_repeats(blocks):
        is_committed = pool.are_committed(part)
        if np.count_nonzero(is_committed) < len(part):
            release(part[~is_committed])
            part = part[is_committed]
        pool.free(part)
    return len(blocks)


def _without_repeats(blocks: I64) -> Iterator[I64]:
    """The blocks in parts without repeats: several rows may free a shared block at once."""
    while len(set(blocks.tolist())) < len(blocks):
        _, places = np.unique(blocks, return_index=True)
        places.sort()
        yield blocks[places]
        blocks = np.delete(blocks, places)
    yield blocks
