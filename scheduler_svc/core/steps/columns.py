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

    rows: I64  # [N]
    query_lens: U32  # [N]
    context_lens: U32  # [N]
    sample_mask: Bools  # [N]
    slots: U32  # [sum(query_lens)]
    full: I64 = NO_ROWS  # indices of the decoding rows that fill a block
    prompt_only: tuple[int, ...] = ()  # rows with max_tokens 0 whose prompt the step completes
    may_reach_limit: bool = False
    continues: bool = True  # some row has a token to compute in the next step, even before an answer


def columns_of_run(table: RowTable, run: DecodeRun, members: Members, new_blocks: I64 | None) -> Columns:
    """Advance the decode run. `new_blocks` has a block for each row whose previous block is full."""
    context_lens, slots = run.advance(members, new_blocks)
    ones, trues = table.ones[: len(members.rows)], table.trues[: len(members.rows)]
    return Columns(members.rows, ones, context_lens, trues, slots, run.full, may_reach_limit=not run.steps_left)


def columns_of_decodes(table: RowTable, rows: I64) -> Columns:
    """Advance rows that compute one token each and are not in the run."""
    context_lens, pending = table.num_computed_tokens[rows], table.pending[rows]
    known = table.num_tokens[rows] + pending
    left, reaches_end = table.limit[rows] - known, context_lens + 1 == known
    sample_mask = reaches_end & (left > 0)
    slots, full = table.slots(rows, context_lens), table.fills_block(context_lens)
    if table.num_pooled:
        full = full[~table.is_pooled[rows[full]]]
    table.num_computed_tokens[rows] = context_lens + 1
    table.pending[rows] = pending + (sample_mask & ~table.is_beam[rows] if table.num_beams else sample_mask)
    return Columns(
        rows,
        table.ones[: len(rows)],
        context_lens.astype(np.uint32),
        sample_mask,
        slots,
        full,
        tuple(rows[reaches_end & ~sample_mask].tolist()),
        may_reach_limit=bool(np.count_nonzero(left <= 1)),
        continues=bool(np.count_nonzero((left > 1) | ~reaches_end)),
    )


def columns_of_chunks(table: RowTable, chunks: list[tuple[int, int]]) -> Columns:
    """Advance rows by chunks of their prompts: pairs of a row and its number of tokens."""
    rows, counts = zip(*chunks, strict=True) if chunks else ((), ())
    starts, samples, slots, prompt_only = [], [], [], []
    may_reach_limit = continues = False
    for row, count in chunks:
        start, known = int(table.num_computed_tokens[row]), int(table.num_tokens[row] + table.pending[row])
        left, reaches_end = int(table.limit[row]) - known, start + count == known
        starts.append(start)
        samples.append(reaches_end and left > 0)
        slots.append(table.chunk_slots(row, start, count))
        table.num_computed_tokens[row] = start + count
        if samples[-1] and not table.is_beam[row]:
            table.pending[row] += 1
        elif reaches_end and left <= 0:
            prompt_only.append(row)
        may_reach_limit |= left <= 1
        continues |= left > 1 or not reaches_end
    return Columns(
        np.array(rows, dtype=np.int64),
        np.array(counts, dtype=np.uint32),
        np.array(starts, dtype=np.uint32),
        np.array(samples, dtype=np.bool_),
        _joined(slots or [EMPTY]),
        prompt_only=tuple(prompt_only),
        may_reach_limit=may_reach_limit,
        continues=continues,
    )


def all_columns(parts: list[Columns]) -> Columns:
    """The columns of all rows, in this order. Indices in `full` count from the first row."""
    rows, query_lens, context_lens, sample_mask, slots, _, prompt_only, limits, continues = zip(*parts, strict=True)
    full, num_rows = list[I64](), 0
    for part in parts:
        if len(part.full):
            full.append(part.full + num_rows)
        num_rows += len(part.rows)
    return Columns(
        np.concatenate(rows),
        np.concatenate(query_lens),
        np.concatenate(context_lens),
        np.concatenate(sample_mask),
        np.concatenate(slots),
        _joined(full or [NO_ROWS]),
        sum(prompt_only, ()),
        may_reach_limit=True in limits,
        continues=True in continues,
    )


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The arrays in one, without a copy if there is only one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
