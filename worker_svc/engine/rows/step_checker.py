"""Checks a step against the open rows: columns, slots and forks of the batch without its bad rows."""

from __future__ import annotations

import numpy as np

from step_protocol.columns import I64, Bools
from step_protocol.messages import BadBatchError, StepBatch
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.step import CheckedStep, RowErrors


class StepChecker:
    """Checks batches against one row table and one pool."""

    def __init__(self, rows: OpenRows, info: EngineInfo) -> None:
        self._rows = rows
        self._info, self._num_blocks = info, info.num_all_blocks
        self._slot_owner = np.zeros(self._num_blocks * info.block_size, np.int64)

    def check_columns(self, batch: StepBatch) -> None:
        """Raises BadBatchError for columns that contradict the pool. Their lengths agree: the protocol checks them."""
        info = self._info
        num_tokens = len(batch.slot_mapping)
        if num_tokens > info.max_num_batched_tokens:
            raise BadBatchError(f"{num_tokens} tokens exceed max_num_batched_tokens {info.max_num_batched_tokens}")
        num_blocks, num_snapshots = self._num_blocks, info.num_snapshots or 0
        for name, end in (("copy_src", 0), ("copy_dst", 0), ("commit_blocks", num_snapshots)):
            blocks = getattr(batch, name)
            if len(blocks) and (block := int(blocks.max())) >= num_blocks + end:
                raise BadBatchError(f"{name} names block {block}, but the pool has {num_blocks} blocks")
        for check in self._rows.checks:
            check(batch)

    def check(self, batch: StepBatch, errors: RowErrors) -> CheckedStep:
        """The batch without its bad rows, which get their error in `errors`."""
        is_bad = self._rows.find_bad(batch, errors)
        tokens = _Tokens(batch, is_bad)
        wrong = self._find_bad_slots(batch, tokens, errors)
        for part in self._rows.block_parts if wrong is None else ():
            wrong = self._find_shared(part.slots(tokens.rows, tokens.positions), batch, tokens, errors)
        if wrong is not None:
            is_bad = wrong if is_bad is None else is_bad | wrong
            tokens = _Tokens(batch, is_bad)
        samplers, num_after = tokens.sample_mask.nonzero()[0], None
        if batch.draft_lens is not None:
            draft_lens = batch.draft_lens[tokens.kept[samplers]].astype(np.int64)
            samplers = np.repeat(samplers, draft_lens + 1)
            ends = np.cumsum(draft_lens + 1)
            num_after = np.repeat(ends, draft_lens + 1) - 1 - np.arange(len(samplers))
        sampling_rows, sources = tokens.batch_rows[samplers], samplers
        if len(batch.fork_rows):
            fork_rows, fork_sources = self._plan_forks(batch, tokens, errors)
            sampling_rows, sources = (
                np.concatenate((sampling_rows, fork_rows)),
                np.concatenate((samplers, fork_sources)),
            )
            if num_after is not None:
                num_after = np.append(num_after, np.zeros_like(fork_sources))
        return CheckedStep(
            rows=tokens.batch_rows,
            context_lens=tokens.context_lens,
            ends=tokens.ends,
            starts=tokens.starts,
            token_rows=tokens.rows,
            positions=tokens.positions,
            slots=tokens.slots,
            sampling_rows=sampling_rows,
            sources=sources,
            has_forks=len(sources) > len(samplers),
            num_after=num_after,
        )

    def _find_bad_slots(self, batch: StepBatch, tokens: _Tokens, errors: RowErrors) -> Bools | None:
        """Rows whose slots contradict their table, or that write a slot of another row; None if there are none."""
        expected = self._rows.expected_slots(tokens.rows, tokens.positions)
        is_same = expected == tokens.slots
        if is_same.all():
            slots, writers = expected, tokens.batch_indices
        else:
            slots, writers = expected[is_same], tokens.batch_indices[is_same]
        self._slot_owner[slots] = writers
        is_shared = self._slot_owner[slots] != writers
        if len(slots) == len(expected) and not is_shared.any():
            return None
        found = np.zeros(len(batch.rows), np.bool_)
        for i in np.flatnonzero(~is_same):
            errors.add(
                int(tokens.rows[i]),
                f"slot_mapping has slot {tokens.slots[i]} for position {tokens.positions[i]}, "
                f"but the row's table has slot {expected[i]}",
            )
            found[tokens.batch_indices[i]] = True
        for i in np.flatnonzero(is_shared):
            errors.add(int(batch.rows[writers[i]]), f"slot {slots[i]} is also written by another row of this step")
            found[writers[i]] = True
        return found

    def _find_shared(self, slots: I64, batch: StepBatch, tokens: _Tokens, errors: RowErrors) -> Bools | None:
        """The same for slots [n, T] of other blocks, which follow from tables: rows that write one of another row."""
        self._slot_owner[slots] = tokens.batch_indices
        is_shared = self._slot_owner[slots] != tokens.batch_indices
        if not is_shared.any():
            return None
        found = np.zeros(len(batch.rows), np.bool_)
        found[np.broadcast_to(tokens.batch_indices, slots.shape)[is_shared]] = True
        for i in np.flatnonzero(found).tolist():
            errors.add(int(batch.rows[i]), "a slot of a cache group is also written by another row of this step")
        return found

    def _plan_forks(self, batch: StepBatch, tokens: _Tokens, errors: RowErrors) -> tuple[I64, I64]:
        """Forks whose parent runs in this step, and the parents' indices among kept rows."""
        index_of = {int(row): i for i, row in enumerate(tokens.batch_rows)}
        rows, sources = [], []
        for row, parent in zip(batch.fork_rows.tolist(), batch.fork_parents.tolist(), strict=True):
            message = self._fork_refusal(row, parent, index_of, tokens.ends)
            if message is not None:
                errors.add(row, message)
                continue
            rows.append(row)
            sources.append(index_of[parent])
        return np.array(rows, np.int64), np.array(sources, np.int64)

    def _fork_refusal(self, row: int, parent: int, index_of: dict[int, int], ends: I64) -> str | None:
        if row >= self._info.max_num_seqs or not self._rows.is_open[row]:
            return "fork row is not open"
        if row in index_of:
            return "fork row computes in the step in which it is forked"
        if parent not in index_of:
            return f"fork parent {parent} does not compute in this step"
        end, known = int(ends[index_of[parent]]), int(self._rows.num_tokens[row])
        if end != known:
            return f"fork parent {parent} ends at {end} tokens, but this row has {known}"
        return None


class _Tokens:
    """The rows of a batch that are not bad (None: all of them), spread over their tokens."""

    def __init__(self, batch: StepBatch, is_bad: Bools | None) -> None:
        keep = np.arange(len(batch.rows)) if is_bad is None else np.flatnonzero(~is_bad)
        self.kept = keep  # [B] index into the whole batch
        query_lens, slots = batch.query_lens.astype(np.int64), batch.slot_mapping.astype(np.int64)
        self.batch_rows = batch.rows.astype(np.int64)  # [B]
        self.context_lens = batch.context_lens.astype(np.int64)
        self.sample_mask = batch.sample_mask
        if is_bad is not None:
            slots = slots[np.repeat(~is_bad, query_lens)]
            query_lens, self.batch_rows = query_lens[keep], self.batch_rows[keep]
            self.context_lens, self.sample_mask = self.context_lens[keep], self.sample_mask[keep]
        self.ends = self.context_lens + query_lens
        self.starts = np.zeros(len(keep) + 1, np.int64)  # [B + 1]
        query_lens.cumsum(out=self.starts[1:])
        self.slots = slots  # [T]
        self.batch_indices, self.rows, self.positions = keep, self.batch_rows, self.context_lens  # one token each
        if len(slots) == len(keep):
            return
        self.batch_indices = np.repeat(keep, query_lens)  # [T] index into the whole batch
        self.rows = np.repeat(self.batch_rows, query_lens)
        self.positions = np.arange(len(slots)) + np.repeat(self.context_lens - self.starts[:-1], query_lens)
