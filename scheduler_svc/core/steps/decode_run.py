"""Steady decode: while nobody comes, a step is the step before it, one token further.

Most steps of a busy server are of this kind, so what does not change between them is kept, and what does changes by
adding one. A row that is closed or reaches its limit leaves the run. The run ends when a row is opened or finds no
block; the next step is then planned from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.steps.rows import RowTable

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
ONE = np.uint32(1)


@dataclass(slots=True)
class DecodeRun:
    """Every row of a worker that has something to compute: one token, and one to sample. In the order of the batch."""

    num_opened: int  # of the row table: the run holds while it stays the same
    generation: I64  # of all rows of the table when the run was last looked through
    rows: I64  # [N]
    sampled: U32  # [N] the same
    query_lens: U32  # [N] ones
    sample_mask: npt.NDArray[np.bool_]  # [N] true
    is_member: I64  # [max_num_seqs] 1 for a row of the run: adding a column is cheaper than picking rows
    token_starts: I64  # [N] index of position 1 of each row in the flat column of tokens
    first_offsets: U32  # [N] output position of the token at position 1, modulo 2**32
    owners: U32  # [N]
    owner: int | None  # if it is everybody's
    handles: U32  # [N]
    sample_indices: U32  # [N]
    has_stop_ids: bool
    context_lens: U32  # [N] of the step planned last
    slots: U32  # [N] of the step planned last
    full: I64  # positions in `rows` of those whose block that step fills
    steps_left: int  # until a row reaches its limit
    by_phase: I64  # [N] positions in `rows`, in the order in which their blocks will be full
    phases: list[int]  # [block_size + 1] part p of `by_phase` is full p steps from now, or that and whole blocks
    phase: int  # of the step planned last

    @classmethod
    def after(cls, table: RowTable, rows: I64, context_lens: I64, slots: U32) -> DecodeRun:
        """The run that goes on from rows that are computed up to and with position `context_lens`, at `slots`."""
        count, block_size = len(rows), table.block_size
        is_member = np.zeros(len(table.computed), dtype=np.int64)
        is_member[rows] = 1
        owners = table.owner[rows]
        steps_to_full = (block_size - 1 - context_lens) % block_size
        by_phase = steps_to_full.argsort(kind="stable")
        phases = steps_to_full[by_phase].searchsorted(np.arange(block_size + 1)).tolist()
        return cls(
            num_opened=table.num_opened,
            generation=table.generation,
            rows=rows,
            sampled=rows.astype(np.uint32),
            query_lens=np.ones(count, dtype=np.uint32),
            sample_mask=np.ones(count, dtype=np.bool_),
            is_member=is_member,
            token_starts=rows * table.tokens.shape[1] + 1,
            first_offsets=(1 - table.prompt_len[rows]).astype(np.uint32),
            owners=owners,
            owner=int(owners[0]) if (owners == owners[0]).all() else None,
            handles=table.handle[rows],
            sample_indices=table.sample_index[rows],
            has_stop_ids=bool(table.has_stop_ids[rows].any()),
            context_lens=context_lens.astype(np.uint32),
            slots=slots,
            full=by_phase[: phases[1]],
            steps_left=int((table.limit[rows] - table.num_tokens[rows] - table.pending[rows]).min()),
            by_phase=by_phase,
            phases=phases,
            phase=0,
        )

    def without_gone(self, table: RowTable) -> DecodeRun | None:
        """The run without rows that were closed or have reached their limit; None if nobody stays."""
        rows = self.rows
        is_open = self.generation[rows] == table.generation[rows]
        stays = is_open & (table.num_tokens[rows] + table.pending[rows] < table.limit[rows])
        if stays.all():
            self.generation = table.generation
            return self
        if not stays.any():
            return None
        return DecodeRun.after(table, rows[stays], self.context_lens[stays].astype(np.int64), self.slots[stays])

    def advance(self, new_blocks: I64 | None, block_size: int) -> None:
        """One step further. `new_blocks`: of the rows that were full."""
        self.context_lens, self.slots = self.context_lens + ONE, self.slots + ONE
        if new_blocks is not None:
            self.slots[self.full] = new_blocks * block_size
        self.phase = (self.phase + 1) % block_size
        self.full = self.by_phase[self.phases[self.phase] : self.phases[self.phase + 1]]
        self.steps_left -= 1
