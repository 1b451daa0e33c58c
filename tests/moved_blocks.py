"""Blocks and extras that leave a real engine as records and enter another one, without services."""

from __future__ import annotations

import numpy as np

from prefix_index.hashing import layout_digest
from scheduler_svc.core.features.block_moves import BlockMove
from step_protocol.messages import StepBatch
from step_protocol.types import BlockMovement
from worker_svc.engine.step_runner import StepRunner
from worker_svc.kv_store.record import Origin, RecordFormat, WantedBlock


class MovedBlocks:
    """A worker's handling of its engine's blocks outside the pool. The tier outlives it."""

    def __init__(self, runner: StepRunner, tier: dict[bytes, bytes]) -> None:
        blocks, info = runner.movable_blocks(), runner.info
        assert blocks is not None
        self.tier = tier
        self.records = RecordFormat(layout_digest(info.revision, info.numerics, blocks.layout), blocks)
        self.movement = BlockMovement(self.records.layout, blocks.payload_bytes, has_tier=True, can_transfer=True)

    def _record(self, block: int, digest: bytes) -> bytes | None:
        records = self.records.of(block)
        found = np.empty(records.num_bytes, np.uint8)
        return found.tobytes() if records.pack(digest, Origin(1, block), found) else None

    def store(self, step: StepBatch) -> list[bytes]:
        """Write what a step has committed to the tier. Returns the digests."""
        commits = zip(step.commit_blocks.tolist(), step.commit_digests, strict=True)
        found = {digest: record for block, digest in commits if (record := self._record(block, digest)) is not None}
        self.tier.update(found)
        return list(found)

    def fetch(self, move: BlockMove, source: MovedBlocks | None) -> int:
        """Returns how many blocks and extras have arrived. `source`: None if it has ended."""
        items = list(zip(move.block_ids.tolist(), move.digests, list(move.token_blocks), strict=True))
        items += [(extra.block_id, extra.digest, extra.words) for extra in move.extras]
        ids = [] if move.source is None else move.source.block_ids.tolist()
        ids += [extra.source_id for extra in move.extras]
        for index, (block, digest, words) in enumerate(items):
            if move.source is None:
                record = self.tier.get(digest)
            else:
                record = None if source is None else source._record(ids[index], digest)
            if record is None:
                return index
            records, wanted = self.records.of(block), WantedBlock(digest, np.asarray(words), block)
            records.blocks.write(block - records.first_id, wanted.tokens, records.unpack(record, wanted).payload)
        return len(items)
