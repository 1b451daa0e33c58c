"""What every engine does with a step: check its columns, apply its changes, compute it or fail its rows."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from step_protocol.columns import EMPTY, I64, U32, Bools
from step_protocol.messages import BadBatchError, StepBatch, StepOutput
from step_protocol.types import RowErrorCode
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.step_checker import StepChecker
from worker_svc.engine.rows.tables import add_tables
from worker_svc.engine.runner import Runner
from worker_svc.engine.speculation.drafts import DraftCounts, Proposer, RowDrafts, SuffixProposer
from worker_svc.engine.step import CheckedStep, RowErrors

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # in the message of torch's RuntimeError
MAX_OUT_OF_MEMORY_STEPS = 3  # consecutive; a worker that cannot compute must not keep accepting rows


class StepRunner(Runner, ABC):
    """A loaded model with its KV pool and open rows. One thread at a time may call it.

    A backend that computes at once implements `_run_step`, one with several steps in flight `launch`.
    """

    _rows: OpenRows

    def _serve(self, info: EngineInfo, **features: Any) -> None:
        """Ends the load: makes the rows of the model that `info` describes. `features`: as for `add_tables`."""
        rows = OpenRows(info.max_num_seqs, info.max_model_len, info.block_size, info.num_blocks, info.vocab_size)
        self._rows, self._tables, self.info = rows, add_tables(rows, **features), info
        self._checker = StepChecker(rows, info)
        self._drafts: RowDrafts | None = None  # None: no row speculates
        self._num_out_of_memory = 0  # consecutive steps

    def _speculate(self, config: EngineConfig, make_proposer: Callable[[OpenRows], Proposer] = SuffixProposer) -> None:
        """Ends the load of a runner that can compute drafts. Without --speculate, rows with an old answer have some, if
        that needs no memory."""
        if config.speculate is None:
            if not (self.launches or self.info.attention_window or self._tables.states):
                self._drafts = RowDrafts(self._rows, config.max_drafts, tables=self._tables, is_for_all=False)
                self._drafts.asks = lambda item: item.fork_of_row is not None or len(item.draft_token_ids)
            return
        if self.info.attention_window is not None:
            raise ValueError(
                "speculate cannot be set for a model whose layers all have an attention window: its rows free blocks "
                "behind known positions; leave --speculate out"
            )
        self._drafts = self._make_drafts(config, make_proposer)

    def _make_drafts(self, config: EngineConfig, make_proposer: Callable[[OpenRows], Proposer]) -> RowDrafts:
        return RowDrafts(self._rows, config.max_drafts, make_proposer, self._tables)

    @property
    def draft_counts(self) -> DraftCounts | None:
        return None if self._drafts is None else self._drafts.counts

    def execute(self, batch: StepBatch) -> StepOutput:
        """Applies and runs one step. A bad row becomes a RowError and affects no other row.

        Raises BadBatchError, with nothing applied, for columns that contradict each other or the pool. If a step runs
        out of memory, its rows fail. The third consecutive such step raises, and so does a failure to apply changes.
        """
        started = time.perf_counter()
        self._checker.check_columns(batch)
        errors = RowErrors()
        self._apply_changes(batch, errors)
        step = self._with_drafts(batch, errors)
        output = self._compute_or_fail(step, errors, partial(self._run_step, step, errors))
        output = output or StepOutput(batch.step_id, EMPTY, EMPTY)
        output.errors = list(errors.values())
        if self._drafts is not None and self._drafts.in_use:
            self._drafts.propose(step, output, time.perf_counter() - started)
        output.forward_us = int((time.perf_counter() - started) * 1e6)
        return output

    def _with_drafts(self, batch: StepBatch, errors: RowErrors) -> StepBatch:
        if self._drafts is not None and (self._drafts.in_use or batch.max_query_lens is not None):
            return self._drafts.begin(batch, errors)
        if batch.max_query_lens is not None:
            raise BadBatchError("max_query_lens is set, but this worker computes no drafts")
        return batch

    def _append_samples(self, plan: CheckedStep, rows: I64, positions: I64, token_ids: U32, output: StepOutput) -> None:
        """The new tokens of a step, for the rows and for the answer. Those of one row follow each other."""
        output.rows, output.token_ids = rows.astype(np.uint32), token_ids
        if plan.num_after is None:
            self._rows.append(rows, positions, token_ids)
            return
        self._rows.append_accepted(rows, positions, token_ids)
        output.rows, output.token_lens = rows_with_lens(output.rows)

    def _is_token(self, plan: CheckedStep, token_ids: U32, is_bad: Bools) -> Bools:
        """Which samples become tokens, or fail their row: all of them, except behind a wrong draft."""
        if self._drafts is None or plan.num_after is None:
            return ~np.zeros(len(token_ids), np.bool_)
        return self._drafts.accept(plan, plan.num_after, token_ids, is_bad)

    def _run_step(self, batch: StepBatch, errors: RowErrors) -> StepOutput | None:
        """The output of a step whose changes are applied, without its errors; None if no row is left."""
        raise NotImplementedError

    def reset_rows(self) -> None:
        self._rows.reset()

    def rows_used(self) -> int:
        return self._rows.rows_used()

    def _apply_changes(self, batch: StepBatch, errors: RowErrors) -> tuple[I64, I64]:
        """Returns the block copies: sources and targets."""
        if len(batch.close_rows):
            self._rows.close(batch.close_rows)
        if batch.opens:
            self._rows.open(batch.opens, errors)
        if len(batch.table_rows):
            self._rows.change_tables(batch.table_rows, batch.table_indices, batch.table_blocks, errors)
        copies = batch.copy_src.astype(np.int64), batch.copy_dst.astype(np.int64)
        if len(copies[0]):
            self._copy_blocks(*copies)
        if len(batch.commit_blocks):
            self._commit(batch.commit_blocks.astype(np.int64), batch.commit_digests)
        if batch.parts:
            self._tables.beams.apply(batch, errors)
        return copies

    def _commit(self, blocks: I64, digests: list[bytes]) -> None:
        for part in self._rows.block_parts:
            blocks, digests = part.commit(blocks, digests)
        if len(blocks):
            self._commit_blocks(blocks, digests)

    @abstractmethod
    def _copy_blocks(self, sources: I64, targets: I64) -> None: ...

    @abstractmethod
    def _commit_blocks(self, blocks: I64, digests: list[bytes]) -> None: ...

    def _compute_or_fail(
        self, batch: StepBatch, errors: RowErrors, compute: Callable[[], T], *, can_fail: bool = True
    ) -> T | None:
        """Computes a step whose changes are applied. If memory runs out, its rows fail, and the result is None: a step
        writes to no others. `can_fail`: whether a step without its rows leaves the worker consistent."""
        try:
            found = compute()
        except (MemoryError, RuntimeError) as error:
            self._num_out_of_memory += 1
            is_last = self._num_out_of_memory >= MAX_OUT_OF_MEMORY_STEPS
            if not (can_fail and is_out_of_memory(error)) or is_last:
                raise
            logger.error("step %d ran out of memory; its rows fail: %s", batch.step_id, error)
        else:
            self._num_out_of_memory = 0
            return found
        for row in np.concatenate((batch.rows, batch.fork_rows)).tolist():
            errors.add(row, "the worker ran out of memory in this step", RowErrorCode.INTERNAL)
        return None


def rows_with_lens(rows: U32) -> tuple[U32, U32]:
    """The different rows among those of tokens, whose tokens follow each other, and the number of tokens of each."""
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
    return rows[starts], np.diff(starts, append=len(rows)).astype(np.uint32)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or numpy could not allocate memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
