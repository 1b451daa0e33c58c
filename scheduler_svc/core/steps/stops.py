"""When a sequence ends by its own tokens: EOS, a stop id, or as many as were asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


class Stops:
    """The rules of one model, for columns of new tokens and for single ones."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.uint32)

    def may_end(self, run: DecodeRun | None, token_ids: U32) -> bool:
        """One of these tokens may be one that ends its sequence."""
        if run is None or run.has_stop_ids:
            return True
        return any(len((token_ids == eos).nonzero()[0]) for eos in self._eos)

    def ending(self, table: RowTable, rows: I64, token_ids: U32) -> list[int]:
        """Positions of those rows that their newest token ends."""
        ends = table.num_tokens[rows] >= table.limit[rows]
        for eos in self._eos:
            ends |= (token_ids == eos) & ~table.ignore_eos[rows]
        has_stop_ids = table.has_stop_ids[rows]
        for i in np.flatnonzero(has_stop_ids & ~ends).tolist():
            ends[i] = int(token_ids[i]) in table.sequence(int(rows[i])).group.stop.stop_token_ids
        positions: list[int] = np.flatnonzero(ends).tolist()
        return positions

    def is_complete(self, seq: Sequence) -> bool:
        """A Continuation already holds the token that ends it."""
        output, stop = seq.data.output, seq.group.stop
        if not len(output):
            return False
        last = int(output[-1])
        is_eos = last in self._eos_token_ids and not stop.ignore_eos
        return is_eos or last in stop.stop_token_ids or len(output) >= stop.max_tokens

    def why(self, group: SequenceGroup, last_token: int) -> tuple[FinishReason, int | None]:
        """The reason to end with this token, and the stop id if it is one."""
        if last_token in self._eos_token_ids and not group.stop.ignore_eos:
            return FinishReason.EOS, None
        if last_token in group.stop.stop_token_ids:
            return FinishReason.STOP, last_token
        return FinishReason.LENGTH, None
