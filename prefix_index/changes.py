"""Changes of cached prefixes, as schedulers publish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Holder(NamedTuple):
    """One worker process: a restarted worker has a new epoch."""

    worker_id: str
    worker_epoch: int


@dataclass(frozen=True, slots=True)
class RemoteHolder:
    """A worker that another scheduler leases, and how many leading blocks of a prefix it holds."""

    holder: Holder
    scheduler: str  # host:port
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Changes of cached prefixes on one worker, in order. True: a block was cached. False: it was evicted or reused."""

    holder: Holder
    blocks: Sequence[tuple[bytes, bool]]  # digest, is cached
