"""The positions of rows. They differ from the indices of the tokens only in rows with images.

M-RoPE gives positions on three axes (time, height, width) to a sequence with images, as transformers' `get_rope_index`.
A token of text has the same position on each axis. The tokens of an image share the time of the first one and differ in
height and width, and the next token continues after the largest of them. So an image of h x w tokens takes max(h, w)
positions, and the position of a token is its index plus a delta that only the images before it determine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from step_protocol.columns import I64, U32
from step_protocol.messages import ImageSpan, RowOpen
from worker_svc.engine.row_part import SomeRows
from worker_svc.engine.step import Step, StepPart


class MropePositions:
    """The positions of one sequence."""

    def __init__(self, spans: Iterable[ImageSpan]) -> None:
        """The spans ascend and do not overlap."""
        columns = [(span.start, span.end, span.width, max(span.height, span.width)) for span in spans]
        table = np.array(columns, np.int64).reshape(-1, 4).T
        self._starts, self._ends, self._widths, sizes = table
        deltas = np.cumsum(sizes - (self._ends - self._starts))
        self._deltas = np.concatenate((np.zeros(1, np.int64), deltas))  # [i]: of a token with i images before it

    @property
    def delta(self) -> int:
        """Position minus index of all tokens after the last image: `mrope_position_delta`."""
        return int(self._deltas[-1])

    @property
    def last_end(self) -> int:
        """Index after the last token of an image; 0 if there is none."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def of(self, indices: I64) -> I64:
        """Positions [3, n] of the tokens with these indices."""
        num_ended = np.searchsorted(self._ends, indices, side="right")
        positions = np.tile(indices + self._deltas[num_ended], (3, 1))
        in_image = np.flatnonzero(np.searchsorted(self._starts, indices, side="right") > num_ended)
        image = num_ended[in_image]
        offsets = indices[in_image] - self._starts[image]
        positions[:, in_image] -= offsets
        positions[1, in_image] += offsets // self._widths[image]
        positions[2, in_image] += offsets % self._widths[image]
        return positions


class RowPositions(SomeRows[MropePositions], StepPart):
    """The positions of all rows. A row without images has positions equal to indices."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self._deltas = np.zeros(max_num_seqs, np.int64)

    def _state_of(self, item: RowOpen) -> MropePositions:
        found = MropePositions(item.images)
        self._deltas[item.row] = found.delta
        return found

    def close(self, rows: U32) -> None:
        super().close(rows)
        self._deltas[rows[rows < len(self._deltas)]] = 0

    def reset(self) -> None:
        super().reset()
        self._deltas[:] = 0

    def before(self, step: Step) -> None:
        plan = step.plan
        step.forward.positions = self.shifted(plan.token_rows, plan.positions).astype(np.int32)
        on_axes = self.on_axes(plan.rows, plan.starts, plan.positions)
        if on_axes is not None:
            step.forward = step.model.at(step.forward, on_axes)

    def delta(self, row: int) -> int:
        """Position minus index of the tokens after the images of a row."""
        return int(self._deltas[row])

    def shifted(self, rows: I64, indices: I64) -> I64:
        """The positions of tokens after the images of their rows."""
        return indices + self._deltas[rows] if self.in_use else indices

    def on_axes(self, rows: I64, starts: I64, indices: I64) -> I64 | None:
        """The positions [3, T] of the tokens of a step; None if none of them is before the end of an image. Row i of
        the step has the tokens from `starts[i]` on, with these indices.
        """
        if not self.in_use:
            return None
        found: I64 | None = None
        for i, row in enumerate(rows.tolist()):
            images, tokens = self.in_use.get(row), slice(int(starts[i]), int(starts[i + 1]))
            if images is None or indices[tokens.start] >= images.last_end:
                continue
            if found is None:
                found = np.tile(self.shifted(np.repeat(rows, np.diff(starts)), indices), (3, 1))
            found[:, tokens] = images.of(indices[tokens])
        return found
