"""The positions of all rows. They differ from the indices of the tokens only in rows with images (mrope.py)."""

from __future__ import annotations

import numpy as np

from step_protocol.columns import I64, U32
from step_protocol.messages import RowOpen
from worker_svc.engine.rows.mrope import MropePositions


class RowPositions:
    """The positions of all rows. A row without images has positions equal to indices."""

    def __init__(self, max_num_seqs: int) -> None:
        self._rows: dict[int, MropePositions] = {}  # rows with images
        self._deltas = np.zeros(max_num_seqs, np.int64)

    def open(self, item: RowOpen) -> None:
        """Sets the images of a row."""
        self._close_one(item.row)
        if item.images:
            self._rows[item.row] = MropePositions(item.images)
            self._deltas[item.row] = self._rows[item.row].delta

    def close(self, rows: U32) -> None:
        """Rows without images are ignored."""
        if self._rows:
            for row in rows.tolist():
                self._close_one(row)

    def reset(self) -> None:
        """Closes all rows."""
        self._rows.clear()
        self._deltas[:] = 0

    def _close_one(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._deltas[row] = 0

    def shifted(self, rows: I64, indices: I64) -> I64:
        """The positions of tokens after the images of their rows."""
        return indices + self._deltas[rows] if self._rows else indices

    def on_axes(self, rows: I64, starts: I64, indices: I64) -> I64 | None:
        """The positions [3, T] of the tokens of a step; None if none of them is before the end of an image. Row i of
        the step has the tokens from `starts[i]` on, with these indices.
        """
        if not self._rows:
            return None
        found: I64 | None = None
        for i, row in enumerate(rows.tolist()):
            images, tokens = self._rows.get(row), slice(int(starts[i]), int(starts[i + 1]))
            if images is None or indices[tokens.start] >= images.last_end:
                continue
            if found is None:
                found = np.tile(self.shifted(np.repeat(rows, np.diff(starts)), indices), (3, 1))
            found[:, tokens] = images.of(indices[tokens])
        return found
