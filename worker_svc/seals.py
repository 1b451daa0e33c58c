"""Seals of committed blocks. A seal proves to the next scheduler under which lease a block was committed.

A seal is 24 bytes: the scheduler_epoch of the lease, written by this worker, and the tag that the scheduler sent (zeros
if it sent none). The worker cannot check a tag: it does not have the schedulers' key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from step_protocol.columns import U32

TAG_BYTES = 16
SEAL_BYTES = 8 + TAG_BYTES


class Seals:
    """The newest seal of each block. Uses no memory until a commit has tags."""

    def __init__(self) -> None:
        self._seals: npt.NDArray[np.uint8] = np.zeros((0, SEAL_BYTES), np.uint8)

    def note(self, scheduler_epoch: int, block_ids: U32, tags: bytes) -> None:
        """Records that blocks [K] were committed under this lease. `tags`: 16 bytes x K, or empty."""
        if not (tags or len(self._seals)):
            return
        self._grow(int(block_ids.max()) + 1)
        seals = np.zeros((len(block_ids), SEAL_BYTES), np.uint8)
        seals[:, :8] = np.frombuffer(scheduler_epoch.to_bytes(8, "little"), np.uint8)
        if tags:
            seals[:, 8:] = np.frombuffer(tags, np.uint8).reshape(-1, TAG_BYTES)
        self._seals[block_ids] = seals

    def of(self, block_ids: U32) -> bytes:
        """24 bytes per block; zeros for a block without a seal. Empty if no block has one."""
        if not len(self._seals):
            return b""
        self._grow(int(block_ids.max(initial=0)) + 1)
        return self._seals[block_ids].tobytes()

    def _grow(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._seals)
        if missing > 0:
            more = np.zeros((max(missing, len(self._seals)), SEAL_BYTES), np.uint8)
            self._seals = np.concatenate((self._seals, more))
