"""The tier of one worker, beside its steps.

    model thread    offer     committed blocks enter a queue; nothing is copied
    writer thread   copies each block while steps run, drops the copy if a step wrote to the block meanwhile, and writes
    reader threads  read     one record each, checked

Watchers get the digests that the tier holds, and then each change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from worker_svc.engine.decoder.block_payload import MovableBlocks
from worker_svc.kv_store.disk_tier import DiskTier
from worker_svc.kv_store.record import BadRecordError, Found, Origin, WantedBlock, pack_record, unpack_record

log = logging.getLogger(__name__)

MAX_QUEUED = 1 << 14  # committed blocks that wait for the writer
WRITER_NICENESS = 10
NUM_READERS = 2

OnChange = Callable[[bytes, bool], None]


class Committed(NamedTuple):
    """A block that a step has committed."""

    digest: bytes
    origin: Origin


class BlockStore:
    """Writes committed blocks to a tier in the background, and reads them back. `offer` may be called by one thread."""

    def __init__(self, blocks: MovableBlocks, layout: bytes, tier: DiskTier) -> None:
        self.tier = tier
        self.layout = layout
        self._blocks = blocks
        self._queue: deque[Committed] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._watchers: set[OnChange] = set()
        self._guard = threading.Lock()
        self.readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tier-reader")
        self._writer = threading.Thread(target=self._write_all, name="tier-writer", daemon=True)

    def start(self) -> None:
        """Open the tier and start to write. Blocks while the folder is read."""
        self.tier.open()
        self._writer.start()

    def close(self) -> None:
        """Stop; blocks in the queue are not written."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._writer.join()
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.tier.close()

    # -- writing ------------------------------------------------------------------------------------------------------

    def offer(self, committed: Sequence[Committed]) -> None:
        """Blocks were committed. While the writer is far behind, they are not written."""
        with self._wake:
            room = MAX_QUEUED - len(self._queue)
            self._queue.extend(committed[:room])
            self._wake.notify()
        self.tier.counts.num_dropped += max(0, len(committed) - room)

    @property
    def num_queued(self) -> int:
        """Committed blocks that the writer has not looked at."""
        return len(self._queue)

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while (block := self._next()) is not None:
            try:
                self._write(block)
            except Exception:  # one block must not end the thread
                log.exception("a block could not be written to the tier")
                self.tier.counts.num_dropped += 1

    def _next(self) -> Committed | None:
        with self._wake:
            while not self._queue and not self._is_closed:
                self._wake.wait()
            return None if self._is_closed else self._queue.popleft()

    def _write(self, block: Committed) -> None:
        if self.tier.touch(block.digest):
            return
        found = self._blocks.read(block.origin.block_id, block.digest)
        if found is None:  # it is evicted already
            self.tier.counts.num_dropped += 1
            return
        self.tier.put(block.digest, pack_record(block.digest, self.layout, *found, block.origin))

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_all(self, wanted: Sequence[WantedBlock]) -> list[Found]:
        """The blocks of the tier, up to one that it does not have."""
        found = []
        for one in wanted:
            if (block := self.read(one)) is None:
                break
            found.append(block)
        return found

    def read(self, wanted: WantedBlock) -> Found | None:
        """A block of the tier; None if it has none that is exactly this block. A damaged record is removed."""
        counts, data = self.tier.counts, self.tier.read(wanted.digest)
        if data is None:
            counts.num_misses += 1
            return None
        try:
            found = unpack_record(data, wanted, self.layout, self._blocks.payload_bytes)
        except BadRecordError as error:
            log.warning("the record of block %s is not used: %s", wanted.digest.hex(), error)
            counts.num_corrupt += 1
            self.tier.forget(wanted.digest)
            return None
        counts.num_hits += 1
        return found

    # -- watching -----------------------------------------------------------------------------------------------------

    def watch(self, on_change: OnChange) -> list[bytes]:
        """The digests that the tier holds. `on_change` gets each later change, in any thread, until `unwatch`. It may
        also get a change that the list has already.
        """
        with self._guard:
            self._watchers.add(on_change)
        return self.tier.digests()

    def unwatch(self, on_change: OnChange) -> None:
        """Report no more changes."""
        with self._guard:
            self._watchers.discard(on_change)

    def report(self, digest: bytes, is_held: bool) -> None:
        """A change of the tier."""
        with self._guard:
            watchers = list(self._watchers)
        for on_change in watchers:
            on_change(digest, is_held)
