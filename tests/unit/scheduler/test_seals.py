"""Tags of committed blocks: valid only for the same key, worker, lease, block and digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.workers.seals import BlockKeyError, BlockKeys, LeaseIds, read_block_keys
from svc_common.security import tls

KEY, OLD_KEY = b"k" * 32, b"o" * 32
LEASE = LeaseIds(worker_epoch=2**63, scheduler_epoch=7)
DIGEST = b"d" * 16


def seal(keys: BlockKeys, lease: LeaseIds = LEASE, block: int = 3, digest: bytes = DIGEST) -> bytes:
    """A worker's seal for a block that was committed under `lease`."""
    return lease.scheduler_epoch.to_bytes(8, "little") + keys.tags(lease, [block], [digest])


def of(keys: list[bytes]) -> BlockKeys:
    return BlockKeys(lambda: keys)


def test_a_seal_is_valid_for_its_block_only() -> None:
    keys = of([KEY])
    good = seal(keys)
    assert keys.is_valid(LEASE.worker_epoch, 3, DIGEST, good)
    assert not keys.is_valid(LEASE.worker_epoch, 4, DIGEST, good)
    assert not keys.is_valid(LEASE.worker_epoch, 3, b"e" * 16, good)
    assert not keys.is_valid(LEASE.worker_epoch + 1, 3, DIGEST, good)
    assert not keys.is_valid(LEASE.worker_epoch, 3, DIGEST, bytes(24))
    assert not of([OLD_KEY]).is_valid(LEASE.worker_epoch, 3, DIGEST, good)


def test_a_tag_that_is_repeated_under_another_lease_is_not_valid() -> None:
    keys = of([KEY])
    repeated = (8).to_bytes(8, "little") + seal(keys)[8:]
    assert not keys.is_valid(LEASE.worker_epoch, 3, DIGEST, repeated)


def test_a_new_key_still_accepts_the_old_one() -> None:
    assert of([KEY, OLD_KEY]).is_valid(LEASE.worker_epoch, 3, DIGEST, seal(of([OLD_KEY])))


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY.hex()}\n{OLD_KEY.hex()}\n")
    keys = read_block_keys(path)
    assert keys is not None
    assert seal(keys) == seal(of([KEY]))
    assert read_block_keys(None) is None


@pytest.mark.parametrize("content", ["", "zz", "ab" * 31, "ab" * 33, "key " + "ab" * 32])
def test_a_bad_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(BlockKeyError, match="must be a key of 64 hexadecimal digits"):
        read_block_keys(path)
    with pytest.raises(BlockKeyError, match="No such file"):
        read_block_keys(tmp_path / "none")


def test_keys_rotate_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new key is added, moved to the first line, and the old one removed, while schedulers run."""
    monkeypatch.setattr(tls, "REREAD_S", 0.0)
    path = tmp_path / "keys"

    def write(*keys: bytes) -> None:
        path.write_text("".join(f"{key.hex()}\n" for key in keys))

    write(OLD_KEY)
    keys = read_block_keys(path)
    assert keys is not None
    before = seal(keys)
    write(OLD_KEY, KEY)
    assert keys.is_valid(LEASE.worker_epoch, 3, DIGEST, seal(of([KEY])))
    write(KEY, OLD_KEY)
    assert seal(keys) == seal(of([KEY]))
    path.write_text("not a key")  # a mistake keeps the previous keys
    assert keys.is_valid(LEASE.worker_epoch, 3, DIGEST, before)
    write(KEY)
    assert not keys.is_valid(LEASE.worker_epoch, 3, DIGEST, before)
