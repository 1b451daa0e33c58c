"""What a step computes once its bad rows are out: a batch's columns, slots and forks against the rows that are open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker_svc.engine.backend import I64
from worker_svc.engine.batch import BadBatchError, Bools, StepBatch
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.rows import RowErrors, RowTable

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepPlan:
    """B rows that compute T tokens, and S of them or of their forks that sample. All of it is valid."""

    rows: I64  # [B]
    context_lens: I64  # [B] tokens in the pool before this step
    ends: I64  # [B] sequence position after the last token
    starts: I64  # [B + 1] first token of each row
    token_rows: I64  # [T]
    positions: I64  # [T]
    slots: I64  # [T] where keys and values go
    sampling_rows: I64  # [S] those of the sample mask in batch order, then forks
    sources: I64  # [S] index in `rows` of the one whose last logits each samples from

    @property
    def sampled_positions(self) -> I64:
        """[S] sequence positions of the tokens to sample."""
        return self.ends[self.sources]


class StepPlanner:
    """Checks batches against one row table and one pool."""

    def __init__(self, rows: RowTable, info: EngineInfo) -> None:
        self._rows = rows
        self._info = info
        self._slot_owner = np.zeros(info.num_blocks * info.block_size, np.int64)

    def check_columns(self, batch: StepBatch) -> None:
        """Raises BadBatchError for columns that contradict each other or the pool."""
        num_rows, info = len(batch.rows), self._info
        columns = {"query_lens": batch.query_lens, "context_lens": batch.context_lens, "sample_mask": batch.sample_mask}
        for name, column in columns.items():
            _check_length(name, len(column), "rows", num_rows)
        num_tokens = int(batch.query_lens.sum(dtype=np.int64))
        _check_length("slot_mapping", len(batch.slot_mapping), "sum of query_lens", num_tokens)
        if num_tokens > info.max_num_batched_tokens:
            raise BadBatchError(f"{num_tokens} tokens are above max_num_batched_tokens {info.max_num_batched_tokens}")
        _check_length("table_indices", len(batch.table_indices), "table_rows", len(batch.table_rows))
        _check_length("table_blocks", len(batch.table_blocks), "table_rows", len(batch.table_rows))
        _check_length("copy_dst", len(batch.copy_dst), "copy_src", len(batch.copy_src))
        _check_length("commit_hashes", len(batch.commit_hashes), "commit_blocks", len(batch.commit_blocks))
        _check_length("fork_parents", len(batch.fork_parents), "fork_rows", len(batch.fork_rows))
        if any(len(digest) != HASH_BYTES for digest in batch.commit_hashes):
            raise BadBatchError(f"commit_hashes must have {HASH_BYTES} bytes each")
        for name in ("copy_src", "copy_dst", "commit_blocks"):
            block = int(getattr(batch, name).max(initial=0))
            if block >= info.num_blocks:
                raise BadBatchError(f"{name} names block {block}, the pool has {info.num_blocks}")

    def plan(self, batch: StepBatch, errors: RowErrors) -> StepPlan:
        """What remains of the batch once bad rows are out; they are told in `errors`."""
        is_bad = self._rows.find_bad(batch, errors)
        is_bad |= self._find_bad_slots(batch, is_bad, errors)
        keep = np.flatnonzero(~is_bad)
        tokens = _Tokens(batch, keep)
        fork_rows, fork_sources = self._plan_forks(batch, keep, errors)
        samplers = np.flatnonzero(batch.sample_mask[keep])
        return StepPlan(
            rows=tokens.batch_rows,
            context_lens=tokens.context_lens,
            ends=tokens.ends,
            starts=tokens.starts,
            token_rows=tokens.rows,
            positions=tokens.positions,
            slots=tokens.slots,
            sampling_rows=np.concatenate((tokens.batch_rows[samplers], fork_rows)),
            sources=np.concatenate((samplers, fork_sources)),
        )

    def _find_bad_slots(self, batch: StepBatch, is_bad: Bools, errors: RowErrors) -> Bools:
        """Rows whose slots disagree with their table, or that write where another row of the batch writes."""
        tokens = _Tokens(batch, np.flatnonzero(~is_bad))
        expected = self._rows.expected_slots(tokens.rows, tokens.positions)
        found = np.zeros(len(batch.rows), np.bool_)
        for i in np.flatnonzero(expected != tokens.slots):
            errors.add(
                int(tokens.rows[i]),
                f"slot_mapping has slot {tokens.slots[i]} for position {tokens.positions[i]}, "
                f"the row's table has {expected[i]}",
            )
            found[tokens.batch_indices[i]] = True
        is_same = expected == tokens.slots
        slots, writers = expected[is_same], tokens.batch_indices[is_same]
        self._slot_owner[slots] = writers
        for i in np.flatnonzero(self._slot_owner[slots] != writers):
            errors.add(int(batch.rows[writers[i]]), f"slot {slots[i]} is written by another row of this step too")
            found[writers[i]] = True
        return found

    def _plan_forks(self, batch: StepBatch, keep: I64, errors: RowErrors) -> tuple[I64, I64]:
        """Forks whose parent runs in this step, and the parents' indices among kept rows."""
        if not len(batch.fork_rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        index_of = {int(row): i for i, row in enumerate(batch.rows[keep])}
        ends = (batch.context_lens.astype(np.int64) + batch.query_lens)[keep]
        rows, sources = [], []
        for row, parent in zip(batch.fork_rows.tolist(), batch.fork_parents.tolist(), strict=True):
            message = self._fork_refusal(row, parent, index_of, ends)
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
        end, known = int(ends[index_of[parent]]), int(self._rows.num_tokens(np.array([row]))[0])
        if end != known:
            return f"fork parent {parent} ends at {end} tokens, this row knows {known}"
        return None


class _Tokens:
    """The kept rows of a batch, spread over their tokens."""

    def __init__(self, batch: StepBatch, keep: I64) -> None:
        query_lens = batch.query_lens.astype(np.int64)
        all_starts = np.cumsum(query_lens) - query_lens
        lens = query_lens[keep]
        self.batch_rows = batch.rows[keep].astype(np.int64)  # [B]
        self.context_lens = batch.context_lens[keep].astype(np.int64)
        self.ends = self.context_lens + lens
        self.starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lens)))  # [B + 1]
        within = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], lens)
        self.batch_indices = np.repeat(keep, lens)  # [T] index into the whole batch
        self.rows = np.repeat(self.batch_rows, lens)
        self.positions = np.repeat(self.context_lens, lens) + within
        self.slots = batch.slot_mapping[np.repeat(all_starts[keep], lens) + within].astype(np.int64)


def _check_length(name: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise BadBatchError(f"{name} has {length} entries, {of} has {expected}")
