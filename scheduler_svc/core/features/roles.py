"""Prefill and decode workers: long prompts are computed where no running stream waits for them.

    role        prompts                                     running sequences
    both        all                                         stay
    prefill     all                                         leave for another worker after their first token
    decode      those that cost its streams little          stay

A prompt of U uncached tokens on a decode worker delays each of its R streams by the time of U tokens. Placement adds
that to the score of the worker (`policy.placement_scores`). So an idle decode worker computes
prompts like any other, a busy one computes short prompts while the prefill workers have more to do, and a small system
stays colocated.

A sequence leaves with its blocks: they go ahead while it runs on (block_moves.py), and it pauses for the tokens of its
last block only. While no other worker has room for it, it stays. If anything fails, its tokens are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from scheduler_svc.core.features.block_moves import BlockMoves, can_exchange, can_send
from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import Bools
from step_protocol.types import WorkerRole

MIN_REMAINING = 4  # tokens; a sequence that ends sooner stays
Room = tuple[int, int]  # free rows and blocks
ROOM_BLOCKS = 2  # free blocks that a worker needs besides those of the sequence


class Roles:
    """Which sequences leave their worker, and what a prompt costs where streams run."""

    def __init__(self, workers: Mapping[str, WorkerState], moves: BlockMoves) -> None:
        self._workers = workers
        self._moves = moves

    @property
    def is_on(self) -> bool:
        """Whether some worker has a role."""
        return any(worker.capacity.role is not WorkerRole.BOTH for worker in self._workers.values())

    def eligible(self, workers: Seq[WorkerState], seq: Sequence, eligible: Bools) -> Bools:
        """The workers that may run a waiting sequence, of those that could: one that has left a prefill worker does not
        return to it, if there is another one.
        """
        if seq.requeue_reason != MigrationReason.HANDOVER.value:
            return eligible
        others = eligible & np.array([worker.capacity.role is not WorkerRole.PREFILL for worker in workers])
        return others if others.any() else eligible

    def hand_overs(self, now: float) -> Iterator[tuple[WorkerState, Sequence]]:
        """The sequences that leave now: their blocks are on the other worker, or cost less than a move."""
        for worker in [one for one in self._workers.values() if one.capacity.role is WorkerRole.PREFILL]:
            takers = self._takers(worker)
            for seq in self._past_prompt(worker) if takers else ():
                able = [taker for taker in takers if self.has_room(taker, seq, self.room_of(taker))]
                if able and self._moves.leave(seq, worker, able, now):
                    yield worker, seq

    def _past_prompt(self, worker: WorkerState) -> list[Sequence]:
        table = worker.rows
        rows = table.active()
        has_output = table.num_tokens[rows] > table.prompt_len[rows]
        is_long = table.limit[rows] - table.num_tokens[rows] >= MIN_REMAINING
        rows = rows[has_output & is_long & ~table.is_awaiting[rows]]
        return [table.sequence(row) for row in rows.tolist() if can_send(worker, row)]

    def _takers(self, worker: WorkerState) -> list[WorkerState]:
        """The workers to which sequences of a worker may leave: decode workers if there are any."""
        others = [one for one in self._workers.values() if one.capacity.role is not WorkerRole.PREFILL]
        others = [one for one in others if not one.is_draining and can_exchange(one, worker)]
        return [one for one in others if one.capacity.role is WorkerRole.DECODE] or others

    def has_room(self, taker: WorkerState, seq: Sequence, room: Room) -> bool:
        """Whether a worker with so much room can take a running sequence, besides those on their way to it."""
        num_rows, num_blocks = self.room_left(room, seq, taker)
        is_free = num_rows >= self._moves.num_leaving_to(taker, besides=seq) and num_blocks >= 0
        return is_free and taker.could_run(seq.group)

    @staticmethod
    def room_of(taker: WorkerState) -> Room:
        """What a worker has free now."""
        return taker.num_free_rows, taker.pool.num_free

    @staticmethod
    def room_left(room: Room, seq: Sequence, taker: WorkerState) -> Room:
        """What is left when a running sequence, or its gang, has come; below 0: it has no room."""
        together = seq.group.sequences if seq.group.features.is_gang else [seq]
        num_rows = sum(1 + len(one.forks) for one in together if one.row is not None)
        num_blocks = num_rows * (seq.data.num_tokens // taker.capacity.block_size + ROOM_BLOCKS)
        return room[0] - num_rows, room[1] - num_blocks
