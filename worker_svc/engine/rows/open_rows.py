"""The persistent batch: the state of every open row, kept in columns and updated by deltas.

Row r owns element r of each array. Only opens and closes are handled one by one; everything else is done for all rows
of a step at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from request_fields.checks import check_sampling
from request_fields.fields import SAMPLER_FIELDS, FieldError, Kind
from step_protocol.columns import I32, I64, U32, Bools
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.backend import SamplingColumns
from worker_svc.engine.row_part import BlockPart, RowPart, having, hooks
from worker_svc.engine.sampling.processors import ProcessedRows, ProcessorTable
from worker_svc.engine.step import RowErrors

NO_BLOCK = -1
COLUMN_TYPES = {Kind.FLOAT: np.float32, Kind.UINT32: np.uint32, Kind.UINT64: np.uint64}


def sampling_columns(num_rows: int) -> dict[str, npt.NDArray[Any]]:
    """One column per sampling parameter, by name, plus `sample_index`."""
    columns = {name: np.zeros(num_rows, COLUMN_TYPES[field.kind]) for name, field in SAMPLER_FIELDS.items()}
    return columns | {"sample_index": np.zeros(num_rows, np.uint32)}


class OpenRows:
    """Token history, block table and sampling parameters of up to max_num_seqs rows. Everything else of a row belongs
    to a part (row_part.py)."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self.block_size, self.num_blocks, self.vocab_size = block_size, num_blocks, vocab_size
        max_blocks = -(-max_model_len // block_size)
        self.is_open = np.zeros(max_num_seqs, np.bool_)
        self.tables: I32 = np.full((max_num_seqs, max_blocks), NO_BLOCK, np.int32)
        self.table_lens: I64 = np.zeros(max_num_seqs, np.int64)
        self.tokens: U32 = np.zeros((max_num_seqs, max_model_len + 1), np.uint32)
        self.num_tokens: I64 = np.zeros(max_num_seqs, np.int64)
        self.prompt_lens: I64 = np.zeros(max_num_seqs, np.int64)
        self._num_computed: I64 = np.zeros(max_num_seqs, np.int64)
        self._sampling = sampling_columns(max_num_seqs)
        self._generations: I64 = np.zeros(max_num_seqs, np.int64)  # changes with each new history of a row
        self._nth_in_batch: I64 = np.zeros(max_num_seqs, np.int64)  # valid for rows that were just written
        self._indices: I64 = np.arange(max_num_seqs)
        self.processing = ProcessorTable(self.tokens, vocab_size)
        self._parts: list[RowPart] = []
        self.add_parts(self.processing)

    def add_parts(self, *parts: RowPart) -> None:
        """Adds parts behind those that the rows have. No row is open."""
        self._parts += parts
        self._opening, self._refusing = having(self._parts, RowPart.open), having(self._parts, RowPart.refusal)
        self._closing, self._resets = having(self._parts, RowPart.close), hooks(self._parts, RowPart.reset)
        self._moves = hooks(self._parts, RowPart.move)
        self._checking = having(self._parts, RowPart.are_bad)
        self.checks = hooks(self._parts, RowPart.check)
        self.block_parts = [part for part in self._parts if isinstance(part, BlockPart)]
        self._change_tables = hooks(self.block_parts, BlockPart.change_tables)

    def rows_used(self) -> int:
        return int(self.is_open.sum())

    def reset(self) -> None:
        """Closes all rows."""
        self.is_open[:] = False
        for reset in self._resets:
            reset()

    def close(self, rows: U32) -> None:
        """Closes rows; a closed row stays closed."""
        self.is_open[rows[rows < self.max_num_seqs]] = False
        for part in self._closing:
            if part.in_use:
                part.close(rows)

    # Opening

    def open(self, opens: list[RowOpen], errors: RowErrors) -> None:
        """Opens rows in order, so that a fork may follow its parent. A refused row stays closed."""
        for item in opens:
            message = self._refusal(item)
            if message is None:
                self._open_one(item)
            else:
                errors.add(item.row, message)

    def _refusal(self, item: RowOpen) -> str | None:
        """Why this row cannot be opened; None if it can."""
        if item.row >= self.max_num_seqs:
            return f"row {item.row} is beyond max_num_seqs {self.max_num_seqs}"
        if self.is_open[item.row]:
            return f"row {item.row} is already open; close it first"
        for refuse in (self._history_refusal, self._table_refusal, _sampling_refusal):
            if (message := refuse(item)) is not None:
                return message
        for part in self._refusing:
            if part.asks(item) and (message := part.refusal(item)) is not None:
                return message
        return None

    def _history_refusal(self, item: RowOpen) -> str | None:
        num_tokens = len(item.token_ids)
        if item.fork_of_row is not None:
            parent = item.fork_of_row
            if parent >= self.max_num_seqs or not self.is_open[parent]:
                return f"fork_of_row {parent} is not open"
            if self.num_tokens[parent] < item.prompt_len:
                return f"fork_of_row {parent} has {self.num_tokens[parent]} tokens, but prompt_len is {item.prompt_len}"
            num_tokens = item.prompt_len
        if not 1 <= num_tokens <= self._max_model_len:
            return f"token_ids has {num_tokens} tokens, expected 1 to max_model_len {self._max_model_len}"
        if not 0 <= item.prompt_len <= num_tokens:
            return f"prompt_len {item.prompt_len} is beyond the {num_tokens} known tokens"
        if not 0 <= item.num_computed_tokens <= num_tokens:
            return f"num_computed_tokens {item.num_computed_tokens} is beyond the {num_tokens} known tokens"
        return None

    def _table_refusal(self, item: RowOpen) -> str | None:
        table = item.block_table
        if len(table) > self.tables.shape[1]:
            return f"block_table has {len(table)} blocks, max_model_len needs at most {self.tables.shape[1]}"
        if len(table) and int(table.max()) >= self.num_blocks:
            return f"block {int(table.max())} is outside the pool of {self.num_blocks} blocks"
        return None

    def _open_one(self, item: RowOpen) -> None:
        row = item.row
        history = item.token_ids
        if item.fork_of_row is not None:
            history = self.tokens[item.fork_of_row, : item.prompt_len]
        self.is_open[row] = True
        self._generations[row] += 1
        self.tokens[row, : len(history)] = history
        self.num_tokens[row] = len(history)
        self.prompt_lens[row] = item.prompt_len
        self._num_computed[row] = item.num_computed_tokens
        self.tables[row, : len(item.block_table)] = item.block_table
        self.tables[row, len(item.block_table) :] = NO_BLOCK
        self.table_lens[row] = len(item.block_table)
        for name in SAMPLER_FIELDS:
            self._sampling[name][row] = getattr(item.sampling, name)
        self._sampling["sample_index"][row] = item.sample_index
        for part in self._opening:
            if part.asks(item):
                part.open(item)

    # Drafts

    def tokens_of(self, row: int) -> U32:
        """The history of a row, as a view; valid up to `num_tokens`."""
        tokens: U32 = self.tokens[row]
        return tokens

    def newest_token(self, row: int) -> int:
        return int(self.tokens[row, self.num_tokens[row] - 1])

    def in_vocabulary(self, token_ids: list[int]) -> list[int]:
        """The ids before the first content id."""
        return list(takewhile(self.vocab_size.__gt__, token_ids))

    def add_drafts(self, row: int, drafts: list[int]) -> int:
        """Puts drafts behind the newest token of a row. Returns the position of that token."""
        end = int(self.num_tokens[row])
        self.tokens[row, end : end + len(drafts)] = drafts
        self.num_tokens[row] = end + len(drafts)
        return end - 1

    def add_draft(self, rows: I64, positions: I64, token_ids: U32) -> None:
        """Puts a draft of each row at this position behind its newest token, for what reads the tokens before a
        position. The row does not have it."""
        self.tokens[rows, positions] = token_ids

    # Table changes

    def change_tables(self, rows: U32, indices: U32, blocks: U32, errors: RowErrors) -> None:
        """Replaces or appends blocks; a row with an impossible change fails and is closed."""
        for change in self._change_tables:
            rows, indices, blocks = change((rows, indices, blocks), self.is_open, partial(self.fail, errors=errors))
        if not len(rows):
            return
        if self._are_appends(rows, indices, blocks):
            self.tables[rows, indices] = blocks
            self.table_lens[rows] = indices.astype(np.int64) + 1
            return
        is_known = rows < self.max_num_seqs
        is_good = is_known & (indices < self.tables.shape[1]) & (blocks < self.num_blocks)
        is_good[is_known] &= self.is_open[rows[is_known]]
        for i in np.flatnonzero(~is_good):
            message = f"table change ({indices[i]} -> block {blocks[i]}) is out of range or its row is not open"
            self.fail(int(rows[i]), message, errors)
        rows, indices, blocks = rows[is_good], indices[is_good], blocks[is_good]
        self.tables[rows, indices] = blocks
        np.maximum.at(self.table_lens, rows, indices.astype(np.int64) + 1)
        self._fail_gaps(np.unique(rows), errors)

    def _are_appends(self, rows: U32, indices: U32, blocks: U32) -> bool:
        """Whether each change appends a valid block to the table of an open row, as nearly all do."""
        if rows.max() >= self.max_num_seqs or indices.max() >= self.tables.shape[1] or blocks.max() >= self.num_blocks:
            return False
        return bool(self.is_open[rows].all() and (self.table_lens[rows] == indices).all())

    def _fail_gaps(self, rows: U32, errors: RowErrors) -> None:
        lens = self.table_lens[rows]
        longest = int(lens.max(initial=0))
        has_gap = ((self.tables[rows, :longest] == NO_BLOCK) & (np.arange(longest) < lens[:, None])).any(axis=1)
        for row in rows[has_gap]:
            self.fail(int(row), "a table change left a gap: append at the table's length", errors)

    def fail(self, row: int, message: str, errors: RowErrors) -> None:
        """Closes a row that cannot continue."""
        errors.add(row, message)
        self.close(np.array([row], np.uint32))

    def continue_from(self, sources: I64, targets: I64, token_ids: U32) -> None:
        """Replaces the history of each target by the computed tokens of its source and one token."""
        ends = self._num_computed[sources]
        width = int(ends.max())
        self.tokens[targets, :width] = self.tokens[sources, :width]
        self.tokens[targets, ends] = token_ids
        self.num_tokens[targets], self._num_computed[targets] = ends + 1, ends
        self._generations[targets] += 1  # a token that these rows sampled is not theirs any more
        for move in self._moves:
            move(sources, targets)

    # Columns of a step. All functions take and return arrays over the batch.

    def find_bad(self, batch: StepBatch, errors: RowErrors) -> Bools | None:
        """Rows of the batch that cannot run, after adding their errors; None if all can run."""
        if not len(errors) and self._are_all_good(batch):
            return None
        return self._find_bad_one_by_one(batch, errors)

    def _are_all_good(self, batch: StepBatch) -> bool:
        """The checks of `_find_bad_one_by_one` over the whole batch: nearly every step passes, and its cost is mainly
        the number of numpy calls."""
        rows, num_rows = batch.rows, len(batch.rows)
        if not num_rows:
            return True
        if num_rows > self.max_num_seqs or rows.max() >= self.max_num_seqs:
            return False
        if not self.is_open[rows].all() or not batch.query_lens.all():
            return False
        nth = self._indices[:num_rows]
        self._nth_in_batch[rows] = nth
        if (self._nth_in_batch[rows] != nth).any():  # a row occurs twice
            return False
        context_lens = batch.context_lens.astype(np.int64)
        ends = context_lens + batch.query_lens
        limits = np.minimum(self.num_tokens[rows], self.table_lens[rows] * self.block_size)
        if (ends > limits).any() or ends.max() > self._max_model_len or (context_lens > self._num_computed[rows]).any():
            return False
        for part in self._checking:
            if part.are_bad(rows.astype(np.int64), context_lens, ends, self._num_computed[rows]).any():
                return False
        return not (batch.sample_mask & (ends < self.prompt_lens[rows])).any()

    def _find_bad_one_by_one(self, batch: StepBatch, errors: RowErrors) -> Bools:
        is_bad = np.zeros(len(batch.rows), np.bool_)
        rows = batch.rows.astype(np.int64)
        if len(errors):
            is_bad |= np.fromiter((int(row) in errors for row in rows), np.bool_, len(rows))
        is_outside = rows >= self.max_num_seqs
        rows = np.where(is_outside, 0, rows)
        context_lens = batch.context_lens.astype(np.int64)
        ends = context_lens + batch.query_lens
        is_repeated = (np.bincount(rows[~is_outside], minlength=self.max_num_seqs) > 1)[rows]
        first_output = self.prompt_lens[rows]
        known, computed = self.num_tokens[rows], self._num_computed[rows]
        room = self.table_lens[rows] * self.block_size
        checks: list[tuple[Bools, Callable[[int], str]]] = [
            (is_outside, lambda i: f"row is beyond max_num_seqs {self.max_num_seqs}"),
            (~self.is_open[rows], lambda i: "row is not open"),
            (is_repeated, lambda i: "row occurs twice in the batch"),
            (batch.query_lens == 0, lambda i: "query_len must be at least 1"),
            (
                ends > self._max_model_len,
                lambda i: f"position {ends[i] - 1} reaches max_model_len {self._max_model_len}",
            ),
            (ends > known, lambda i: f"context_len + query_len is {ends[i]}, but the row has {known[i]} tokens"),
            (
                batch.context_lens > computed,
                lambda i: f"context_len is {batch.context_lens[i]}, but {computed[i]} tokens are computed",
            ),
            (ends > room, lambda i: f"{ends[i]} tokens do not fit the {room[i]} slots of the row's table"),
            *(
                (part.are_bad(rows, context_lens, ends, computed), partial(_describe, part, context_lens, ends))
                for part in self._checking
            ),
            (
                batch.sample_mask & (ends < first_output),
                lambda i: f"cannot sample at {ends[i]}, inside the prompt of {first_output[i]} tokens",
            ),
        ]
        for mask, describe in checks:
            for i in np.flatnonzero(mask & ~is_bad):
                errors.add(int(batch.rows[i]), describe(int(i)))
            is_bad |= mask
        return is_bad

    def expected_slots(self, rows: I64, positions: I64) -> I64:
        """The slot that each (row, position) must be written to."""
        blocks = self.tables[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def token_ids(self, rows: I64, positions: I64) -> I64:
        """The known tokens at (row, position)."""
        return self.tokens[rows, positions].astype(np.int64)

    def output_positions(self, rows: I64, positions: I64) -> I64:
        """These sequence positions of each row, counted from the end of its prompt."""
        return positions - self.prompt_lens[rows]

    def sampling_columns(self, rows: I64, positions: I64) -> SamplingColumns:
        """Parameters for sampling the token at sequence position `positions` of each row."""
        return SamplingColumns(self._sampling, rows, self.output_positions(rows, positions).astype(np.uint32))

    def processed_rows(self, rows: I64, positions: I64) -> ProcessedRows | None:
        """The rows whose logits are processed before they sample the tokens at these sequence positions; None if there
        are none."""
        if not self.processing.in_use:
            return None
        return self.processing.select(rows, positions, self.output_positions(rows, positions))

    def is_always_processed(self, row: int) -> bool:
        """Whether an open row asks for more than the bans of min_tokens."""
        return bool(self.processing.asks_always(np.array([row]))[0])

    def history(self, row: int) -> tuple[U32, U32]:
        """Known tokens of a row: prompt and output."""
        tokens, prompt_len = self.tokens[row], self.prompt_lens[row]
        return tokens[:prompt_len], tokens[prompt_len : self.num_tokens[row]]

    def mark_computed(self, rows: I64, ends: I64) -> None:
        """Records that keys and values of each row are computed up to that sequence position."""
        self._num_computed[rows] = ends

    def append(self, rows: I64, positions: I64, token_ids: U32) -> None:
        """Appends a sampled token at that sequence position to the history of each row."""
        self.tokens[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1

    def append_accepted(self, rows: I64, positions: I64, token_ids: U32) -> None:
        """Like `append`, for rows that may have several tokens, in order. They replace the drafts of these rows, whose
        keys and values are computed up to the newest token."""
        self.append(rows, positions, token_ids)  # of equal rows the last one counts
        self._num_computed[rows] = self.num_tokens[rows] - 1

    def take_back(self, rows: I64, counts: I64) -> None:
        """So many of the newest tokens of each row are not tokens: its drafts were wrong."""
        self.num_tokens[rows] -= counts
        self._num_computed[rows] -= counts

    def generations(self, rows: I64) -> I64:
        """The generation of each row: it changes when the row is opened, or moved as a beam."""
        return self._generations[rows]

    def fill(self, rows: I64, generations: I64, positions: I64, token_ids: U32) -> None:
        """Sets tokens that were appended before they were known, except in rows with another history since then."""
        is_same = self._generations[rows] == generations
        self.tokens[rows[is_same], positions[is_same]] = token_ids[is_same]


def _describe(part: RowPart, context_lens: I64, ends: I64, i: int) -> str:
    return part.why_bad.format(context_len=context_lens[i], end=ends[i], last=ends[i] - 1)


def _sampling_refusal(item: RowOpen) -> str | None:
    try:
        check_sampling(item.sampling)
    except FieldError as error:
        return str(error)
    return None
