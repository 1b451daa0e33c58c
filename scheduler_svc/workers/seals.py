"""Seals of committed blocks: a scheduler adopts only blocks that a holder of its key has committed.

A digest names the tokens of a cached block. It does not prove that the keys and values are correct: any process with a
lease could commit other values under that digest. So the scheduler that has the lease sends a tag with each commit:

    tag = BLAKE2b(key, worker_epoch, scheduler_epoch, block id, digest)

The worker stores the tag with the scheduler_epoch of the lease. A tag that is replayed under another lease does not
match its epoch. A block that is written after its commit is no longer committed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from svc_common.security.tls import Reread

TAG_BYTES = 16
SEAL_BYTES = 8 + TAG_BYTES
KEY_BYTES = 32


class BlockKeyError(ValueError):
    """The key file cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class LeaseIds:
    """The lease to which a tag binds a block."""

    worker_epoch: int
    scheduler_epoch: int


class BlockKeys:
    """The keys of the schedulers of a model, as `keys` returns them. The first makes tags; a tag of any is valid."""

    def __init__(self, keys: Callable[[], Sequence[bytes]]) -> None:
        self._keys = keys

    def tags(self, lease: LeaseIds, block_ids: Iterable[int], digests: Sequence[bytes]) -> bytes:
        """16 bytes per block."""
        key = self._keys()[0]
        return b"".join(_tag(key, lease, block, digest) for block, digest in zip(block_ids, digests, strict=True))

    def is_valid(self, worker_epoch: int, block_id: int, digest: bytes, seal: bytes) -> bool:
        """Whether a holder of one of the keys committed this block with this digest."""
        lease = LeaseIds(worker_epoch, int.from_bytes(seal[:8], "little"))
        return any(hmac.compare_digest(_tag(key, lease, block_id, digest), seal[8:]) for key in self._keys())


def _tag(key: bytes, lease: LeaseIds, block_id: int, digest: bytes) -> bytes:
    data = struct.pack("<QQI", lease.worker_epoch, lease.scheduler_epoch, block_id) + digest
    return hashlib.blake2b(data, key=key, digest_size=TAG_BYTES).digest()


def read_block_keys(path: Path | None) -> BlockKeys | None:
    """The keys of a file, one per line, 64 hexadecimal digits each. The file is read again. Raises BlockKeyError."""
    return None if path is None else BlockKeys(Reread(partial(_read_keys, path), "block keys", time.monotonic))


def _read_keys(path: Path) -> list[bytes]:
    try:
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BlockKeyError(f"--block-key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines or not all(re.fullmatch(r"[0-9a-fA-F]{64}", line) for line in lines):
        raise BlockKeyError(f"--block-key-file {path}: each line must be a key of 64 hexadecimal digits")
    return [bytes.fromhex(line) for line in lines]
