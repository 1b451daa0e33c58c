"""Whether a sequence ends with its newest token: EOS, a stop id, or max_tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from request_fields.fields import End, StopCondition
from scheduler_svc.core.sequence import FinishReason, Sequence
from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

REASONS = {End.EOS: FinishReason.EOS, End.STOP: FinishReason.STOP, End.LENGTH: FinishReason.LENGTH}


class Stops:
    """The stop rules of one model, for columns of new tokens and for a single token."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.uint32)

    def may_end(self, table: RowTable, rows: I64, token_ids: U32, *, may_reach_limit: bool) -> list[int]:
        """Indices of the rows that may end with their newest token: `end_of` decides. `may_reach_limit`: some row may
        have max_tokens.
        """
        found: list[int] = []
        for eos in self._eos:
            found += (token_ids == eos).nonzero()[0].tolist()
        if table.num_with_stop_ids:
            found += table.has_stop_ids[rows].nonzero()[0].tolist()
        if may_reach_limit:
            found += (table.num_tokens[rows] >= table.limit[rows]).nonzero()[0].tolist()
        return sorted(set(found)) if len(found) > 1 else found

    def end_of(self, table: RowTable, row: int, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Why a row ends with its newest token, and the token if it is a stop id; None if it continues."""
        num_tokens, group = table.num_tokens.item(row), table.sequence(row).group
        end = group.stop.end_of(token_id, num_tokens - len(group.prompt), self._eos_token_ids)
        if end is None and num_tokens < table.limit.item(row):
            return None
        return REASONS[end or End.LENGTH], token_id if end is End.STOP else None

    def is_complete(self, seq: Sequence) -> bool:
        """Whether a Continuation already ends with the token that ends the sequence."""
        output = seq.data.output
        if not len(output):
            return False
        return seq.group.stop.end_of(int(output[-1]), len(output), self._eos_token_ids) is not None

    def why(self, stop: StopCondition, last_token: int, num_output: int) -> tuple[FinishReason, int | None]:
        """The reason to end with this output token, and the token if it is a stop id. LENGTH: a limit is reached."""
        end = stop.end_of(last_token, num_output, self._eos_token_ids) or End.LENGTH
        return REASONS[end], last_token if end is End.STOP else None
