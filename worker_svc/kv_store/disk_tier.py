"""The disk tier: one file per block, below one folder. It survives the process; nothing is synced.

    FOLDER/lock                     locked by the one process that writes
    FOLDER/tmp/                     records that are being written
    FOLDER/<layout>/<xx>/<digest>   complete records; the path is the key

A file is written under `tmp` and then renamed, so after kill -9 a record is complete or absent. After a power failure
it may be torn; its checksum tells. A process without the lock, and one whose folder is read-only, reads only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefix_index.hashing import block_key
from worker_svc.engine.decoder.pool.block_payload import Bytes
from worker_svc.kv_store.tier import OnChange, TierCounts

log = logging.getLogger(__name__)

LAYOUT_BYTES = 16
FOLDER_MODE, FILE_MODE = 0o700, 0o600  # records are made of prompts
RETRY_S = 10.0  # after a failed write, or without the lock


class DiskTier:
    """A tier (tier.py) of records in files."""

    name = "disk"

    def __init__(self, folder: Path, max_bytes: int, layout: bytes, on_change: OnChange = lambda digest: None) -> None:
        self.counts = TierCounts()
        self.num_bytes = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._layout = layout
        self._on_change = on_change
        self._guard = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # by key, of all layouts; least recently used first
        self._lock_file: int | None = None
        self._retry_at = 0.0
        self._failed: str | None = None  # the last failure that was logged

    # -- the folder ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock if it is free, and read which records there are."""
        self._lock()
        found = sorted(self._scan())
        with self._guard:
            before = set(self._own_digests())
            self._sizes = OrderedDict((key, size) for _, key, size in found)
            self.num_bytes = sum(self._sizes.values())
            after = set(self._own_digests())
        for digest in before ^ after:
            self._on_change(digest)

    def close(self) -> None:
        """Release the lock."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    @property
    def is_writer(self) -> bool:
        """Whether this process has the lock."""
        return self._lock_file is not None

    def _lock(self) -> None:
        descriptor = None
        try:
            self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self._folder / "tmp").mkdir(FOLDER_MODE, exist_ok=True)
            for leftover in (self._folder / "tmp").iterdir():
                leftover.unlink()
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            is_taken = isinstance(error, BlockingIOError)
            self._fail("another process writes to it" if is_taken else str(error.strerror), "reads only")
            return
        self._lock_file, self._failed = descriptor, None

    def _scan(self) -> Iterator[tuple[float, bytes, int]]:
        """Time of last use, key and size of each record. Other files are ignored."""
        try:
            for path in self._folder.glob("[0-9a-f]*/[0-9a-f][0-9a-f]/[0-9a-f]*"):
                try:
                    key = bytes.fromhex(path.parent.parent.name + path.name)
                    stat = path.stat()
                except (ValueError, OSError):
                    continue
                if len(key) == 2 * LAYOUT_BYTES:
                    yield stat.st_mtime, key, stat.st_size
        except OSError as error:
            self._fail(str(error.strerror), "starts empty")

    def _path(self, key: bytes) -> Path:
        digest = key[LAYOUT_BYTES:].hex()
        return self._folder / key[:LAYOUT_BYTES].hex() / digest[:2] / digest

    # -- records ------------------------------------------------------------------------------------------------------

    def digests(self) -> list[bytes]:
        with self._guard:
            return self._own_digests()

    def _own_digests(self) -> list[bytes]:
        return [key[LAYOUT_BYTES:] for key in self._sizes if key[:LAYOUT_BYTES] == self._layout]

    def holds(self, digest: bytes) -> bool:
        return block_key(digest, self._layout) in self._sizes

    def touch(self, digest: bytes) -> bool:
        key = block_key(digest, self._layout)
        with self._guard:
            if key not in self._sizes:
                return False
            self._sizes.move_to_end(key)
            return True

    def read(self, digest: bytes) -> bytes | None:
        key = block_key(digest, self._layout)
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            self.forget(digest)
            return None
        except OSError as error:
            self._fail(str(error.strerror), "misses")
            return None
        self.counts.bytes_read += len(data)
        self.touch(digest)
        if self.is_writer:
            self._mark_used(key)
        return data

    def _mark_used(self, key: bytes) -> None:
        """The order of use survives the process."""
        try:
            os.utime(self._path(key))
        except OSError as error:
            self._fail(str(error.strerror), "does not record uses")

    def forget(self, digest: bytes) -> None:
        key = block_key(digest, self._layout)
        with self._guard:
            is_held = key in self._sizes
        if is_held:
            self._remove([key])

    def put(self, digest: bytes, record: Bytes) -> bool:
        now = time.monotonic()
        if now < self._retry_at or not (self.is_writer or self._became_writer()):
            self.counts.num_dropped += 1
            return False
        key, size = block_key(digest, self._layout), len(record)
        if size > self._max_bytes:
            self.counts.num_dropped += 1
            return False
        self._make_room(size)
        try:
            self._write(self._path(key), record)
        except OSError as error:
            self._retry_at = now + RETRY_S
            self.counts.num_dropped += 1
            self._fail(str(error.strerror), f"writes nothing for {RETRY_S:g} s", is_full=error.errno == errno.ENOSPC)
            if error.errno == errno.ENOENT:  # the folder was removed, and the lock with it
                self.close()
            return False
        self.counts.num_written += 1
        self.counts.bytes_written += size
        self._failed = None
        with self._guard:
            self.num_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
        self._on_change(digest)
        return True

    def _became_writer(self) -> bool:
        """Try again to become the writer: the other process may have ended."""
        self.open()
        if not self.is_writer:
            self._retry_at = time.monotonic() + RETRY_S
        return self.is_writer

    def _write(self, path: Path, record: Bytes) -> None:
        temporary, view = self._folder / "tmp" / path.name, record.data
        try:
            with open(temporary, "wb", buffering=0, opener=_open_private) as file:
                while len(view):
                    view = view[file.write(view) or 0 :]
            path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        evicted = []
        with self._guard:
            left = self.num_bytes
            for key, used in self._sizes.items():
                if left + size <= self._max_bytes:
                    break
                left -= used
                evicted.append(key)
        self._remove(evicted)

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self._guard:
                self.num_bytes -= self._sizes.pop(key, 0)
            if key[:LAYOUT_BYTES] == self._layout:
                self._on_change(key[LAYOUT_BYTES:])
            if not self.is_writer:
                continue
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError as error:
                self._fail(str(error.strerror), "keeps a file that it no longer uses")

    def _fail(self, reason: str, effect: str, *, is_full: bool = False) -> None:
        """Count a failure, and log it once."""
        self.counts.num_errors += 1
        if reason == self._failed:
            return
        self._failed = reason
        advice = "; lower --kv-disk-size or free space" if is_full else ""
        log.warning("--kv-disk %s: %s; the tier %s%s", self._folder, reason, effect, advice)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
