"""A step: its columns by kind of row, its plan (`StepPlan`), its message (`make_batch`), in flight (`InFlightStep`).

Making the columns advances the rows by the tokens of the step. Chunks of prompts are handled one by one: most steps
have one at most, and a numpy operation on one row takes longer than a few plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.inputs import MAX_INPUT_BYTES
from scheduler_svc.core.blocks.block_manager import Fill
from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.core.steps.decode_run import DecodeRun, Members
from scheduler_svc.core.steps.rows import RowTable
from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import EMPTY, StepBatch

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
    if table.num_private:
        full = full[~table.is_private[rows[full]]]
    table.num_computed_tokens[rows] = context_lens + 1
    table.num_planned[rows] = planned + (sample_mask & ~table.is_awaiting[rows] if table.num_awaiting else sample_mask)
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
        if samples[-1] and not table.is_awaiting[row]:
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


Column = npt.NDArray[Any]

NO_PAIRS = (EMPTY, EMPTY)


@dataclass(slots=True)
class StepPlan:
    """A step that is being planned. Each row is added at most once."""

    budget: int  # tokens that can still be added
    now: float
    joins_message: bool = False  # the step is sent in the message of the previous step
    run: Members | None = None  # its rows precede all other rows, and its table changes all others
    decodes: I64 | None = None  # other rows that compute one token; they precede the chunks
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, number of prompt tokens)
    opens: list[RowAssignment] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # (row, parent)
    tables: list[tuple[I64, I64, I64]] = field(default_factory=list)  # columns: row, index, block
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    fills: list[tuple[int, list[Fill]]] = field(default_factory=list)  # per row, the blocks that its chunk completes
    num_prompt_tokens: int = 0  # in chunks of several tokens
    num_bytes: int = 0  # data that opened rows carry
    has_part_work: bool = False  # a part of the worker computes something, even if no token is planned

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether the message of the step has room for data of this size. The data of the first row always fits."""
        return not self.num_bytes or self.num_bytes + num_bytes <= MAX_INPUT_BYTES


# Changes since the previous step that the next step carries: rows closed, blocks committed.
Changes = tuple[list[int], list[Fill]]


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent but not answered yet, with all data to check and apply its answer."""

    step_id: int
    rows: U32
    context_lens: U32
    query_lens: U32
    sampled: U32  # rows whose tokens the answer must contain, in this order
    full: I64  # indices of the decoding rows that fill a block (prompt chunks are in `fills`)
    run: Members | None  # its rows, if all of them are in the decode run
    may_reach_limit: bool
    fills: list[tuple[int, list[Fill]]]  # per row
    forks: list[tuple[int, int]]  # (row, parent)
    prompt_only: tuple[int, ...]  # rows with max_tokens 0 whose prompt this step completes
    is_full: bool  # the step uses the whole token budget
    burst_len: int = 1  # steps of the message that this step ends; 0: more steps follow in the message
    num_prompt_tokens: int = 0  # in chunks of several tokens
    has_awaiting: bool = False  # the scheduler chooses the tokens of some rows
    sent_at: float = 0.0
    closed: set[int] = field(default_factory=set)  # rows closed since the step was sent: their answers are ignored
    releases: list[I64] = field(default_factory=list)  # block tables of ended rows, freed when the step is answered


def make_batch(
    worker_id: str,
    plan: StepPlan,
    step: InFlightStep,
    sample_mask: Bools,
    slots: U32,
    changes: Changes,
) -> StepBatch:
    """The message of a step, without what the worker's parts add."""
    closed, commits = changes
    fork_rows, fork_parents = _columns(plan.forks) if plan.forks else NO_PAIRS
    copy_src, copy_dst = _columns(plan.copies) if plan.copies else NO_PAIRS
    table_rows, table_indices, table_blocks = _joined(plan.tables)
    return StepBatch(
        worker_id=worker_id,
        step_id=step.step_id,
        rows=step.rows,
        query_lens=step.query_lens,
        context_lens=step.context_lens,
        sample_mask=sample_mask,
        is_decode=step.run is not None,
        slot_mapping=slots,
        fork_rows=fork_rows,
        fork_parents=fork_parents,
        close_rows=np.array(closed, dtype=np.uint32) if closed else EMPTY,
        opens=plan.opens,
        table_rows=table_rows,
        table_indices=table_indices,
        table_blocks=table_blocks,
        copy_src=copy_src,
        copy_dst=copy_dst,
        commit_blocks=np.array([block for block, _ in commits], dtype=np.uint32) if commits else EMPTY,
        commit_digests=[digest for _, digest in commits] if commits else [],
        beam_rows=EMPTY,
        beam_parents=EMPTY,
        beam_tokens=EMPTY,
    )


def _columns(pairs: list[tuple[int, int]]) -> tuple[U32, U32]:
    first, second = np.array(pairs, dtype=np.uint32).T
    return first, second


def _joined(tables: list[tuple[I64, I64, I64]]) -> tuple[U32, U32, U32]:
    if not tables:
        return EMPTY, EMPTY, EMPTY
    rows, indices, blocks = tables[0] if len(tables) == 1 else map(np.concatenate, zip(*tables, strict=True))
    return rows.astype(np.uint32), indices.astype(np.uint32), blocks.astype(np.uint32)
