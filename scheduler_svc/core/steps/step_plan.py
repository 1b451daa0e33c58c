"""A step while it is planned (`StepPlan`), sent (`make_batch`) and in flight (`InFlightStep`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.inputs import MAX_INPUT_BYTES
from scheduler_svc.core.blocks.block_manager import Fill
from scheduler_svc.core.messages import EMPTY, ImageWork, RowOpen, StepBatch
from scheduler_svc.core.steps.decode_run import Members

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
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
    opens: list[RowOpen] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # (row, parent)
    tables: list[tuple[I64, I64, I64]] = field(default_factory=list)  # columns: row, index, block
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    fills: list[tuple[int, list[Fill]]] = field(default_factory=list)  # per row, the blocks that its chunk completes
    num_prompt_tokens: int = 0  # in chunks of several tokens
    num_input_bytes: int = 0  # data of the inputs of opened rows
    images: list[ImageWork] = field(default_factory=list)

    def has_room_for(self, num_input_bytes: int) -> bool:
        """Whether the message of the step has room for inputs of this size. The inputs of the first row always fit."""
        return not self.num_input_bytes or self.num_input_bytes + num_input_bytes <= MAX_INPUT_BYTES


class BeamMoves(NamedTuple):
    """New tokens and tables of beams, for the next step."""

    rows: U32
    parents: U32
    token_ids: U32
    tables: list[tuple[I64, I64, I64]]  # columns: row, index, block


# Changes since the previous step that the next step carries: rows closed, blocks committed, beams moved.
Changes = tuple[list[int], list[Fill], BeamMoves | None]


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
    has_beams: bool = False  # some of the rows are beams
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
    """The message of a step."""
    closed, commits, moves = changes
    fork_rows, fork_parents = _columns(plan.forks) if plan.forks else NO_PAIRS
    copy_src, copy_dst = _columns(plan.copies) if plan.copies else NO_PAIRS
    if moves is not None:
        plan.tables[:0] = moves.tables
    table_rows, table_indices, table_blocks = _joined(plan.tables)
    if moves is not None:
        table_rows, table_indices, table_blocks = newest_of_each(table_rows, table_indices, table_blocks)
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
        beam_rows=EMPTY if moves is None else moves.rows,
        beam_parents=EMPTY if moves is None else moves.parents,
        beam_tokens=EMPTY if moves is None else moves.token_ids,
        images=plan.images,
    )


def _columns(pairs: list[tuple[int, int]]) -> tuple[U32, U32]:
    first, second = np.array(pairs, dtype=np.uint32).T
    return first, second


def _joined(tables: list[tuple[I64, I64, I64]]) -> tuple[U32, U32, U32]:
    if not tables:
        return EMPTY, EMPTY, EMPTY
    rows, indices, blocks = tables[0] if len(tables) == 1 else map(np.concatenate, zip(*tables, strict=True))
    return rows.astype(np.uint32), indices.astype(np.uint32), blocks.astype(np.uint32)


def newest_of_each(rows: U32, indices: U32, blocks: U32) -> tuple[U32, U32, U32]:
    """The last change of each table entry. In one step, a beam may get a shared block and then a copy of this block in
    the same entry.
    """
    entries = rows.astype(np.int64) << 32 | indices
    _, newest = np.unique(entries[::-1], return_index=True)
    kept = np.sort(len(entries) - 1 - newest)
    return rows[kept], indices[kept], blocks[kept]
