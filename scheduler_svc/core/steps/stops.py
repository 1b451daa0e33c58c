"""Whether a sequence ends with its newest token: EOS, a stop id, or max_tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from request_fields.fields import End, StopCondition
from scheduler_svc.core.sequence import FinishReason, Sequence
from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


class Stops:
    """The stop rules of one model, for columns of new tokens and for a single token."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.uint32)

    def ending(self, table: RowTable, rows: I64, token_ids: U32, *, may_reach_limit: bool) -> list[int]:
        """Indices of the rows that end with their newest token. `may_reach_limit`: some row may have max_tokens."""
        may_end: set[int] = set()
        for eos in self._eos:
            may_end.update((token_ids == eos).nonzero()[0].tolist())
        if table.num_with_stop_ids:
            may_end.update(table.has_stop_ids[rows].nonzero()[0].tolist())
        if not may_end and not may_reach_limit:
            return []
        ending = {i for i in may_end if self._ends(table, int(rows[i]), int(token_ids[i]))}
        if may_reach_limit:
            ending.update((table.num_tokens[rows] >= table.limit[rows]).nonzero()[0].tolist())
        return sorted(ending)

    def _ends(self, table: RowTable, row: int, token_id: int) -> bool:
        if table.ignore_eos[row] and not table.has_stop_ids[row]:
            return False
        num_output = int(table.num_tokens[row] - table.prompt_len[row])
        return table.sequence(row).group.stop.end_of(token_id, num_output, self._eos_token_ids) is not None

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
