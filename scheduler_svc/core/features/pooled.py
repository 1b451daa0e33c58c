"""Pooled requests: they return numbers instead of tokens when their whole prompt is computed.

Nothing of them stays in a pool: their blocks are never registered, and are free when the request ends.
"""

from __future__ import annotations

from scheduler_svc.core.messages import Deltas, RowAssignment, pooled_deltas
from scheduler_svc.core.sequence import Feature, Sequence, SequenceGroup
from scheduler_svc.core.worker_state import InFlightStep, StepPlan, WorkerPart, WorkerState
from step_protocol.columns import Bools
from step_protocol.features import PooledRows
from step_protocol.messages import StepOutput
from step_protocol.types import RowError


class PoolingRows(WorkerPart):
    """The pooled rows of one worker, whose numbers come with the answer to their last chunk."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self._rows: set[int] = set()

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        self._rows.add(opened.row)

    def read(self, step: InFlightStep, output: StepOutput, is_open: Bools | None, deltas: Deltas) -> list[RowError]:
        complete = [row for row in step.prompt_only if row in self._rows and row not in step.closed]
        if not complete:
            return []
        pooled = output.part(PooledRows)
        numbers = {} if pooled is None else pooled.of_row()
        r = self.worker.rows
        found = [(r.owner.item(row), r.handle.item(row), numbers[row]) for row in complete if row in numbers]
        deltas.pooled = pooled_deltas(found)
        missing = [row for row in complete if row not in numbers]
        return [RowError(row, "the worker returned no numbers for this row") for row in missing]

    def close(self, row: int) -> None:
        self._rows.discard(row)


class PooledRequest(Feature):
    """A pooled request. `may_hit`: the numbers depend on the state of the last token only. Others need the states of
    all tokens, which a cached prefix does not have.
    """

    part = PoolingRows
    is_private = True
    limits_hits = True

    def __init__(self, *, may_hit: bool) -> None:
        self.may_hit = may_hit

    def max_cached_tokens(self, group: SequenceGroup, num_tokens: int) -> int:
        return num_tokens - 1 if self.may_hit else 0
