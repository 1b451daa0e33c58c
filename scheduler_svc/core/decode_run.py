"""Steady decode: while nobody comes or goes, a step is the step before it, one token further.

Most steps of a busy server are of this kind, so what does not change between them is kept, and what does changes by
adding one. The run ends when a row is opened or closed, reaches its limit, or finds no block; the next step is then
planned from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class DecodeRun:
    """Every row of a worker, each with one token to compute and one to sample, in the order of their batch."""

    version: int  # of the row table: the run holds while it stays the same
    rows: I64  # [N]
    sampled: U32  # [N] the same
    query_lens: I64  # [N] ones
    sample_mask: npt.NDArray[np.bool_]  # [N] true
    is_member: I64  # [max_num_seqs] 1 for a row of the run: adding a column is cheaper than picking rows
    token_starts: I64  # [N] index of position 1 of each row in the flat column of tokens
    first_offsets: I64  # [N] output position of the token at position 1
    owners: U32  # [N]
    handles: U32  # [N]
    sample_indices: U32  # [N]
    has_stop_ids: bool
    context_lens: I64  # [N] of the step planned last
    slots: U32  # [N] of the step planned last
    full: I64  # positions in `rows` of those whose block that step fills
    steps_left: int  # until a row reaches its limit

    @classmethod
    def after(cls, table: RowTable, rows: I64, context_lens: I64, slots: U32) -> DecodeRun:
        """The run that a step began in which every row decoded and sampled."""
        count = len(rows)
        is_member = np.zeros(len(table.computed), dtype=np.int64)
        is_member[rows] = 1
        return cls(
            version=table.version,
            rows=rows,
            sampled=rows.astype(np.uint32),
            query_lens=np.ones(count, dtype=np.int64),
            sample_mask=np.ones(count, dtype=np.bool_),
            is_member=is_member,
            token_starts=rows * table.tokens.shape[1] + 1,
            first_offsets=1 - table.prompt_len[rows],
            owners=table.owner[rows],
            handles=table.handle[rows],
            sample_indices=table.sample_index[rows],
            has_stop_ids=bool(table.has_stop_ids[rows].any()),
            context_lens=context_lens,
            slots=slots,
            full=table.fills_block(context_lens),
            steps_left=int((table.limit[rows] - table.num_tokens[rows] - table.pending[rows]).min()),
        )
