"""Log probabilities of prompt tokens: delivered as the prompt is computed, each position once."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.messages import Deltas, PromptDeltas, RowAssignment
from scheduler_svc.core.sequence import Feature, Sequence, SequenceGroup
from scheduler_svc.core.steps.step_plan import InFlightStep, StepPlan
from scheduler_svc.core.steps.worker_state import WorkerPart, WorkerState
from step_protocol.columns import Bools
from step_protocol.messages import RowError, StepOutput


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


class PromptRows(WorkerPart):
    """The rows of one worker whose prompt positions remain to be delivered."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self._pending: dict[int, PromptDelivery] = {}

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        feature = seq.group.features.find(PromptDelivery)
        if feature is not None and opened.fork_of_row is None and feature.is_pending(seq.group):
            opened.prompt_logprobs = feature.num_top
            self._pending[opened.row] = feature

    def read(self, step: InFlightStep, output: StepOutput, is_open: Bools | None, deltas: Deltas) -> list[RowError]:
        """Takes the new prompt positions of open rows, and records them as delivered."""
        found = output.prompt_logprobs
        if found is None:
            return []
        is_new, r = np.zeros(len(found.rows), dtype=np.bool_), self.worker.rows
        rows, positions = found.rows.astype(np.int64), found.positions
        for row in dict.fromkeys((rows if is_open is None else rows[is_open[rows]]).tolist()):
            feature = self._pending.get(row)
            if feature is None or feature.num_delivered >= r.prompt_len[row]:
                continue
            is_mine = rows == row
            is_new |= is_mine & (positions >= feature.num_delivered) & (positions < r.prompt_len[row])
            feature.num_delivered = max(feature.num_delivered, int(positions[is_mine].max()) + 1)
        if is_new.any():
            rows = rows[is_new]
            columns = found.columns.select(is_new)
            deltas.prompt = PromptDeltas(r.owner[rows], r.handle[rows], positions[is_new], columns)
        return []

    def close(self, row: int) -> None:
        self._pending.pop(row, None)


PromptDelivery.part = PromptRows
