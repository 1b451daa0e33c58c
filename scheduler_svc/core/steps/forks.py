"""Forks: the sequences of a request that start from the prompt of another one, their leader.

The leader has a row and reserves one for each fork. When a step completes its prompt, the forks open in the same step:
they share the leader's blocks, and each samples its own first token from the same logits.

Forks with output (of a gang that was preempted and is computed again) cannot start from these logits. They are *late*:
they open one by one, as far as the pool has blocks. They share the full blocks of the prompt with the leader, which
admission counts on, and further blocks that are cached prefixes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import StepPlan, WorkerState
from step_protocol.columns import I64


class Forks:
    """Opens the forks of one worker's rows."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker

    def open_if_complete(self, row: int, count: int, plan: StepPlan) -> None:
        """If the next `count` tokens of this row complete its prompt, open its forks."""
        worker, r = self._worker, self._worker.rows
        leader = r.sequence(row)
        if not leader.forks or r.num_computed_tokens[row] + count < r.num_tokens[row]:
            return
        if len(leader.data.output):
            worker.late_forks.add(row)
            return
        for fork in leader.forks:
            self._open(fork, row, plan)
        worker.num_reserved_rows -= len(leader.forks)
        leader.forks = []

    def _open(self, fork: Sequence, row: int, plan: StepPlan) -> None:
        worker, r = self._worker, self._worker.rows
        prompt, table = fork.group.prompt, r.table[row, : r.num_blocks[row]].copy()
        fork.digests = list(r.sequence(row).digests)
        worker.pool.share(r.held_blocks(row))
        child = worker.open_row(fork, prompt, table, len(prompt), plan, parent=row)
        fork.is_admitted_before = True
        r.first_block[child] = r.first_block[row]
        r.num_planned[child] += 1 if r.limit[row] > len(prompt) and not r.is_awaiting[child] else 0
        plan.forks.append((child, row))

    # -- late forks ---------------------------------------------------------------------------------------------------

    def num_blocks_for_late(self) -> int:
        """Number of blocks that the late forks need."""
        return sum(self._num_unshared(row, fork) for row, fork in self._late())

    def open_late(self, plan: StepPlan, admit: Callable[[Sequence, I64, StepPlan], None]) -> None:
        """Admit late forks while the pool has blocks and the step has tokens left."""
        worker = self._worker
        for row, fork in self._late():
            hits, features = self._hits(row, fork), fork.group.features
            num_head_tokens = 0 if len(hits) else features.num_head_tokens
            if not plan.has_tokens_for(num_head_tokens) or not plan.has_room_for(features.num_bytes):
                return
            if self._num_unshared(row, fork) > worker.pool.num_free:
                return
            leader = worker.rows.sequence(row)
            leader.forks.remove(fork)
            worker.num_reserved_rows -= 1
            if not leader.forks:
                worker.late_forks.discard(row)
            admit(fork, hits, plan)

    def _late(self) -> list[tuple[int, Sequence]]:
        rows = self._worker.rows
        return [(row, fork) for row in self._worker.late_forks for fork in rows.sequence(row).forks]

    def _hits(self, row: int, fork: Sequence) -> I64:
        """The blocks from which a late fork starts: those of its cached prefix, or of the leader's prompt if that is
        longer. Behind an attention window the leader may have freed some that the fork needs.
        """
        r, bs = self._worker.rows, self._worker.capacity.block_size
        self._worker.extend_digests(fork)
        token_ids = fork.data.token_ids()
        hits = self._worker.find_hits(fork, token_ids)
        num_prompt = self._worker.usable_hits(fork.digests, len(fork.group.prompt) // bs, token_ids)
        if len(hits) >= num_prompt or r.first_block[row] > r.first_needed(num_prompt * bs):
            return hits
        return r.table[row, :num_prompt].astype(np.int64)

    def _num_unshared(self, row: int, fork: Sequence) -> int:
        return self._worker.num_missing(fork.data.num_tokens, self._hits(row, fork))
