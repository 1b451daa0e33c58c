"""The columns of a step, by kind of row: the decode run, other decoding rows, and chunks of prompts.

Making them advances the rows by the tokens of the step. Chunks are handled one by one: most steps have one at most, and
a numpy operation on one row takes longer than a few plain numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import EMPTY
from scheduler_svc.core.steps.decode_run import DecodeRun, Members
from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

NO_ROWS: I64 = np.empty(0, dtype=np.int64)


class Columns(NamedTuple):
    """Some rows of a step."""

    rows: U32  # [N]
    query_lens: U32  # [N]
    context_lens: U32  # [N]
    sample_mask: Bools  # [N]
    slots: U32  # [sum(query_lens)]
    full: I64 = NO_ROWS  # indices of the decoding rows that fill a block
    prompt_only: tuple[int, ...] = ()  # rows with max_tokens 0 whose prompt the step completes
    may_reach_limit: bool = False
    continues: bool = True  # some row has a token to compute in the next step, even before an answer


NO_COLUMNS = Columns(EMPTY, EMPTY, EMPTY, np.empty(0, dtype=np.bool_), EMPTY, continues=False)


def columns_of_run(table: RowTable, run: DecodeRun, members: Members, new_blocks: I64 | None) -> Columns:
    """Advance the decode run. `new_blocks` has a block for each row whose previous block is full."""
    context_lens, slots = run.advance(members, new_blocks)
    ones, trues = table.ones[: len(members.rows)], table.trues[: len(members.rows)]
    return Columns(members.sent_rows, ones, context_lens, trues, slots, run.full, may_reach_limit=not run.steps_left)


def columns_of_decodes(table: RowTable, rows: I64) -> Columns:
    """Advance rows that compute one token each and are not in the run."""
    context_lens, planned = table.num_computed_tokens[rows], table.num_planned[rows]
    left, reaches_end = table.limit[rows] - planned, context_lens + 1 == planned
    sample_mask = reaches_end & (left > 0)
    slots, full = table.slots(rows, context_lens), table.fills_block(context_lens)
    if table.num_pooled:
        full = full[~table.is_pooled[rows[full]]]
    table.num_computed_tokens[rows] = context_lens + 1
    table.num_planned[rows] = planned + (sample_mask & ~table.is_beam[rows] if table.num_beams else sample_mask)
    return Columns(
        rows.astype(np.uint32),
        table.ones[: len(rows)],
        context_lens.astype(np.uint32),
        sample_mask,
        slots,
        full,
        tuple(rows[reaches_end & ~sample_mask].tolist()),
        may_reach_limit=bool(np.count_nonzero(left <= 1)),
        continues=bool(np.count_nonzero((left > 1) | ~reaches_end)),
    )


def with_chunks(table: RowTable, head: Columns, chunks: list[tuple[int, int]]) -> Columns:
    """Advance rows by chunks of their prompts: pairs of a row and its number of tokens. Returns the columns of `head`,
    followed by those of these rows.
    """
    starts, samples, slots, prompt_only = [], [], [head.slots] if len(head.slots) else [], []
    may_reach_limit, continues = head.may_reach_limit, head.continues
    for row, count in chunks:
        start, planned = table.num_computed_tokens.item(row), table.num_planned.item(row)
        left, reaches_end = table.limit.item(row) - planned, start + count == planned
        starts.append(start)
        samples.append(reaches_end and left > 0)
        slots.append(table.chunk_slots(row, start, count))
        table.num_computed_tokens[row] = start + count
        if samples[-1] and not table.is_beam[row]:
            table.num_planned[row] = planned + 1
        elif reaches_end and left <= 0:
            prompt_only.append(row)
        may_reach_limit |= left <= 1
        continues |= left > 1 or not reaches_end
    return Columns(
        _extended(head.rows, [row for row, _ in chunks]),
        _extended(head.query_lens, [count for _, count in chunks]),
        _extended(head.context_lens, starts),
        _extended(head.sample_mask, samples),
        np.concatenate(slots) if len(slots) > 1 else slots[0],
        head.full,
        (*head.prompt_only, *prompt_only),
        may_reach_limit,
        continues,
    )


def _extended(column: npt.NDArray[Any], values: list[int] | list[bool]) -> npt.NDArray[Any]:
    """The column with these values at its end."""
    size = len(column)
    if not size:
        return np.array(values, dtype=column.dtype)
    extended = np.empty(size + len(values), dtype=column.dtype)
    extended[:size] = column
    extended[size:] = values
    return extended


def concatenated(first: Columns, second: Columns) -> Columns:
    """The columns of all rows, in this order. Indices in `full` count from the first row."""
    return Columns(
        np.concatenate((first.rows, second.rows)),
        np.concatenate((first.query_lens, second.query_lens)),
        np.concatenate((first.context_lens, second.context_lens)),
        np.concatenate((first.sample_mask, second.sample_mask)),
        np.concatenate((first.slots, second.slots)),
        np.concatenate((first.full, second.full + len(first.rows))),
        first.prompt_only + second.prompt_only,
        first.may_reach_limit or second.may_reach_limit,
        first.continues or second.continues,
    )
