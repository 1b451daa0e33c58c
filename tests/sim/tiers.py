"""Blocks outside the pools of symbolic workers: tiers that survive a worker, and moves that tests end as they like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from prefix_index.hashing import snapshot_digest
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.features.block_sources import BlockSource
from scheduler_svc.core.messages import MovedExtra
from scheduler_svc.core.policy import TierKind
from tests.sim.symbolic_worker import SymbolicWorker, Violation


@dataclass(slots=True)
class Record:
    """A block in a tier or on its way, as a real record: what it is, and its content."""

    digest: bytes
    tokens: np.ndarray
    kv: np.ndarray
    is_damaged: bool = False  # a checksum would tell


Tier = dict[bytes, Record]


def tier_kinds(digests: Iterable[bytes]) -> dict[bytes, TierKind | None]:
    """In which tier each block is: the price does not change what a record holds."""
    return {digest: TierKind.MEMORY if digest[0] % 2 else TierKind.DISK for digest in digests}


def record_of(worker: SymbolicWorker, block: int, digest: bytes) -> Record:
    """The content of a worker's block now."""
    if (group := worker.group_of(block)) is not None:
        return Record(digest, *group.content_of(block - group.first_id))
    bs = worker.capacity.block_size
    span = slice(block * bs, (block + 1) * bs)
    return Record(digest, worker.kv_token[span].copy(), worker.kv[span].copy())


def damage(record: Record) -> None:
    """Flip a bit of the content."""
    record.kv = record.kv ^ np.uint64(1)
    record.is_damaged = True


def find_in_tier(tier: Tier, digest: bytes, tokens: np.ndarray) -> Record | None:
    """The record of exactly this block."""
    found = tier.get(digest)
    return found if found is not None and np.array_equal(found.tokens, tokens) and is_sound(found) else None


def is_sound(record: Record) -> bool:
    """The check of a record's checksum."""
    return not record.is_damaged


def is_same_process(source: BlockSource, worker: SymbolicWorker) -> bool:
    """The check of the source's epoch."""
    return worker.capacity.worker_epoch == source.worker_epoch


def is_still_there(worker: SymbolicWorker, block: int, digest: bytes) -> bool:
    """The check of a worker before and after it reads a block."""
    return worker.committed.get(block) == digest


def read_source(source: BlockSource, worker: SymbolicWorker, index: int, digest: bytes, is_held: bool) -> Record | None:
    """A block of another worker. If its scheduler holds it until the move ends, and is not another scheduler, it must
    not have changed.
    """
    block = int(source.block_ids[index])
    if not is_same_process(source, worker):
        return None
    if source.address or not is_held:
        return record_of(worker, block, digest) if is_still_there(worker, block, digest) else None
    if not worker.holds(block, digest):
        raise Violation(f"block {block} of {source.worker_id} was given away while it is read")
    return record_of(worker, block, digest)


def snapshot_record(worker: SymbolicWorker, slot: int, digest: bytes, words: np.ndarray | None = None) -> Record | None:
    """The snapshot in a slot now; None if it is not of so many tokens."""
    kept = worker.snapshots.get(slot)
    if kept is None or (words is not None and kept[0] != words[0]):
        return None
    return Record(digest, np.array(kept[:1], np.uint32), np.array(kept[1:], np.uint64))


def find_snapshot(tier: Tier, extra: MovedExtra) -> Record | None:
    """The snapshot of exactly these tokens."""
    found = tier.get(extra.digest)
    return found if found is not None and found.tokens[0] == extra.words[0] and is_sound(found) else None


def read_snapshot(source: BlockSource, worker: SymbolicWorker, extra: MovedExtra, is_held: bool) -> Record | None:
    """A snapshot of another worker. If the scheduler still holds it for the move, it must be there. One that another
    scheduler lends may have gone.
    """
    if not (is_held and is_same_process(source, worker)):
        return None
    slot = extra.source_id - worker.capacity.num_all_blocks
    if source.address and not is_snapshot_after(worker, slot, extra.block_digest):
        return None
    record = snapshot_record(worker, slot, extra.digest, extra.words)
    if record is None:
        raise Violation(f"snapshot {extra.source_id} of {source.worker_id} was given away while it is read")
    return record


def read_group(source: BlockSource, worker: SymbolicWorker, extra: MovedExtra, is_held: bool) -> Record | None:
    """A block of a cache group of another worker. As `read_snapshot`."""
    if not (is_held and is_same_process(source, worker)):
        return None
    if source.address and not worker.holds(extra.source_id, extra.digest):
        return None
    if not worker.holds(extra.source_id, extra.digest):
        raise Violation(f"block {extra.source_id} of {source.worker_id} was given away while it is read")
    return record_of(worker, extra.source_id, extra.digest)


def is_snapshot_of(worker: SymbolicWorker, slot: int, digest: bytes) -> bool:
    """Whether a slot holds the snapshot that is committed with this digest."""
    block = _block_of_snapshot(worker, slot)
    return block is not None and snapshot_digest(block) == digest


def is_snapshot_after(worker: SymbolicWorker, slot: int, block: bytes) -> bool:
    """The check of a worker, by the chain of the tokens, whether a slot holds the snapshot after this block."""
    return _block_of_snapshot(worker, slot) == block


def _block_of_snapshot(worker: SymbolicWorker, slot: int) -> bytes | None:
    kept = worker.snapshots.get(slot)
    return None if kept is None else worker.chains.by_prefix.get(kept[1])


def fetch_extras(
    move: BlockMove,
    target: SymbolicWorker,
    workers: Mapping[str, SymbolicWorker],
    tier: Tier,
    limit: int,
    is_held: bool,
) -> int:
    """`fetch` for extras, which follow the blocks."""
    for index, extra in enumerate(move.extras[:limit]):
        source = None if move.source is None else workers.get(move.source.worker_id)
        group = target.group_of(extra.block_id)
        if move.source is None:
            found = find_snapshot(tier, extra) if group is None else find_in_tier(tier, extra.digest, extra.words)
        else:
            read = read_snapshot if group is None else read_group
            found = None if source is None else read(move.source, source, extra, is_held)
        if found is None:
            return index
        if group is not None:
            group.deposit(extra.block_id - group.first_id, found.tokens, found.kv, extra.block_digest)
            continue
        target.snapshots[extra.block_id - target.capacity.num_all_blocks] = int(found.tokens[0]), int(found.kv[0])
    return min(limit, len(move.extras))


def fetch(
    move: BlockMove,
    target: SymbolicWorker,
    workers: Mapping[str, SymbolicWorker],
    tier: Tier,
    limit: int,
    *,
    is_held: bool = True,
) -> int:
    """Carries out the order at the target; it gets at most `limit` blocks and extras. Returns how many arrived."""
    for index, (block, digest) in enumerate(zip(move.block_ids.tolist(), move.digests, strict=True)):
        if index >= limit:
            return index
        source = None if move.source is None else workers.get(move.source.worker_id)
        if move.source is None:
            record = find_in_tier(tier, digest, move.token_blocks[index])
        else:
            record = None if source is None else read_source(move.source, source, index, digest, is_held)
        if record is None:
            return index
        target.deposit(block, record.tokens, record.kv, digest)
    return len(move.digests) + fetch_extras(move, target, workers, tier, max(0, limit - len(move.digests)), is_held)
