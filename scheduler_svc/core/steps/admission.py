"""Whether a sequence fits on a worker: alone, and beside those that run there, once all of them have grown."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.policy import ceil_div, expected_remaining, final_blocks, projected_peak
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps.rows import I64, RowTable
from scheduler_svc.core.steps.sharing import shared_before


class Need(NamedTuple):
    """What a waiting sequence would bring along, as far as that decides whether it fits."""

    num_tokens: int  # that no running sequence shares
    num_left: int  # tokens to its limit
    priority: int  # the lower, the fewer rows it has to go beside
    num_output: int
    may_stop: bool  # before its limit
    has_forks: bool

    @classmethod
    def of(cls, seq: Sequence, num_tokens: int) -> Need:
        stop, num_output = seq.group.stop, len(seq.data.output)
        may_stop = not stop.ignore_eos or bool(stop.stop_token_ids)
        num_left = stop.max_tokens - num_output
        return cls(num_tokens, num_left, seq.group.priority, num_output, may_stop, bool(seq.forks))

    def is_covered_by(self, other: Need) -> bool:
        """Where this one finds no room, the other finds none either: it is alike, and brings as much or more.

        Forks bring what is left of their prompt's last block, which may be less for more tokens: no rule for them.
        """
        if self.has_forks:
            return False
        return self[3:] == other[3:] and all(mine <= theirs for mine, theirs in zip(self[:3], other[:3], strict=True))


def could_run(seq: Sequence, capacity: WorkerCapacity) -> bool:
    """The worker could run it if nobody else were there. False too for what was queued before any worker was known."""
    num_prompt, max_tokens = len(seq.group.prompt), seq.group.stop.max_tokens
    num_held = num_prompt + max(1, max_tokens) - 1  # the last token needs no KV
    return (
        num_prompt + max_tokens <= capacity.max_model_len
        and ceil_div(num_held, capacity.block_size) <= capacity.num_blocks
        and 1 + len(seq.forks) <= capacity.max_num_seqs
    )


def fits_beside(
    table: RowTable, pool: BlockManager, seq: Sequence, hits: I64, mean_output: float, max_blocks: int
) -> bool:
    """Rows of a worker, a newcomer and the samples that will fork off it will never hold more blocks together.

    `hits` are the cached blocks that the newcomer starts from. Rows that are less urgent do not count: they would make
    room. Alone it fits, or it would have been refused.
    """
    rows = table.active()
    rows = rows[table.priority[rows] <= seq.group.priority]
    if not len(rows):
        return True
    group, num_new = seq.group, 1 + len(seq.forks)
    tokens = np.concatenate((table.num_tokens[rows], [seq.data.num_tokens] * num_new))
    limit = len(group.prompt) + group.stop.max_tokens
    limits = np.concatenate((table.limit[rows], [limit] * num_new)) - tokens
    outputs = tokens - np.concatenate((table.prompt_len[rows], [len(group.prompt)] * num_new))
    stops = ~table.ignore_eos[rows] | table.has_stop_ids[rows]
    may_stop = np.concatenate((stops, [Need.of(seq, 0).may_stop] * num_new))
    remaining = expected_remaining(limits, outputs, may_stop, mean_output)
    num_saved = len(hits) - pool.num_unused(hits) + len(seq.forks) * (len(group.prompt) // table.block_size)
    num_opened = final_blocks(tokens, remaining, table.block_size) - int(table.num_blocks[rows].sum()) - num_saved
    if pool.num_used + num_opened + _num_copies(table, pool, rows) <= max_blocks:
        return True
    order = np.argsort(-remaining, kind="stable")
    shared_prompt = len(group.prompt) // table.block_size
    saved = np.append(shared_before(table, pool, rows, hits, order), [shared_prompt] * len(seq.forks))
    return projected_peak(tokens[order], remaining[order], saved[order], table.block_size) <= max_blocks


def _num_copies(table: RowTable, pool: BlockManager, rows: I64) -> int:
    """At least the blocks that rows will copy before they write: others share them too."""
    index = np.minimum(table.num_computed_tokens[rows] // table.block_size, table.num_blocks[rows] - 1)
    return int(np.count_nonzero(pool.refs[table.table[rows, index]] > 1))
