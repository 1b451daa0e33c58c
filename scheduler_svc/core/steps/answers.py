"""Reads the answer to a step: its new tokens, the rows that end with them, and the rows that a failed row affects."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.errors import UnexpectedStepError
from scheduler_svc.core.messages import Deltas
from scheduler_svc.core.rows import Members, RowTable
from scheduler_svc.core.sequence import FinishReason, Sequence
from scheduler_svc.core.speculation import Accepted, take_back
from scheduler_svc.core.worker_state import InFlightStep, WorkerState
from step_protocol.columns import I64, U32, Bools
from step_protocol.features import LogprobColumns
from step_protocol.messages import StepOutput
from step_protocol.types import RowError


def check_answer(in_flight: Seq[InFlightStep], output: StepOutput) -> tuple[InFlightStep, list[RowError]]:
    """The step that this output answers, and its failed rows. A row with neither a token nor a failure has failed too.

    Raises UnexpectedStepError if the step is not the oldest in flight, or if rows are unknown, repeated or in
    another order.
    """
    step = in_flight[0] if in_flight else None
    if step is None or step.step_id != output.step_id:
        expected = "no step" if step is None else f"step {step.step_id}"
        raise UnexpectedStepError(f"worker {output.worker_id} answered step {output.step_id}, expected {expected}")
    name = output.worker_id
    for part in output.parts:
        if part.ENDS_PROMPT:
            why = "whose prompt the step does not complete"
            _check_rows(step, name, part.WHAT, part.rows, step.prompt_only, why)
        elif part.WHAT:
            _check_rows(step, name, part.WHAT, part.rows, step.rows.tolist(), "which the step did not compute")
    if output.token_lens is not None:
        _check_lens(step, output, output.token_lens)
    if not output.errors and output.rows.tobytes() == step.sampled.tobytes():
        return step, []
    return step, _failures(step, output)


def _failures(step: InFlightStep, output: StepOutput) -> list[RowError]:
    expected = step.sampled
    reported = {failure.row: failure for failure in output.errors}
    computed = {*step.rows.tolist(), *(row for row, _ in step.forks)}
    in_order = expected[np.isin(expected, output.rows)]
    answered = f"worker {output.worker_id} answered step {step.step_id} with"
    if output.rows.tobytes() != in_order.tobytes():
        raise UnexpectedStepError(f"{answered} rows {output.rows.tolist()}, expected {expected.tolist()}")
    if unknown := reported.keys() - computed:
        raise UnexpectedStepError(f"{answered} the failure of row {min(unknown)}, which the step did not compute")
    missing = set(expected.tolist()) - set(output.rows.tolist()) - set(reported)
    return [*reported.values(), *(RowError(row, "the worker returned no token for this row") for row in missing)]


def _check_lens(step: InFlightStep, output: StepOutput, lens: U32) -> None:
    most = np.ones_like(step.rows) if step.max_query_lens is None else np.maximum(step.max_query_lens, 1)
    if output.rows.tobytes() != step.rows.tobytes():  # some rows have no sample
        of_row = np.ones(int(step.rows.max(initial=0)) + 1, np.uint32)
        of_row[step.rows] = most
        most = of_row[np.minimum(output.rows, len(of_row) - 1)]
    is_wrong = lens - 1 >= most  # unsigned: 0 - 1 is above all
    if np.count_nonzero(is_wrong):
        row, count = int(output.rows[is_wrong][0]), int(lens[is_wrong][0])
        raise UnexpectedStepError(
            f"worker {output.worker_id} answered step {step.step_id} with {count} tokens of row {row}, "
            "which the step did not reserve"
        )


def _check_rows(step: InFlightStep, worker_id: str, content: str, rows: U32, known: Iterable[int], why: str) -> None:
    unknown = set(np.unique(rows).tolist()).difference(known)
    if unknown:
        raise UnexpectedStepError(
            f"worker {worker_id} answered step {step.step_id} with {content} of row {min(unknown)}, {why}"
        )


# Rows of the new tokens [N], the tokens, and the indices of the newest token of each row; None: each row has one token.
Appended = tuple[I64, Deltas, I64 | None]


def append_tokens(
    table: RowTable, step: InFlightStep, output: StepOutput, is_open: Bools | None, stops: Stops
) -> Appended:
    """Store the samples of rows that have not been closed since the step was sent. `is_open`: per row, whether it has
    not; None if no row has.
    """
    run = step.run
    if run is not None and is_open is None:
        return run.rows, _append_run(table, run, step.context_lens, output), None
    if step.max_query_lens is not None:
        return _append_accepted(table, step, step.max_query_lens, output, is_open, stops)
    rows, token_ids, logprobs = output.rows.astype(np.int64), output.token_ids, output.logprobs
    if is_open is not None:
        stays = is_open[rows]
        rows, token_ids = rows[stays], token_ids[stays]
        logprobs = None if logprobs is None else logprobs.select(stays)
    if step.has_awaiting:  # the scheduler chooses their tokens
        is_sampled = ~table.is_awaiting[rows]
        rows, token_ids = rows[is_sampled], token_ids[is_sampled]
        logprobs = None if logprobs is None else logprobs.select(is_sampled)
    positions = table.num_tokens[rows]
    table.flat_tokens[table.row_starts[rows] + positions] = token_ids
    table.num_tokens[rows] = positions + 1
    return rows, _deltas(table, rows, positions, token_ids, logprobs), None


def _append_accepted(
    table: RowTable, step: InFlightStep, max_lens: U32, output: StepOutput, is_open: Bools | None, stops: Stops
) -> Appended:
    """Store the tokens of a step in which rows speculate, up to the first one that ends its row."""
    rows, token_ids, logprobs = output.rows.astype(np.int64), output.token_ids, output.logprobs
    lens = np.ones_like(rows) if output.token_lens is None else output.token_lens.astype(np.int64)
    reserved = max_lens.astype(np.int64)
    if output.rows.tobytes() != step.rows.tobytes():  # some rows have no sample
        of_row = np.zeros(len(table.limit), dtype=np.int64)
        of_row[step.rows] = reserved
        reserved = of_row[rows]
    kept = stops.num_before_end(table, rows, lens, token_ids)
    if is_open is not None or table.num_awaiting:
        kept = kept * (~table.is_awaiting[rows] if is_open is None else is_open[rows] & ~table.is_awaiting[rows])
    if kept is not lens:
        is_kept = np.arange(len(token_ids)) < (lens.cumsum() - lens + kept).repeat(lens)
        token_ids = token_ids[is_kept]
        logprobs = None if logprobs is None else logprobs.select(is_kept)
    before, of_tokens, newest = table.num_tokens[rows], rows.repeat(kept), kept.cumsum() - 1
    ends = before + kept
    positions = (ends - 1 - newest).repeat(kept) + np.arange(len(of_tokens))
    table.flat_tokens[table.row_starts[of_tokens] + positions] = token_ids
    table.num_tokens[rows] = ends
    if np.count_nonzero(kept) < len(rows):
        newest = newest[kept > 0]
    if np.count_nonzero(kept) < len(rows) or np.count_nonzero(reserved) < len(rows):
        found = (kept > 0) & (reserved > 0)
        rows, before, ends, reserved, lens = rows[found], before[found], ends[found], reserved[found], lens[found]
    step.accepted = Accepted(rows, before, ends)
    take_back(table, rows, reserved, lens)
    return of_tokens, _deltas(table, of_tokens, positions, token_ids, logprobs), newest


def _deltas(table: RowTable, rows: I64, positions: I64, token_ids: U32, logprobs: LogprobColumns | None) -> Deltas:
    return Deltas(
        owners=table.owner[rows],
        handles=table.handle[rows],
        sample_indices=table.sample_index[rows],
        offsets=(positions - table.prompt_len[rows]).astype(np.uint32),
        token_ids=token_ids,
        logprobs=logprobs,
    )


def _append_run(table: RowTable, run: Members, context_lens: U32, output: StepOutput) -> Deltas:
    """Store the samples of a step in which all rows are in the decode run. All rows of the run are still open."""
    token_ids, columns = output.token_ids, run.columns(table)
    table.flat_tokens[columns.token_starts + context_lens] = token_ids
    table.num_tokens += run.in_run
    return Deltas(
        columns.owners,
        columns.handles,
        columns.sample_indices,
        context_lens + columns.first_offsets,
        token_ids,
        owner=columns.owner,
        logprobs=output.logprobs,
    )


class Stops:
    """The stop rules of one model, for columns of new tokens and for a single token."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.uint32)

    def may_end(self, table: RowTable, rows: I64, token_ids: U32, *, may_reach_limit: bool) -> list[int]:
        """Indices of the rows that may end with their newest token: `end_of` decides. `may_reach_limit`: some row may
        have max_tokens.
        """
        found: list[int] = []
        for eos in self._eos:
            found += (token_ids == eos).nonzero()[0].tolist()
        if table.num_ending_anywhere:
            found += table.may_end_anywhere[rows].nonzero()[0].tolist()
        if may_reach_limit:
            found += (table.num_tokens[rows] >= table.limit[rows]).nonzero()[0].tolist()
        return sorted(set(found)) if len(found) > 1 else found

    def num_before_end(self, table: RowTable, rows: I64, lens: I64, token_ids: U32) -> I64:
        """The number of new tokens of each row up to the first one that ends it; `lens` itself if none may."""
        found: list[int] = []
        for eos in self._eos:
            found += (token_ids == eos).nonzero()[0].tolist()
        if not (found or table.num_ending_anywhere):
            return lens
        ends, kept = lens.cumsum(), lens.copy()
        may_end = set(ends.searchsorted(found, side="right").tolist())
        may_end.update(table.may_end_anywhere[rows].nonzero()[0].tolist())
        for i in may_end:
            row, count, start = rows.item(i), lens.item(i), ends.item(i) - lens.item(i)
            if table.sequences[row] is None:
                continue
            output = np.append(table.output_tokens(row), token_ids[start : start + count])
            for nth in range(1, count):
                if self.end_of(table, row, output[: len(output) - count + nth]) is not None:
                    kept[i] = nth
                    break
        return kept

    def end_of(self, table: RowTable, row: int, output: U32) -> tuple[FinishReason, int | None] | None:
        """Why a row ends with the last token of its output, and the token if it is a stop id; None if it continues."""
        end = self._end(table.sequence(row), output)
        if end is None and table.prompt_len.item(row) + len(output) >= table.limit.item(row):
            return FinishReason.LENGTH, None
        return end

    def end_of_output(self, seq: Sequence) -> tuple[FinishReason, int | None] | None:
        """Why a Continuation already ends with its last token, as `end_of`; None if it continues."""
        return self._end(seq, seq.data.output)

    def _end(self, seq: Sequence, output: U32) -> tuple[FinishReason, int | None] | None:
        end = seq.group.stop.end_of(output, self._eos_token_ids)
        return None if end is None else (end, int(output[-1]) if end is FinishReason.STOP else None)


class Untrusted(NamedTuple):
    """The rows and blocks that cannot be trusted after rows failed."""

    rows: list[int]  # must be computed again, because they read blocks of failed rows
    blocks: list[int]  # have unknown content, so their digests must be removed


def untrusted_after(worker: WorkerState, failed: set[int], step: InFlightStep) -> Untrusted:
    """The rows and blocks that are untrusted by the failure of these rows in this step.

    A failed row is one of them if the failure of another row explains its failure. The untrusted blocks are the blocks
    that failed rows were to fill, and the blocks that rows filled which have ended since: these may have read anything.
    """
    bad, steps = set(failed), (step, *worker.in_flight)
    while True:
        lost = _lost_blocks(bad, steps)
        forked = _forks_of(bad, steps)
        untrusted = {row for row in worker.rows.active().tolist() if row in forked or _reads(worker, row, lost)}
        if untrusted <= bad:
            return Untrusted(sorted(untrusted), list(lost))
        bad |= untrusted


def _lost_blocks(bad: set[int], steps: tuple[InFlightStep, ...]) -> dict[int, int | None]:
    """The blocks that bad and ended rows would have filled, each with its row, or None if the row has ended."""
    return {
        block: None if row in step.closed else row
        for step in steps
        for row, fills in step.fills
        if row in bad or row in step.closed
        for block, _ in fills
    }


def _forks_of(bad: set[int], steps: tuple[InFlightStep, ...]) -> set[int]:
    """Live rows that forked from a bad or ended row."""
    return {
        child
        for step in steps
        for child, parent in step.forks
        if (parent in bad or parent in step.closed) and child not in step.closed
    }


def _reads(worker: WorkerState, row: int, lost: dict[int, int | None]) -> bool:
    """Whether the row's table has a lost block that another row was to fill. Freed entries count too: the row may have
    read their blocks. If they are blocks of other rows now, the row is computed again without need.
    """
    r = worker.rows
    return any(lost.get(block, row) != row for block in r.table[row, : r.num_blocks[row]].tolist())
