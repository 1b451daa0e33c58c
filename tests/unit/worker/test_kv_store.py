"""The tiers, and the disk tier under an injector: what they serve is exactly the wanted block, whatever happens."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from prefix_index.hashing import (
    STATE_ID_BYTES,
    block_key,
    chained,
    extra_keys,
    layout_digest,
    model_salt,
    root_digest,
    root_key,
    snapshot_digest,
    state_id,
)
from worker_svc.engine.decoder.pool.block_payload import MovableBlocks
from worker_svc.engine.recurrent import Recurrence, StatePool
from worker_svc.engine.rows.states import KeptState, MovableSnapshots
from worker_svc.kv_store.block_store import BlockStore, Committed
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.memory_tier import MemoryTier
from worker_svc.kv_store.record import CHECKSUM_BYTES, HEADER, MAGIC, Origin, RecordFormat, WantedBlock
from worker_svc.simulator.pool import SimPool

BLOCK_SIZE, NUM_BLOCKS, NUM_SNAPSHOTS = 4, 24, 8
STATE = Recurrence("short_conv", 1, 1, 2, 2, 3)
SNAPSHOT_BYTES = HEADER.size + STATE_ID_BYTES + StatePool.bytes_per_slot([STATE]) + CHECKSUM_BYTES
DEADLINE_S = 20.0
LAYOUT, OTHER_REVISION = (layout_digest(name, "sim", [("uint64", [1, BLOCK_SIZE])]) for name in ("r1", "r2"))


def make_block(pool: SimPool, block: int, salt: bytes = b"") -> bytes:
    """Fill and commit a block. Returns its digest."""
    rng = np.random.default_rng([block, len(salt)])
    slots = np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    tokens = rng.integers(0, 1000, BLOCK_SIZE)
    pool.write(slots, tokens, rng.integers(0, 1 << 63, BLOCK_SIZE, dtype=np.uint64))
    digest = chained(root_digest(b"r1", BLOCK_SIZE, salt) + tokens.astype(np.uint32).tobytes())
    pool.commit(np.array([block]), [digest])
    return digest


def make_snapshots(digests: Sequence[bytes], pool: SimPool) -> MovableSnapshots:
    """One at the end of each of some first blocks, committed under the names that tiers use."""
    states = StatePool([STATE], 0, NUM_SNAPSHOTS)
    kept = list[KeptState | None]()
    for slot, digest in enumerate(digests[:NUM_SNAPSHOTS]):
        rng = np.random.default_rng([slot, *digest])
        states.slots[slot].numpy()[:] = rng.normal(size=states.slots.shape[1])
        kept.append(KeptState(state_id(pool.tokens_of(slot), b""), snapshot_digest(digest)))
    return MovableSnapshots(states, kept)


class Tier:
    """A store over a simulated pool whose blocks are all committed and written: to files below `folder` if it is given,
    and before that to `memory` records. Snapshots, if it has any, follow the blocks.
    """

    def __init__(
        self,
        folder: Path | None,
        max_bytes: int = 1 << 30,
        *,
        memory: int = 0,
        salt: bytes = b"",
        layout: bytes = LAYOUT,
        has_snapshots: bool = False,
    ) -> None:
        self.pool = SimPool(NUM_BLOCKS, BLOCK_SIZE)
        self.digests = [make_block(self.pool, block, salt) for block in range(NUM_BLOCKS)]
        snapshots = [make_snapshots(self.digests, self.pool)] if has_snapshots else []
        self.blocks = MovableBlocks(self.pool, self.pool.block_parts(), snapshots)
        self.digests += [snapshot_digest(digest) for digest in self.digests[:NUM_SNAPSHOTS] if has_snapshots]
        self.changes: dict[bytes, str | None] = {}
        records = RecordFormat(layout, self.blocks)
        report: Callable[[bytes], None] = lambda digest: self.store.report(digest)  # noqa: E731
        self.disk = None if folder is None else DiskTier(folder, max_bytes, layout, report)
        self.memory = MemoryTier(memory * records.num_bytes, self.disk, report) if memory else None
        self.store = BlockStore(records, [tier for tier in (self.memory, self.disk) if tier is not None])
        self.store.watch(self.changes.__setitem__)
        self.store.start()

    def offer(self, blocks: Sequence[int]) -> None:
        """Write these blocks, in this order, and wait for that."""
        digests = [self.digests[block] for block in blocks]
        self.store.offer(Committed(1, np.array(blocks, np.uint32), digests, b""))
        deadline = time.monotonic() + DEADLINE_S
        while self.store.num_queued:
            assert time.monotonic() < deadline, [tier.counts for tier in self.store.tiers]
            time.sleep(0.001)

    def write(self) -> None:
        """Write all blocks and snapshots."""
        self.offer(range(len(self.digests)))

    def content(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, or words, and the payload in the pool."""
        records = self.store._format.of(block)
        found = records.blocks.read(block - records.first_id, self.digests[block])
        assert found is not None
        return found

    def wanted(self, block: int) -> WantedBlock:
        return WantedBlock(self.digests[block], self.content(block)[0], block)

    def is_right(self, block: int) -> bool | None:
        """Whether the tier serves the content of the pool's block; None: a miss."""
        found = self.store.read(self.wanted(block))
        return None if found is None else found.payload.tobytes() == self.content(block)[1].tobytes()

    def files(self) -> list[Path]:
        return [] if self.disk is None else sorted(self.disk._folder.glob("*/*/*"))


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    made = Tier(tmp_path / "tier")
    made.write()
    return made


# -- the key -----------------------------------------------------------------------------------------------------------


def key_of(**changes: object) -> bytes:
    """The key of a block, with everything that its bytes depend on."""
    facts = {
        "revision": "r1", "dtype": "bfloat16", "determinism": 1, "numerics": "avx512",
        "parts": [("bfloat16", [2, 8, 4])],
        "block_size": 4, "cache_salt": b"", "encoder": b"", "adapter": b"", "tokens": (1, 2, 3, 4, 5, 6, 7, 8),
        "input": (0, b"i" * 16),
    } | changes  # fmt: skip
    root = root_key(cache_salt=facts["cache_salt"], encoder=facts["encoder"], adapter=facts["adapter"])
    salt = model_salt(facts["revision"], facts["dtype"], facts["determinism"])
    digest, size = root_digest(salt, facts["block_size"], root), facts["block_size"]
    inputs = [type("Input", (), {"start": facts["input"][0], "digest": facts["input"][1]})]
    keys, tokens = extra_keys(inputs, size), np.array(facts["tokens"], np.uint32)
    for index in range(len(tokens) // size):
        block = tokens[index * size : (index + 1) * size].tobytes()
        digest = chained(digest + block + keys.get(index, b""))
    return block_key(digest, layout_digest(facts["revision"], facts["numerics"], facts["parts"]))


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "r2"}, {"dtype": "float32"}, {"determinism": 2}, {"numerics": "avx2"},
        {"parts": [("uint8", [2, 8, 4])]}, {"parts": [("bfloat16", [2, 4, 8])]},
        {"parts": [("bfloat16", [2, 8, 4])] * 2}, {"block_size": 2}, {"cache_salt": b"t"}, {"encoder": b"t"},
        {"adapter": b"t"}, {"tokens": (1, 2, 3, 4, 5, 6, 7, 9)}, {"tokens": (0, 2, 3, 4, 5, 6, 7, 8)},
        {"tokens": (1, 2, 3, 4)}, {"input": (0, b"j" * 16)}, {"input": (4, b"i" * 16)},
    ],
    ids=str,
)  # fmt: skip
def test_everything_that_changes_the_bytes_of_a_block_changes_its_key(change: dict[str, object]) -> None:
    assert key_of(**change) != key_of()
    assert key_of(**change) == key_of(**change)


# -- what survives -----------------------------------------------------------------------------------------------------


def test_blocks_are_read_as_they_were_and_by_the_next_process(tier: Tier, tmp_path: Path) -> None:
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    tier.store.close()
    after = Tier(tmp_path / "tier")
    assert sorted(after.disk.digests()) == sorted(tier.digests)
    assert [after.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    assert after.disk.num_bytes == sum(file.stat().st_size for file in after.files())
    after.store.close()


@pytest.mark.parametrize("memory", [0, 5])
def test_tiers_that_are_cleared_hold_nothing_that_was_offered_before(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path / "tier", memory=memory)
    tier.write()
    clearing, is_writing, may_write = threading.Thread(target=tier.store.clear), threading.Event(), threading.Event()
    write = BlockStore._write

    def late_write(store: BlockStore, *args: Any) -> None:
        is_writing.set()
        assert may_write.wait(DEADLINE_S)
        write(store, *args)

    monkeypatch.setattr(BlockStore, "_write", late_write)
    for blocks in ([0, 1], [2, 3]):  # the first ones are being written, the others are in the queue
        tier.store.offer(Committed(1, np.array(blocks, np.uint32), [tier.digests[block] for block in blocks], b""))
    assert is_writing.wait(DEADLINE_S)
    clearing.start()
    may_write.set()
    clearing.join(DEADLINE_S)
    assert not clearing.is_alive()
    assert [one.digests() for one in tier.store.tiers] == [[]] * len(tier.store.tiers)
    assert (tier.files(), set(tier.changes.values())) == ([], {None})
    tier.offer([5])
    assert tier.is_right(5)
    tier.store.close()


def test_a_tier_keeps_the_blocks_that_were_used_last(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    tier.write()
    size = tier.files()[0].stat().st_size
    tier.store.close()
    small = Tier(tmp_path / "small", max_bytes=10 * size)
    small.write()
    assert sorted(small.disk.digests()) == sorted(small.digests[-10:])
    assert len(small.files()) == 10
    assert {digest for digest, held_by in small.changes.items() if held_by == "disk"} == set(small.digests[-10:])
    small.store.close()


def test_a_block_that_is_written_during_its_read_is_no_record(tmp_path: Path) -> None:
    pool = SimPool(NUM_BLOCKS, BLOCK_SIZE)
    blocks = MovableBlocks(pool, pool.block_parts())
    digest = make_block(pool, 3)
    tokens_of = pool.tokens_of

    def overwritten(block: int) -> np.ndarray:
        found = tokens_of(block)
        make_block(pool, block, b"other")
        pool.commit(np.array([block]), [digest])  # even if the same digest is committed again
        return found

    pool.tokens_of = overwritten  # type: ignore[method-assign]
    assert blocks.read(3, digest) is None
    pool.tokens_of = tokens_of  # type: ignore[method-assign]
    assert blocks.read(3, b"x" * 16) is None


# -- memory ------------------------------------------------------------------------------------------------------------


def held_by(tier: Tier) -> list[str | None]:
    """Which tier holds each block, as watchers know it."""
    return [tier.changes.get(digest) for digest in tier.digests]


def test_memory_keeps_the_blocks_that_were_used_last() -> None:
    tier = Tier(None, memory=10)
    tier.offer(range(10))
    tier.offer(range(5))  # a row was opened with them
    tier.offer(range(10, 13))
    assert held_by(tier) == ["memory"] * 5 + [None] * 3 + ["memory"] * 5 + [None] * 11
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [held and True for held in held_by(tier)]
    assert tier.memory.num_bytes == 10 * tier.store._format.num_bytes
    counts = tier.memory.counts
    assert (counts.num_written, counts.num_hits, counts.num_misses) == (13, 10, 14)
    tier.store.close()


def test_what_memory_evicts_goes_to_files_and_the_rest_when_the_process_ends(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", memory=10)
    tier.write()
    assert held_by(tier) == ["disk"] * (NUM_BLOCKS - 10) + ["memory"] * 10
    assert len(tier.files()) == NUM_BLOCKS - 10
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    tier.offer([0])  # it was read into the pool, and evicts a block
    assert held_by(tier)[0] == "memory"
    assert len(tier.files()) == NUM_BLOCKS - 9
    tier.store.close()
    after = Tier(tmp_path / "tier")
    assert len(after.files()) == NUM_BLOCKS
    assert [after.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    after.store.close()


def test_a_record_of_memory_that_is_read_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(None, memory=1)
    tier.offer([0])
    found = tier.store.read(tier.wanted(0))
    expected = tier.blocks.read(0, tier.digests[0])
    tier.offer(range(1, NUM_BLOCKS))
    assert held_by(tier)[0] is None
    assert found.payload.tobytes() == expected[1].tobytes()
    tier.store.close()


def use_memory(folder: Path, seed: int) -> None:
    """Offer and read blocks at random. Memory above files must hold the blocks that were used last, files the others,
    and what was read must stay as it was.
    """
    rng, room = random.Random(seed), 6
    tier = Tier(folder, memory=room)
    used, written, found = list[int](), set[int](), []
    try:
        for block in rng.choices(range(NUM_BLOCKS), k=40):
            if is_offered := rng.random() < 0.6:
                tier.offer([block])
                written.add(block)
            elif (read := tier.store.read(tier.wanted(block))) is not None:
                found.append((block, read.payload))
            if is_offered or block in used:
                used = [*(one for one in used if one != block), block][-room:]
        assert tier.memory.num_bytes == len(used) * tier.store._format.num_bytes, "bytes"
        places = ["memory" if b in used else "disk" if b in written else None for b in range(NUM_BLOCKS)]
        assert held_by(tier) == places, "places"
        assert all(payload.tobytes() == tier.content(block)[1].tobytes() for block, payload in found), "content"
    finally:
        tier.store.close()


def reuse_buffers(patch: pytest.MonkeyPatch) -> None:
    """A new record is written where the least recently used one is, which a reader may still have."""
    put = MemoryTier.put

    def reuse(tier: MemoryTier, digest: bytes, record: np.ndarray) -> bool:
        oldest = next(iter(tier._records.values()), record)
        if tier.num_bytes + len(record) > tier._max_bytes:
            tier._evict()
            oldest[:] = record
            record = oldest
        return put(tier, digest, record)

    patch.setattr(MemoryTier, "put", reuse)


def evict_the_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTier, "touch", lambda tier, digest: digest in tier._records)


def evict_without_a_report(patch: pytest.MonkeyPatch) -> None:
    def evict(tier: MemoryTier) -> None:
        report, tier._on_change = tier._on_change, lambda digest: None
        original(tier)
        tier._on_change = report

    original = MemoryTier._evict
    patch.setattr(MemoryTier, "_evict", evict)


def lose_what_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTier, "_spill", lambda tier, digest, record: None)


def count_no_evicted_bytes(patch: pytest.MonkeyPatch) -> None:
    def forget(tier: MemoryTier, digest: bytes) -> None:
        record = tier._records.pop(digest)
        tier._max_bytes += len(record)
        tier._on_change(digest)

    patch.setattr(MemoryTier, "forget", forget)


@pytest.mark.parametrize("seed", range(3))
def test_memory_holds_what_was_used_last(tmp_path: Path, seed: int) -> None:
    use_memory(tmp_path / "tier", seed)


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (reuse_buffers, "content"),
        (evict_the_newest, "places"),
        (evict_without_a_report, "places"),
        (lose_what_is_evicted, "places"),
        (count_no_evicted_bytes, "bytes"),
    ],
)
def test_a_bug_in_the_memory_tier_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], complaint: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        use_memory(tmp_path / "tier", 0)


@pytest.mark.parametrize("has_disk", [False, True])
def test_memory_that_flips_or_holds_another_block_serves_nothing_wrong(tmp_path: Path, has_disk: bool) -> None:
    """Other salts and layouts cannot be in the same memory; here they are as if a digest had been mistaken."""
    tier = Tier(tmp_path / "tier" if has_disk else None, memory=NUM_BLOCKS)
    tier.write()
    records, rng = tier.memory._records, random.Random(1)
    if has_disk:
        for digest in tier.digests:
            tier.memory._spill(digest, records[digest])
    for block in range(0, NUM_BLOCKS, 4):
        digest, other = tier.digests[block], tier.digests[block + 1]
        records[digest] = records[digest].copy()
        records[digest][rng.randrange(len(records[digest]))] ^= 1 << rng.randrange(8)
        records[other] = records[tier.digests[block + 2]]
    salted = Tier(None, memory=NUM_BLOCKS, salt=b"tenant")
    salted.write()
    for block in range(3, NUM_BLOCKS, 4):
        records[tier.digests[block]] = salted.memory._records[salted.digests[block]]
    expected = [True] * NUM_BLOCKS if has_disk else [block % 4 == 2 or None for block in range(NUM_BLOCKS)]
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == expected
    assert tier.memory.counts.num_corrupt == 3 * NUM_BLOCKS // 4
    for other in (tier, salted):
        other.store.close()


# -- faults ------------------------------------------------------------------------------------------------------------


def flip_a_bit(rng: random.Random, file: Path, others: list[Path]) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(rng: random.Random, file: Path, others: list[Path]) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randint(0, max(0, len(data) - 1))])


def extend(rng: random.Random, file: Path, others: list[Path]) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 64)))


def swap(rng: random.Random, file: Path, others: list[Path]) -> None:
    other = rng.choice(others)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def zero_a_page(rng: random.Random, file: Path, others: list[Path]) -> None:
    """A torn write: the size is right, some of the bytes never reached the disk."""
    data = bytearray(file.read_bytes())
    start = rng.randint(0, len(data))
    data[start : start + 32] = bytes(len(data[start : start + 32]))
    file.write_bytes(data)


def delete(rng: random.Random, file: Path, others: list[Path]) -> None:
    file.unlink(missing_ok=True)


def put_a_folder(rng: random.Random, file: Path, others: list[Path]) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()
    file.rmdir() if rng.random() < 0.5 else None


def write_garbage(rng: random.Random, file: Path, others: list[Path]) -> None:
    file.write_bytes(rng.randbytes(len(file.read_bytes())))


def forge(rng: random.Random, file: Path, others: list[Path]) -> None:
    """A record with a valid checksum: of another revision, layout or salt, of another block or snapshot, or after other
    tokens; committed by any process.
    """
    kind, digest, data = rng.randrange(4), bytes.fromhex(file.name), file.read_bytes()
    num_words = STATE_ID_BYTES // 4 if len(data) == SNAPSHOT_BYTES else BLOCK_SIZE
    num_bytes = max(0, len(data) - HEADER.size - 4 * num_words - CHECKSUM_BYTES)
    words = np.frombuffer(data[HEADER.size :].ljust(4 * num_words, b"x"), np.uint32, num_words).copy()
    if kind >= 2:
        words[: rng.choice((1, num_words))] ^= np.uint32(rng.getrandbits(32))
    layout = rng.choice((rng.randbytes(16), OTHER_REVISION)) if kind == 0 else LAYOUT
    named = rng.randbytes(16) if kind == 1 else bytes.fromhex(rng.choice(others).name) if kind == 2 else digest
    head = HEADER.pack(MAGIC, num_words, num_bytes, block_key(named, layout), Origin(rng.getrandbits(64), 1).pack())
    data = head + words.tobytes() + rng.randbytes(num_bytes)
    file.write_bytes(data + xxh3_128_digest(data))


FAULTS = [flip_a_bit, truncate, extend, swap, zero_a_page, delete, put_a_folder, write_garbage, forge]


def inject(folder: Path, num_faults: int, seed: int) -> tuple[Counter[bool | None], Counter[bool | None]]:
    """How many blocks, and snapshots, were served right (True), missed (None) and served wrong under so many faults."""
    rng, blocks, snapshots = random.Random(seed), Counter[bool | None](), Counter[bool | None]()

    def read(number: int) -> None:
        (blocks if number < NUM_BLOCKS else snapshots)[tier.is_right(number)] += 1

    while num_faults:
        tier = Tier(folder / str(num_faults), has_snapshots=True)
        tier.write()
        if rng.random() < 0.3:
            tier.store.close()
            tier = Tier(folder / str(num_faults), has_snapshots=True)
        for _ in range(min(num_faults, rng.randint(1, 30))):
            num_faults -= 1
            files = [file for file in tier.files() if file.is_file()]
            if len(files) < 2:
                break
            rng.choice(FAULTS)(rng, rng.choice(files), files)
            if rng.random() < 0.5:
                read(rng.randrange(len(tier.digests)))
        for number in range(len(tier.digests)):
            read(number)
        tier.store.close()
    return blocks, snapshots


@pytest.mark.parametrize("num_faults", [500, pytest.param(10_000, marks=pytest.mark.deep)])
def test_no_injected_fault_makes_a_wrong_block(
    tmp_path: Path, num_faults: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "worker_svc.kv_store")
    for served, share in zip(inject(tmp_path, num_faults, seed=num_faults), (1 / 4, 1 / 12), strict=True):
        assert served[False] == 0
        assert served[True] > num_faults * share
        assert served[None] > num_faults * share


def test_the_injector_finds_a_tier_that_does_not_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksum and the key, the same faults give wrong blocks."""
    monkeypatch.setattr("worker_svc.kv_store.record.xxh3_128_digest", lambda data: bytes(16))
    monkeypatch.setattr("worker_svc.kv_store.record.block_key", lambda digest, layout: bytes(32))
    monkeypatch.setattr(
        "worker_svc.kv_store.record.u32_to_bytes", lambda column: bytes(4 * len(column))
    )  # nothing of the key or the tokens is compared
    assert all(served[False] > 0 for served in inject(tmp_path, 200, seed=1))


def test_another_salt_revision_or_layout_is_a_miss(tier: Tier, tmp_path: Path) -> None:
    tier.store.close()
    for other in (
        Tier(tmp_path / "tier", salt=b"tenant"),
        Tier(tmp_path / "tier", layout=layout_digest("r2", "sim", [("uint64", [1, BLOCK_SIZE])])),
        Tier(tmp_path / "tier", layout=layout_digest("r1", "avx2", [("uint64", [1, BLOCK_SIZE])])),
    ):
        assert [other.is_right(block) for block in range(NUM_BLOCKS)] == [None] * NUM_BLOCKS
        other.store.close()


def test_the_second_process_on_a_folder_reads_only(
    tier: Tier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = Tier(tmp_path / "tier", salt=b"second")
    assert not second.disk.is_writer
    assert "another process writes to it" in caplog.text
    second.write()
    assert second.disk.counts.num_written == 0
    assert len(tier.files()) == NUM_BLOCKS
    tier.store.close()
    second.disk._retry_at = 0.0
    second.disk.counts.num_dropped = 0
    second.write()
    assert second.disk.is_writer, "it becomes the writer when the first process has ended"
    assert len(second.files()) == 2 * NUM_BLOCKS
    second.store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_refuses_writes_is_a_warning_and_a_count(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tier: DiskTier, path: Path, record: object) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", refuse)
        tier = Tier(tmp_path / "tier")
        tier.write()
    counts = tier.disk.counts
    assert (counts.num_written, counts.num_dropped, counts.num_errors) == (0, NUM_BLOCKS, 1)
    assert len([record for record in caplog.records if "writes nothing" in record.message]) == 1
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [None] * NUM_BLOCKS
    tier.disk._retry_at = 0.0
    counts.num_dropped = 0
    tier.write()
    assert tier.is_right(0), "it writes again when the disk allows it"
    tier.store.close()


def test_a_folder_that_was_removed_is_made_and_locked_again(tier: Tier, tmp_path: Path) -> None:
    for _ in range(2):  # the first block that cannot be written ends the lock
        shutil.rmtree(tmp_path / "tier", ignore_errors=True)
        assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [None] * NUM_BLOCKS
        tier.write()
        tier.disk._retry_at, tier.disk.counts.num_dropped, tier.disk.counts.num_written = 0.0, 0, 0
        tier.write()
        assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
        assert not Tier(tmp_path / "tier").disk.is_writer


def test_a_read_only_folder_is_read(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.store.close()
    refused: Callable[..., int] = lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))  # noqa: E731
    monkeypatch.setattr("worker_svc.kv_store.disk_tier.os.open", refused)
    after = Tier(tmp_path / "tier")
    assert not after.disk.is_writer
    assert [after.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    after.store.close()


def test_only_the_own_user_can_read_what_was_made_of_prompts(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = Tier(tmp_path / "tier")
        tier.write()
    finally:
        os.umask(before)
    made = [tmp_path / "tier", *tier.files()]
    assert len(made) == 1 + NUM_BLOCKS
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    tier.store.close()


def test_leftovers_of_a_killed_writer_are_removed(tier: Tier, tmp_path: Path) -> None:
    tier.store.close()
    torn = tmp_path / "tier" / "tmp" / ("0" * 32)
    torn.write_bytes(b"half of a record")
    after = Tier(tmp_path / "tier")
    assert not torn.exists()
    assert len(after.disk.digests()) == NUM_BLOCKS
    after.store.close()
