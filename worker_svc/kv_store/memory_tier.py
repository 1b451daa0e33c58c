"""The memory tier: records in the memory of the host. It ends with the process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from worker_svc.engine.decoder.pool.block_payload import Bytes
from worker_svc.kv_store.tier import OnChange, Tier, TierCounts


class MemoryTier:
    """A tier (tier.py) above another one, which gets the records that it evicts."""

    name = "memory"
    is_writer = True

    def __init__(self, max_bytes: int, below: Tier | None = None, on_change: OnChange = lambda digest: None) -> None:
        self.counts = TierCounts()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._below = below
        self._on_change = on_change
        self._guard = threading.Lock()
        self._records: OrderedDict[bytes, Bytes] = OrderedDict()  # least recently used first

    def open(self) -> None:
        """Nothing to find."""

    def close(self) -> None:
        """Free all records."""
        with self._guard:
            self._records.clear()
            self.num_bytes = 0

    def digests(self) -> list[bytes]:
        with self._guard:
            return list(self._records)

    def holds(self, digest: bytes) -> bool:
        return digest in self._records

    def touch(self, digest: bytes) -> bool:
        with self._guard:
            if digest not in self._records:
                return False
            self._records.move_to_end(digest)
            return True

    def read(self, digest: bytes) -> memoryview | None:
        """The record stays as it is while the caller has it, even if it is evicted."""
        record = self._records.get(digest)
        if record is None:
            return None
        self.touch(digest)
        self.counts.bytes_read += len(record)
        return record.data

    def forget(self, digest: bytes) -> None:
        with self._guard:
            record = self._records.pop(digest, None)
            self.num_bytes -= 0 if record is None else len(record)
        if record is not None:
            self._on_change(digest)

    def put(self, digest: bytes, record: Bytes) -> bool:
        if len(record) > self._max_bytes:
            self.counts.num_dropped += 1
            return False
        while self.num_bytes + len(record) > self._max_bytes:
            self._evict()
        with self._guard:
            self.num_bytes += len(record) - len(self._records.pop(digest, ()))
            self._records[digest] = record
        self.counts.num_written += 1
        self.counts.bytes_written += len(record)
        self._on_change(digest)
        return True

    def _evict(self) -> None:
        with self._guard:
            digest, record = next(iter(self._records.items()))
        self._spill(digest, record)
        self.forget(digest)

    def _spill(self, digest: bytes, record: Bytes) -> None:
        if self._below is not None and not self._below.touch(digest):
            self._below.put(digest, record)

    def spill_until(self, is_over: Callable[[], bool]) -> None:
        """Give records to the tier below, the most recently used ones first. The process is about to end."""
        for digest, record in reversed(list(self._records.items())):
            if is_over():
                return
            self._spill(digest, record)
