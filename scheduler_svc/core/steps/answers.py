"""Reads the answer to a step: its failed rows, and the new tokens and log probabilities of the open rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.deltas import Deltas, PromptDeltas
from scheduler_svc.core.errors import UnexpectedStepError
from scheduler_svc.core.logprobs import PromptLogprobs
from scheduler_svc.core.messages import RowFailure, StepOutput
from scheduler_svc.core.pooled import PooledRows
from scheduler_svc.core.steps.decode_run import Members
from scheduler_svc.core.steps.rows import RowTable
from scheduler_svc.core.steps.step_plan import InFlightStep

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]


def check_answer(in_flight: Sequence[InFlightStep], output: StepOutput) -> tuple[InFlightStep, list[RowFailure]]:
    """The step that this output answers, and its failed rows. A row with neither a token nor a failure has failed too.

    Raises UnexpectedStepError if the step is not the oldest in flight, or if rows are unknown, repeated or in
    another order.
    """
    step = in_flight[0] if in_flight else None
    if step is None or step.step_id != output.step_id:
        expected = "no step" if step is None else f"step {step.step_id}"
        raise UnexpectedStepError(f"worker {output.worker_id} answered step {output.step_id}, expected {expected}")
    if output.prompt_logprobs is not None:
        _check_prompt_rows(step, output.prompt_logprobs, output.worker_id)
    if output.pooled is not None:
        _check_pooled_rows(step, output.pooled, output.worker_id)
    if not output.failures and output.rows.tobytes() == step.sampled.tobytes():
        return step, []
    return step, _failures(step, output)


def _failures(step: InFlightStep, output: StepOutput) -> list[RowFailure]:
    expected = step.sampled
    reported = {failure.row: failure for failure in output.failures}
    computed = {*step.rows.tolist(), *(row for row, _ in step.forks)}
    in_order = expected[np.isin(expected, output.rows)]
    answered = f"worker {output.worker_id} answered step {step.step_id} with"
    if output.rows.tobytes() != in_order.tobytes():
        raise UnexpectedStepError(f"{answered} rows {output.rows.tolist()}, expected {expected.tolist()}")
    if unknown := reported.keys() - computed:
        raise UnexpectedStepError(f"{answered} the failure of row {min(unknown)}, which the step did not compute")
    missing = set(expected.tolist()) - set(output.rows.tolist()) - set(reported)
    return [*reported.values(), *(RowFailure(row, "the worker returned no token for this row") for row in missing)]


def _check_prompt_rows(step: InFlightStep, found: PromptLogprobs, worker_id: str) -> None:
    is_known = np.isin(found.rows, step.rows)
    if not is_known.all():
        raise UnexpectedStepError(
            f"worker {worker_id} answered step {step.step_id} with prompt_logprobs of row "
            f"{found.rows[~is_known][0]}, which the step did not compute"
        )


def _check_pooled_rows(step: InFlightStep, found: PooledRows, worker_id: str) -> None:
    unknown = set(found.rows.tolist()) - set(step.prompt_only)
    if unknown:
        raise UnexpectedStepError(
            f"worker {worker_id} answered step {step.step_id} with numbers of row {min(unknown)}, whose prompt the "
            "step does not complete"
        )


def append_tokens(table: RowTable, step: InFlightStep, output: StepOutput, is_open: Bools | None) -> tuple[I64, Deltas]:
    """Store the samples of rows that have not been closed since the step was sent. `is_open`: per row, whether it has
    not; None if no row has.
    """
    run = step.run
    if run is not None and is_open is None:
        return run.rows, _append_run(table, run, step.context_lens, output)
    rows, token_ids, logprobs = output.rows.astype(np.int64), output.token_ids, output.logprobs
    if is_open is not None:
        stays = is_open[rows]
        rows, token_ids = rows[stays], token_ids[stays]
        logprobs = None if logprobs is None else logprobs.select(stays)
    if step.has_beams:  # `BeamSearch` chooses their tokens
        is_sampled = ~table.is_beam[rows]
        rows, token_ids = rows[is_sampled], token_ids[is_sampled]
        logprobs = None if logprobs is None else logprobs.select(is_sampled)
    positions = table.num_tokens[rows]
    table.flat_tokens[table.row_starts[rows] + positions] = token_ids
    table.num_tokens[rows] = positions + 1
    return rows, Deltas(
        owners=table.owner[rows],
        handles=table.handle[rows],
        sample_indices=table.sample_index[rows],
        offsets=(positions - table.prompt_len[rows]).astype(np.uint32),
        token_ids=token_ids,
        logprobs=logprobs,
        prompt=None if output.prompt_logprobs is None else _take_prompt(table, output.prompt_logprobs, is_open),
    )


def _take_prompt(table: RowTable, found: PromptLogprobs, is_open: Bools | None) -> PromptDeltas | None:
    """New prompt positions of open rows; None if there are none. Records them as delivered."""
    is_new = np.zeros(len(found.rows), dtype=np.bool_)
    rows, positions = found.rows.astype(np.int64), found.positions
    for row in dict.fromkeys((rows if is_open is None else rows[is_open[rows]]).tolist()):
        group = table.sequence(row).group
        if group.pending_prompt_logprobs is None:
            continue
        is_new |= (rows == row) & (positions >= group.num_prompt_logprobs) & (positions < len(group.prompt))
        group.num_prompt_logprobs = max(group.num_prompt_logprobs, int(positions[rows == row].max()) + 1)
    if not is_new.any():
        return None
    rows = rows[is_new]
    return PromptDeltas(table.owner[rows], table.handle[rows], positions[is_new], found.columns.select(is_new))


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
