"""What schedulers say about cached prefixes, and of which worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Holder(NamedTuple):
    """A worker in one life of its process."""

    worker_id: str
    worker_epoch: int


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Blocks that became cached prefixes on one worker (True), or stopped being ones (False), in order."""

    holder: Holder
    blocks: Sequence[tuple[bytes, bool]]  # digest, is cached
