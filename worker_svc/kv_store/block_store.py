"""The tiers of one worker, beside its steps: memory, files, or files below memory.

    model thread    offer     committed and used blocks enter a queue; nothing is copied
    writer thread   copies each block while steps run, drops the copy if a step wrote to the block meanwhile, and writes
    reader threads  read      one record each, checked

A block is written to the first tier once, and is the most recently used one there when a row is opened with it. So the
tiers hold what the pool evicts. Watchers get the digests that the tiers hold, and then each change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from step_protocol.columns import U32
from worker_svc.kv_store.memory_tier import MemoryTier
from worker_svc.kv_store.record import BadRecordError, Found, Origin, RecordFormat, WantedBlock
from worker_svc.kv_store.tier import Tier
from worker_svc.seals import SEAL_BYTES

log = logging.getLogger(__name__)

READ_BYTES = 4 << 20  # of records that are read by one thread at once
MAX_QUEUED = 1 << 14  # committed blocks that wait for the writer
WRITER_NICENESS = 10
NUM_READERS = 2
SPILL_S = 5.0  # at the end of the process

OnChange = Callable[[bytes, str | None], None]  # a digest, and the name of the first tier that holds it


class Committed(NamedTuple):
    """Blocks that are committed: columns of length N."""

    worker_epoch: int
    block_ids: U32
    digests: Sequence[bytes]
    seals: bytes  # SEAL_BYTES each; empty: zeros

    def origins(self) -> Iterator[tuple[bytes, Origin]]:
        """Digest and origin of each block."""
        seals = self.seals or bytes(SEAL_BYTES * len(self.block_ids))
        for index, (block, digest) in enumerate(zip(self.block_ids.tolist(), self.digests, strict=True)):
            seal = seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
            yield digest, Origin(self.worker_epoch, block, seal)


class BlockStore:
    """Writes committed blocks to the first of some tiers in the background, and reads them back from any. `offer` may
    be called by one thread.
    """

    def __init__(self, record_format: RecordFormat, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers
        self._format = record_format
        self._queue: deque[Committed] = deque()
        self.num_queued = 0  # blocks that the writer has not looked at
        self._wake = threading.Condition()
        self._writing = threading.Lock()  # held while a part of `_current` is written
        self._current: Committed | None = None
        self._is_closed = False
        self._watchers: set[OnChange] = set()
        self._guard = threading.Lock()
        self.readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tier-reader")
        self._writer = threading.Thread(target=self._write_all, name="tier-writer", daemon=True)

    def start(self) -> None:
        """Open the tiers and start to write. Blocks while a folder is read."""
        for tier in self.tiers:
            tier.open()
        self._writer.start()

    def close(self, *, is_last: bool = True) -> None:
        """Stop; blocks in the queue are not written. `is_last`: the next process may use what is in memory now."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._writer.join()
        self.readers.shutdown(wait=False, cancel_futures=True)
        first, end = self.tiers[0], time.monotonic() + SPILL_S
        if is_last and isinstance(first, MemoryTier):
            first.spill_until(lambda: time.monotonic() > end)
        for tier in self.tiers:
            tier.close()

    # -- writing ------------------------------------------------------------------------------------------------------

    def offer(self, committed: Committed) -> None:
        """Blocks were committed or used. While the writer is far behind, they are not written."""
        count = len(committed.block_ids)
        with self._wake:
            is_late = self.num_queued + count > MAX_QUEUED
            if not is_late:
                self.num_queued += count
                self._queue.append(committed)
                self._wake.notify()
        self.tiers[0].counts.num_dropped += count if is_late else 0

    def clear(self) -> None:
        """Remove all records; blocks that were offered before are not written."""
        with self._wake:
            self.num_queued -= sum(len(committed.block_ids) for committed in self._queue)
            self._queue.clear()
            self._current = None
        with self._writing:
            for tier in self.tiers:
                for digest in tier.digests():
                    tier.forget(digest)

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while (committed := self._next()) is not None:
            blocks = list(committed.origins())
            for record_format, place in self._format.parts(committed.block_ids.tolist(), READ_BYTES):
                if self._is_closed:
                    return
                with self._writing:
                    if self._current is committed:  # else they are cleared
                        self._write_part(record_format, blocks[place])
            with self._wake:
                self.num_queued -= len(committed.block_ids)

    def _next(self) -> Committed | None:
        with self._wake:
            while not self._queue and not self._is_closed:
                self._wake.wait()
            self._current = None if self._is_closed else self._queue.popleft()
            return self._current

    def _write_part(self, record_format: RecordFormat, blocks: Sequence[tuple[bytes, Origin]]) -> None:
        try:
            self._write(record_format, blocks)
        except Exception:  # some blocks must not end the thread
            log.exception("blocks could not be written to the tier")
            self.tiers[0].counts.num_dropped += len(blocks)

    def _write(self, record_format: RecordFormat, blocks: Sequence[tuple[bytes, Origin]]) -> None:
        first = self.tiers[0]
        new = [(digest, origin) for digest, origin in blocks if not first.touch(digest)]
        with record_format.reading([(origin.block_id, digest) for digest, origin in new]) as records:
            for digest, origin in new:
                record = np.empty(records.num_bytes, np.uint8)
                if records.pack(digest, origin, record):
                    first.put(digest, record)
                else:  # it is evicted already
                    first.counts.num_dropped += 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_all(self, wanted: Sequence[WantedBlock]) -> list[Found]:
        """The blocks of the tiers, up to one that they do not have."""
        found = []
        for one in wanted:
            if (block := self.read(one)) is None:
                break
            found.append(block)
        return found

    def read(self, wanted: WantedBlock) -> Found | None:
        """A block of the tiers; None if they have none that is exactly this block. Damaged records are removed."""
        for tier in self.tiers:
            started = time.perf_counter()
            found = self._read_from(tier, wanted)
            if found is not None:
                tier.counts.num_hits += 1
                tier.counts.read_s += time.perf_counter() - started
                return found
        self.tiers[-1].counts.num_misses += 1
        return None

    def _read_from(self, tier: Tier, wanted: WantedBlock) -> Found | None:
        data = tier.read(wanted.digest)
        if data is None:
            return None
        try:
            return self._format.of(wanted.block_id).unpack(data, wanted)
        except BadRecordError as error:
            log.warning("%s tier: the record of block %s is not used: %s", tier.name, wanted.digest.hex(), error)
            tier.counts.num_corrupt += 1
            tier.forget(wanted.digest)
            return None

    # -- watching -----------------------------------------------------------------------------------------------------

    def watch(self, on_change: OnChange) -> dict[bytes, str]:
        """Each digest, with the first tier that holds it. `on_change` gets each later change, in any thread, until
        `unwatch`. It may also get a change that the answer has already.
        """
        with self._guard:
            self._watchers.add(on_change)
        return {digest: tier.name for tier in reversed(self.tiers) for digest in tier.digests()}

    def unwatch(self, on_change: OnChange) -> None:
        """Report no more changes."""
        with self._guard:
            self._watchers.discard(on_change)

    def report(self, digest: bytes) -> None:
        """A tier has got or lost a record."""
        with self._guard:
            place = next((tier.name for tier in self.tiers if tier.holds(digest)), None)
            for on_change in self._watchers:
                on_change(digest, place)
