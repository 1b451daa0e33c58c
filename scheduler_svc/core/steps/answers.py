"""Reading the answer to a step: its failed rows, and the new tokens of the rows that are still open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.errors import UnexpectedStepError
from scheduler_svc.core.messages import Deltas, RowFailure, StepOutput
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.rows import RowTable
from scheduler_svc.core.steps.step_plan import InFlightStep

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


def check_answer(in_flight: Sequence[InFlightStep], output: StepOutput) -> tuple[InFlightStep, list[RowFailure]]:
    """The step that this output answers, and its failed rows. A row with neither a token nor a failure has failed too.

    Raises UnexpectedStepError if the step is not the oldest in flight, or if rows are unknown, repeated or in
    another order.
    """
    step = in_flight[0] if in_flight else None
    if step is None or step.step_id != output.step_id:
        expected = "no step" if step is None else f"step {step.step_id}"
        raise UnexpectedStepError(f"worker {output.worker_id} answered step {output.step_id}, expected {expected}")
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


def append_tokens(table: RowTable, step: InFlightStep, output: StepOutput) -> tuple[I64, Deltas]:
    """Store the samples of rows that have not been closed since the step was sent."""
    run = step.run
    if run is not None and (step.generation is table.generation or _are_all_live(table, step)):
        return run.rows, _append_run(table, run, step.context_lens, output.token_ids)
    rows, token_ids = output.rows.astype(np.int64), output.token_ids
    if step.generation is not table.generation:
        is_live = step.generation[rows] == table.generation[rows]
        rows, token_ids = rows[is_live], token_ids[is_live]
    if step.has_beams:  # their tokens are chosen by `BeamSearch`
        is_sampled = ~table.is_beam[rows]
        rows, token_ids = rows[is_sampled], token_ids[is_sampled]
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
    """Whether no row of the step has been closed since the step was sent."""
    return bool((step.generation[step.rows] == table.generation[step.rows]).all())


def _append_run(table: RowTable, run: DecodeRun, context_lens: U32, token_ids: U32) -> Deltas:
    """Store the samples of a step in a run. All rows of the run are still open."""
    table.flat_tokens[run.token_starts + context_lens] = token_ids
    table.num_tokens += run.is_member
    table.pending -= run.is_member
    offsets = context_lens + run.first_offsets
    return Deltas(run.owners, run.handles, run.sample_indices, offsets, token_ids, owner=run.owner)
