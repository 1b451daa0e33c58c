"""Whether a sequence ends with its newest token: EOS, a stop id, or max_tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from request_fields.fields import End, StopCondition
from scheduler_svc.core.sequence import FinishReason, Sequence
from scheduler_svc.core.steps.decode_run import DecodeRun
from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


class Stops:
    """The stop rules of one model, for columns of new tokens and for a single token."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.uint32)

    def may_end(self, run: DecodeRun | None, token_ids: U32) -> bool:
        """Whether any of these tokens may end its sequence."""
        if run is None or run.has_stop_ids:
            return True
        return any(len((token_ids == eos).nonzero()[0]) for eos in self._eos)

    def ending(self, table: RowTable, rows: I64, token_ids: U32) -> list[int]:
        """Indices of the rows that end with their newest token."""
        ends = table.num_tokens[rows] >= table.limit[rows]
        may_end = table.has_stop_ids[rows]
        for eos in self._eos:
            may_end |= (token_ids == eos) & ~table.ignore_eos[rows]
        for i in np.flatnonzero(may_end & ~ends).tolist():
            row = int(rows[i])
            num_output = int(table.num_tokens[row] - table.prompt_len[row])
            stop = table.sequence(row).group.stop
            ends[i] = stop.end_of(int(token_ids[i]), num_output, self._eos_token_ids) is not None
        positions: list[int] = np.flatnonzero(ends).tolist()
        return positions

    def is_complete(self, seq: Sequence) -> bool:
        """Whether a Continuation already ends with the token that ends the sequence."""
        output = seq.data.output
        if not len(output):
            return False
        return seq.group.stop.end_of(int(output[-1]), len(output), self._eos_token_ids) is not None

    def why(self, stop: StopCondition, last_token: int, num_output: int) -> tuple[FinishReason, int | None]:
        """The reason to end with this output token, and the token if it is a stop id. LENGTH: a limit is reached."""
        end = stop.end_of(last_token, num_output, self._eos_token_ids) or End.LENGTH
        return FinishReason(end.value), last_token if end is End.STOP else None
