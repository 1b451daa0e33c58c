"""The states of open rows of a model with recurrent layers, and the snapshots that a step takes of them.

A row's state has no meaning without its position: the number of tokens that it includes. A step must continue there.
A snapshot is used only for a row with exactly its tokens and its adapter; both are compared when the row opens.

A step with drafts leaves the states before each of them in further slots. When it is known which drafts are right, a
row continues from the state after its last token. There is one arithmetic: the bytes are those of a run without drafts.
To compute the tokens again from the old state would read and write a state as often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prefix_index.hashing import STATE_ID_BYTES, state_id
from step_protocol.columns import EMPTY, I32, I64, U32, Bools
from step_protocol.features import TakenSnapshots
from step_protocol.messages import BadBatchError, RowOpen, StepBatch
from worker_svc.engine.backend import SnapshotColumns
from worker_svc.engine.decoder.pool.block_payload import Bytes, InHostMemory, Movable
from worker_svc.engine.row_part import BlockPart
from worker_svc.engine.step import CheckedStep, Logits, RowErrors, Sampled, Step, StepPart

if TYPE_CHECKING:
    import torch  # rows work where torch is not installed

    from worker_svc.engine.recurrent import StatePool
    from worker_svc.engine.rows.open_rows import OpenRows

UNKNOWN = -1


@dataclass(eq=False, slots=True)
class KeptState:
    """What a slot holds. Each write of a slot makes a new one."""

    state_id: bytes
    digest: bytes = b""  # under which it is committed


class RowStates(BlockPart, StepPart):
    """The position of each row's state, and what the snapshot slots hold."""

    why_bad = "context_len is {context_len}, but the row's state is at another position"

    def __init__(self, pool: StatePool, rows: OpenRows, num_group_blocks: int) -> None:
        """`num_group_blocks`: of the cache groups after the first one."""
        self._first_id = rows.num_blocks + num_group_blocks  # of the snapshots, among ids of blocks
        self._pool = pool
        self._tokens = rows.tokens
        self.num_drafts = pool.num_drafts  # of a step
        self.positions: I64 = np.full(pool.num_rows, UNKNOWN, np.int64)
        self._adapters: list[bytes] = [b""] * pool.num_rows
        self._kept: list[KeptState | None] = [None] * pool.num_snapshots
        self._drafts: I64 = np.empty(0, np.int64)  # of each row of the step

    # -- rows ---------------------------------------------------------------------------------------------------------

    def check(self, batch: StepBatch) -> None:
        taken = batch.part(TakenSnapshots)
        slots = EMPTY if taken is None else taken.slots
        if len(slots) and (int(slots.max()) >= self._pool.num_snapshots or len(np.unique(slots)) < len(slots)):
            raise BadBatchError(
                f"snapshot_slots names slot {int(slots.max())}, or one slot twice; this worker has "
                f"{self._pool.num_snapshots}"
            )

    def refusal(self, item: RowOpen) -> str | None:
        if item.fork_of_row is not None:
            return None
        if item.snapshot is None:
            if not item.num_computed_tokens:
                return None
            return f"num_computed_tokens is {item.num_computed_tokens}, but the row starts from no snapshot"
        if item.snapshot >= self._pool.num_snapshots:
            return f"snapshot {item.snapshot} is beyond the {self._pool.num_snapshots} snapshots of this worker"
        kept = self._kept[item.snapshot]
        if kept is None or kept.state_id != state_id(item.token_ids[: item.num_computed_tokens], item.adapter):
            return f"snapshot {item.snapshot} is not of the first {item.num_computed_tokens} tokens of the row"
        return None

    def open(self, item: RowOpen) -> None:
        row = item.row
        self._adapters[row] = item.adapter
        if item.fork_of_row is not None:
            self.positions[row] = UNKNOWN  # until its parent's prompt is computed in this step
            return
        self.positions[row] = item.num_computed_tokens
        if item.snapshot is not None:
            self._pool.copy([self._pool.num_rows + item.snapshot], [row])

    def close(self, rows: U32) -> None:
        self.positions[rows[rows < len(self.positions)]] = UNKNOWN

    def reset(self) -> None:
        """Closes all rows. Another scheduler knows no snapshot, so all of them are forgotten."""
        self.positions[:] = UNKNOWN
        self.forget_snapshots()

    def forget_snapshots(self) -> None:
        """No row starts from a snapshot that was taken so far."""
        self._kept[:] = [None] * self._pool.num_snapshots

    def are_bad(self, rows: I64, context_lens: I64, ends: I64, num_computed: I64) -> Bools:
        """Rows whose state is not at the position where their tokens of this step begin."""
        found: Bools = self.positions[rows] != context_lens
        return found

    def move(self, sources: I64, targets: I64) -> None:
        self._pool.copy(sources.tolist(), targets.tolist())
        self.positions[targets] = self.positions[sources]

    # -- steps --------------------------------------------------------------------------------------------------------

    def use(self, weights: Any) -> None:
        self.forget_snapshots()

    def before(self, step: Step) -> None:
        """The snapshots of a step. Its rows have no known state until `computed`, in case the step fails."""
        step.forward.snapshots = self.snapshots(step.batch, step.plan)

    def snapshots(self, batch: StepBatch, plan: CheckedStep) -> SnapshotColumns:
        """The states that a step keeps, as slots of the pool."""
        self.positions[plan.rows] = UNKNOWN
        starts = np.zeros(len(plan.rows) + 1, np.int32)
        slots, places, positions = self._of_drafts(plan)
        if (taken := batch.part(TakenSnapshots)) is not None:
            for slot in taken.slots.tolist():
                self._kept[slot] = None
            slots = np.append(slots, taken.slots.astype(np.int64) + self._pool.num_rows)
            places = np.append(places, self._places(taken, plan))
            positions = np.append(positions, taken.positions)
        keep = np.flatnonzero(places >= 0)
        if not len(keep):
            empty: I32 = np.zeros(1, np.int32)  # the kernels need an address
            return SnapshotColumns(starts, empty, empty)
        keep = keep[np.lexsort((positions[keep], places[keep]))]
        places, positions = places[keep], positions[keep]
        np.cumsum(np.bincount(places, minlength=len(plan.rows)), out=starts[1:])
        ends = (positions - plan.context_lens[places]).astype(np.int32)
        return SnapshotColumns(starts, ends, slots[keep].astype(np.int32))

    def _of_drafts(self, plan: CheckedStep) -> tuple[I64, I64, I64]:
        """The states within the drafts of a step: slots, indices of their rows, and positions."""
        self._drafts = np.zeros(len(plan.rows), np.int64)
        if plan.num_after is not None:
            np.maximum.at(self._drafts, plan.sources, plan.num_after)
        places = np.repeat(np.arange(len(plan.rows)), self._drafts)
        behind = np.cumsum(self._drafts)[places] - np.arange(len(places))  # drafts from there on
        slots = self._pool.num_rows + self._pool.num_snapshots + np.arange(len(places))
        return slots, places, plan.ends[places] - behind

    def sampled(self, step: Step, logits: Logits, found: Sampled) -> None:
        self.choose(step.plan, found.is_token)

    def choose(self, plan: CheckedStep, is_token: Bools) -> None:
        """The newest step has ended: a row gets the state before its first wrong draft."""
        if plan.num_after is None:
            return
        counts = np.bincount(plan.sources[is_token], minlength=len(plan.rows))
        first = self._pool.num_rows + self._pool.num_snapshots + np.cumsum(self._drafts) - self._drafts
        for i in np.flatnonzero((self._drafts > 0) & (counts <= self._drafts)).tolist():
            row, count = int(plan.rows[i]), max(int(counts[i]), 1)  # a row without a token fails
            self._pool.copy([int(first[i]) + count - 1], [row])
            self.positions[row] = plan.ends[i] - self._drafts[i] + count - 1

    def _places(self, taken: TakenSnapshots, plan: CheckedStep) -> I64:
        """For each snapshot of a step, the index of its row among the rows that compute; -1: none of them does."""
        place_of = np.full(len(self.positions), -1, np.int64)
        place_of[plan.rows] = np.arange(len(plan.rows))
        places = place_of[np.minimum(taken.rows, len(place_of) - 1)]
        positions = taken.positions.astype(np.int64)
        is_inside = (positions > plan.context_lens[places]) & (positions <= plan.ends[places])
        return np.where(is_inside & (taken.rows < len(place_of)), places, -1)

    def computed(self, step: Step, logits: torch.Tensor) -> None:
        self.end(step.batch, step.plan, step.errors)

    def end(self, batch: StepBatch, plan: CheckedStep, errors: RowErrors) -> None:
        """The rows have states again, forks those of their parents, and the snapshots are kept."""
        self.positions[plan.rows] = plan.ends
        if plan.has_forks:
            forks, parents = batch.fork_rows.tolist(), batch.fork_parents.tolist()
            pairs = [pair for pair in zip(parents, forks, strict=True) if pair[1] not in errors]
            self.move(*np.array(pairs, np.int64).reshape(-1, 2).T)
        if (taken := batch.part(TakenSnapshots)) is None:
            return
        places = self._places(taken, plan)
        for i in np.flatnonzero(places >= 0).tolist():
            row, position = int(taken.rows[i]), int(taken.positions[i])
            kept = KeptState(state_id(self._tokens[row, :position], self._adapters[row]))
            self._kept[int(taken.slots[i])] = kept

    def commit(self, blocks: I64, digests: list[bytes]) -> tuple[I64, list[bytes]]:
        """The snapshots in these slots may be kept elsewhere under these digests."""
        is_own = blocks >= self._first_id
        for i in np.flatnonzero(is_own).tolist():
            if (kept := self._kept[int(blocks[i]) - self._first_id]) is not None:
                kept.digest = digests[i]
        return blocks[~is_own], [digests[i] for i in np.flatnonzero(~is_own).tolist()]

    def movable(self) -> list[Movable]:
        """The snapshots as bytes."""
        return [MovableSnapshots(self._pool, self._kept)]


class MovableSnapshots(InHostMemory):
    """Snapshots as `MovableBlocks` are blocks: read in any thread while steps run, written in the model thread.

    In place of the tokens of a block they have the words of their `state_id`. A reader names a snapshot by the digest
    under which it is committed, or by the chain of its `state_id`, which it has from the step on that took it.
    """

    block_size = STATE_ID_BYTES // 4
    others: Sequence[Movable] = ()

    def __init__(self, pool: StatePool, kept: list[KeptState | None]) -> None:
        self._slots = pool.slots[pool.num_rows : pool.num_rows + pool.num_snapshots].numpy().view(np.uint8)
        self._kept = kept
        self.layout = [(f"state {pool.layout}", [self._slots.shape[1]])]
        self.num_blocks, self.payload_bytes = self._slots.shape

    def digests_of(self, slots: U32) -> tuple[U32, list[bytes]]:
        found = [
            (slot, kept.digest) for slot in slots.tolist() if (kept := self._kept[slot]) is not None and kept.digest
        ]
        return np.array([slot for slot, _ in found], np.uint32), [digest for _, digest in found]

    def read(self, slot: int, digest: bytes, into: Bytes | None = None) -> tuple[U32, Bytes] | None:
        """The words and the bytes of a snapshot; None if the slot holds another one, or was written meanwhile."""
        kept = self._kept[slot] if slot < self.num_blocks else None
        if kept is None or digest not in (kept.digest, kept.state_id[-len(digest) :]):
            return None
        payload = np.empty(self.payload_bytes, np.uint8) if into is None else into
        payload[:] = self._slots[slot]
        return (np.frombuffer(kept.state_id, np.uint32), payload) if self._kept[slot] is kept else None

    def write(self, slot: int, words: U32, payload: Bytes) -> None:
        """Fills a slot."""
        self._kept[slot] = None
        self._slots[slot] = payload
        self._kept[slot] = KeptState(words.tobytes())
