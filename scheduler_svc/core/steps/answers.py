"""What a worker's answer to a step says: which rows failed, and the new tokens of those that are still there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.errors import UnexpectedStepError
from scheduler_svc.core.messages import Deltas, RowFailure, StepOutput
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.rows import RowTable
from scheduler_svc.core.steps.step_plan import InFlightStep

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


def check_answer(step: InFlightStep, output: StepOutput) -> list[RowFailure]:
    """Every row that was to sample must have a token or a failure; one that has neither failed too.

    Raises UnexpectedStepError for rows that the step did not ask, that come twice, or in another order.
    """
    expected = step.sampled
    if not output.failures and output.rows.tobytes() == expected.tobytes():
        return []
    told = {failure.row: failure for failure in output.failures}
    asked = {*step.rows.tolist(), *(row for row, _ in step.forks)}
    in_order = expected[np.isin(expected, output.rows)]
    if output.rows.tobytes() != in_order.tobytes() or not told.keys() <= asked:
        raise UnexpectedStepError(f"worker {output.worker_id} answered other rows than step {step.step_id} asked")
    silent = set(expected.tolist()) - set(output.rows.tolist()) - set(told)
    return [*told.values(), *(RowFailure(row, "the worker returned no token for this row") for row in silent)]


def append_tokens(table: RowTable, step: InFlightStep, output: StepOutput) -> tuple[I64, Deltas]:
    """Store the samples of rows that are still what they were when the step was sent."""
    run = step.run
    if run is not None and _are_all_live(table, step):
        return run.rows, _append_run(table, run, step.context_lens, output.token_ids)
    rows, token_ids = output.rows.astype(np.int64), output.token_ids
    if step.generation is not table.generation:
        is_live = step.generation[rows] == table.generation[rows]
        rows, token_ids = rows[is_live], token_ids[is_live]
    positions = table.num_tokens[rows]
    table.tokens[rows, positions] = token_ids
    table.num_tokens[rows] = positions + 1
    table.pending[rows] -= 1
    return rows, Deltas(
        owners=table.owner[rows],
        handles=table.handle[rows],
        sample_indices=table.sample_index[rows],
        offsets=(positions - table.prompt_len[rows]).astype(np.uint32),
        token_ids=token_ids,
    )


def _are_all_live(table: RowTable, step: InFlightStep) -> bool:
    """None of the step's rows has been closed since; others may have."""
    if step.generation is table.generation:
        return True
    return bool((step.generation[step.rows] == table.generation[step.rows]).all())


def _append_run(table: RowTable, run: DecodeRun, context_lens: U32, token_ids: U32) -> Deltas:
    """The same for a step of which every row is still there."""
    table.flat_tokens[run.token_starts + context_lens] = token_ids
    table.num_tokens += run.is_member
    table.pending -= run.is_member
    offsets = context_lens + run.first_offsets
    return Deltas(run.owners, run.handles, run.sample_indices, offsets, token_ids, owner=run.owner)
