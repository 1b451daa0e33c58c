"""Log probabilities of prompt tokens: delivered as the prompt is computed, each position once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_svc.core.messages import Deltas, PromptDeltas, RowAssignment
from scheduler_svc.core.sequence import Feature, FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.worker_state import InFlightStep, StepPlan, WorkerPart, WorkerState
from step_protocol.columns import Bools
from step_protocol.features import PromptLogprobs
from step_protocol.messages import StepOutput
from step_protocol.types import RowError


class PromptDelivery(Feature):
    """Returns the `num_top` most likely tokens with each prompt token. `num_delivered`: prompt positions that the
    client has, including the first, which has no value.
    """

    limits_hits = True

    def __init__(self, num_top: int, num_delivered: int = 1) -> None:
        self.num_top = num_top
        self.num_delivered = num_delivered

    def is_pending(self, group: SequenceGroup) -> bool:
        """Whether prompt positions remain to be delivered."""
        return self.num_delivered < len(group.prompt)

    def max_cached_tokens(self, group: SequenceGroup, num_tokens: int) -> int:
        """It must compute each token before a prompt position that remains to be delivered."""
        return self.num_delivered - 1 if self.is_pending(group) else num_tokens - 1


class ClosedRow(NamedTuple):
    """A row whose sequence ended while steps that compute its prompt were in flight. The request's other samples go on,
    and wait for these positions.
    """

    row: int
    seq: Sequence
    last_step_id: int  # the newest of these steps


class PromptRows(WorkerPart):
    """The rows of one worker whose prompt positions remain to be delivered."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self._pending: dict[int, Sequence] = {}
        self._closed: list[ClosedRow] = []

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        feature = seq.group.features.get(PromptDelivery)
        if opened.fork_of_row is None and feature.is_pending(seq.group):
            opened.prompt_logprobs = feature.num_top
            self._pending[opened.row] = seq

    def read(self, step: InFlightStep, output: StepOutput, is_open: Bools | None, deltas: Deltas) -> list[RowError]:
        """Takes the new prompt positions of the rows of this step, and records them as delivered."""
        found = output.part(PromptLogprobs)
        if found is None:
            return []
        is_new, groups = np.zeros(len(found.rows), dtype=np.bool_), dict[int, SequenceGroup]()
        for row in dict.fromkeys(found.rows.tolist()):
            group = self._group(row, step, is_open)
            if group is None:
                continue
            groups[row], feature, is_mine = group, group.features.get(PromptDelivery), found.rows == row
            in_prompt = (found.positions >= feature.num_delivered) & (found.positions < len(group.prompt))
            is_new |= is_mine & in_prompt
            feature.num_delivered = max(feature.num_delivered, int(found.positions[is_mine].max()) + 1)
        if is_new.any():
            owners = [(groups[row].owner, groups[row].handle) for row in found.rows[is_new].tolist()]
            columns = np.array(owners, dtype=np.uint32).T
            positions = found.positions[is_new]
            deltas.prompt = PromptDeltas(columns[0], columns[1], positions, found.columns.select(is_new))
        return []

    def _group(self, row: int, step: InFlightStep, is_open: Bools | None) -> SequenceGroup | None:
        """The request whose prompt this row computed in this step, if positions remain to be delivered to it."""
        if is_open is None or is_open[row]:
            seq = self._pending.get(row)
        else:
            self._closed = [closed for closed in self._closed if closed.last_step_id >= step.step_id]
            seq = next((closed.seq for closed in self._closed if closed.row == row), None)
        if seq is None or seq.finish_reason is FinishReason.ERROR or seq.group.is_finished:
            return None
        return seq.group if seq.group.features.get(PromptDelivery).is_pending(seq.group) else None

    def close(self, row: int) -> None:
        seq = self._pending.pop(row, None)
        if seq is not None and seq.is_finished and self.worker.in_flight:
            oldest, newest = self.worker.in_flight[0].step_id, self.worker.in_flight[-1].step_id
            self._closed = [closed for closed in self._closed if closed.last_step_id >= oldest]
            self._closed.append(ClosedRow(row, seq, newest))


PromptDelivery.part = PromptRows
