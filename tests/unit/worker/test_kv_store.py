"""The disk tier under an injector: what it serves is exactly the wanted block, whatever happens to its files."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefix_index.hashing import block_key, chained, extra_keys, layout_digest, model_salt, root_digest, root_key
from worker_svc.engine.decoder.block_payload import MovableBlocks
from worker_svc.kv_store.block_store import BlockStore, Committed
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.record import Origin, WantedBlock, pack_record
from worker_svc.simulator.pool import SimPool

BLOCK_SIZE, NUM_BLOCKS = 4, 24
DEADLINE_S = 20.0
LAYOUT = layout_digest("r1", "sim", [("uint64", [1, BLOCK_SIZE])])


def make_block(pool: SimPool, block: int, salt: bytes = b"") -> bytes:
    """Fill and commit a block. Returns its digest."""
    rng = np.random.default_rng([block, len(salt)])
    slots = np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    tokens = rng.integers(0, 1000, BLOCK_SIZE)
    pool.write(slots, tokens, rng.integers(0, 1 << 63, BLOCK_SIZE, dtype=np.uint64))
    digest = chained(root_digest(b"r1", BLOCK_SIZE, salt) + tokens.astype(np.uint32).tobytes())
    pool.commit(np.array([block]), [digest])
    return digest


class Tier:
    """A store over a simulated pool whose blocks are all committed and written to `folder`."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 30, *, salt: bytes = b"", layout: bytes = LAYOUT) -> None:
        self.pool = SimPool(NUM_BLOCKS, BLOCK_SIZE)
        self.blocks = MovableBlocks(self.pool, self.pool.block_parts())
        self.digests = [make_block(self.pool, block, salt) for block in range(NUM_BLOCKS)]
        self.changes: dict[bytes, bool] = {}
        tier = DiskTier(folder, max_bytes, layout, lambda digest, is_held: self.store.report(digest, is_held))
        self.store = BlockStore(self.blocks, layout, tier)
        self.store.watch(self.changes.__setitem__)
        self.store.start()

    def write(self) -> None:
        """Write all blocks and wait for that."""
        self.store.offer([Committed(digest, Origin(1, block)) for block, digest in enumerate(self.digests)])
        counts, deadline = self.store.tier.counts, time.monotonic() + DEADLINE_S
        while counts.num_written + counts.num_dropped < NUM_BLOCKS:
            assert time.monotonic() < deadline, counts
            time.sleep(0.001)

    def wanted(self, block: int) -> WantedBlock:
        return WantedBlock(self.digests[block], self.pool.tokens_of(block))

    def is_right(self, block: int) -> bool | None:
        """Whether the tier serves the content of the pool's block; None: a miss."""
        found = self.store.read(self.wanted(block))
        expected = self.blocks.read(block, self.digests[block])
        assert expected is not None
        return None if found is None else found.payload.tobytes() == expected[1].tobytes()

    def files(self) -> list[Path]:
        return sorted(self.store.tier._folder.glob("*/*/*"))


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
    assert sorted(after.store.tier.digests()) == sorted(tier.digests)
    assert [after.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    assert after.store.tier.num_bytes == sum(file.stat().st_size for file in after.files())
    after.store.close()


def test_a_tier_keeps_the_blocks_that_were_used_last(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    tier.write()
    size = tier.files()[0].stat().st_size
    tier.store.close()
    small = Tier(tmp_path / "small", max_bytes=10 * size)
    small.write()
    assert sorted(small.store.tier.digests()) == sorted(small.digests[-10:])
    assert len(small.files()) == 10
    assert {digest for digest, is_held in small.changes.items() if is_held} == set(small.digests[-10:])
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
    """A record with a valid checksum: of another salt, layout or block, or with other tokens."""
    kind, digest = rng.randrange(4), bytes.fromhex(file.name)
    tokens, payload = np.zeros(BLOCK_SIZE, np.uint32), np.frombuffer(rng.randbytes(40), np.uint8)
    layout = rng.randbytes(16) if kind == 0 else LAYOUT
    named = rng.randbytes(16) if kind == 1 else bytes.fromhex(rng.choice(others).name) if kind == 2 else digest
    file.write_bytes(b"".join(pack_record(named, layout, tokens, payload, Origin(rng.getrandbits(64), 1))))


FAULTS = [flip_a_bit, truncate, extend, swap, zero_a_page, delete, put_a_folder, write_garbage, forge]


def inject(folder: Path, num_faults: int, seed: int) -> tuple[int, int, int]:
    """Blocks that were served right, missed and served wrong, under so many faults."""
    rng, served = random.Random(seed), {True: 0, None: 0, False: 0}
    while num_faults:
        tier = Tier(folder / str(num_faults))
        tier.write()
        if rng.random() < 0.3:
            tier.store.close()
            tier = Tier(folder / str(num_faults))
        for _ in range(min(num_faults, rng.randint(1, 30))):
            num_faults -= 1
            files = [file for file in tier.files() if file.is_file()]
            if len(files) < 2:
                break
            rng.choice(FAULTS)(rng, rng.choice(files), files)
            if rng.random() < 0.5:
                served[tier.is_right(rng.randrange(NUM_BLOCKS))] += 1
        for block in range(NUM_BLOCKS):
            served[tier.is_right(block)] += 1
        tier.store.close()
    return served[True], served[None], served[False]


@pytest.mark.parametrize("num_faults", [500, pytest.param(10_000, marks=pytest.mark.deep)])
def test_no_injected_fault_makes_a_wrong_block(
    tmp_path: Path, num_faults: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "worker_svc.kv_store")
    right, missed, wrong = inject(tmp_path, num_faults, seed=num_faults)
    assert wrong == 0
    assert right > num_faults / 4
    assert missed > num_faults / 4


def test_the_injector_finds_a_tier_that_does_not_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksum and the key, the same faults give wrong blocks."""
    monkeypatch.setattr("worker_svc.kv_store.record._checksum", lambda pieces: bytes(16))
    monkeypatch.setattr("worker_svc.kv_store.record.block_key", lambda digest, layout: bytes(32))
    monkeypatch.setattr(
        "worker_svc.kv_store.record.u32_to_bytes", lambda column: bytes(4 * BLOCK_SIZE)
    )  # nothing of the key or the tokens is compared
    _, _, wrong = inject(tmp_path, 200, seed=1)
    assert wrong > 0


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
    assert not second.store.tier.is_writer
    assert "another process writes to it" in caplog.text
    second.write()
    assert second.store.tier.counts.num_written == 0
    assert len(tier.files()) == NUM_BLOCKS
    tier.store.close()
    second.store.tier._retry_at = 0.0
    second.store.tier.counts.num_dropped = 0
    second.write()
    assert second.store.tier.is_writer, "it becomes the writer when the first process has ended"
    assert len(second.files()) == 2 * NUM_BLOCKS
    second.store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_refuses_writes_is_a_warning_and_a_count(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tier: DiskTier, path: Path, pieces: object) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", refuse)
        tier = Tier(tmp_path / "tier")
        tier.write()
    counts = tier.store.tier.counts
    assert (counts.num_written, counts.num_dropped, counts.num_errors) == (0, NUM_BLOCKS, 1)
    assert len([record for record in caplog.records if "writes nothing" in record.message]) == 1
    assert [tier.is_right(block) for block in range(NUM_BLOCKS)] == [None] * NUM_BLOCKS
    tier.store.tier._retry_at = 0.0
    counts.num_dropped = 0
    tier.write()
    assert tier.is_right(0), "it writes again when the disk allows it"
    tier.store.close()


def test_a_read_only_folder_is_read(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.store.close()
    refused: Callable[..., int] = lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))  # noqa: E731
    monkeypatch.setattr("worker_svc.kv_store.disk_tier.os.open", refused)
    after = Tier(tmp_path / "tier")
    assert not after.store.tier.is_writer
    assert [after.is_right(block) for block in range(NUM_BLOCKS)] == [True] * NUM_BLOCKS
    after.store.close()


def test_leftovers_of_a_killed_writer_are_removed(tier: Tier, tmp_path: Path) -> None:
    tier.store.close()
    torn = tmp_path / "tier" / "tmp" / ("0" * 32)
    torn.write_bytes(b"half of a record")
    after = Tier(tmp_path / "tier")
    assert not torn.exists()
    assert len(after.store.tier.digests()) == NUM_BLOCKS
    after.store.close()
