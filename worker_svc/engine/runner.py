"""A loaded model as the worker's shell sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from step_protocol.columns import U32
from step_protocol.messages import StepBatch, StepOutput
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.decoder.pool.block_payload import Movable
from worker_svc.engine.speculation.drafts import DraftCounts


class Runner:
    """A model with its KV pool and open rows. One thread at a time may call it."""

    info: EngineInfo
    adapters: AdapterStore[Any, Any] | None = None  # None: it computes none
    images: Any = None  # an ImageEncoder; None: the model takes none
    launches = works_when_idle = False  # whether it has these methods
    has_new_weights = False  # whether its weights can change: it is UpdatableWeights

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Drafts so far; None: no row speculates."""
        return None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of host memory by use, as far as they are known. Any thread may read it."""
        return {}

    def execute(self, batch: StepBatch) -> StepOutput:
        """Applies and runs one step. A bad row becomes a RowError and affects no other row."""
        raise NotImplementedError

    def committed_blocks(self) -> Iterable[tuple[U32, list[bytes], U32]]:
        """Block ids [N], their digests and their tokens [N, block_size] of all committed blocks, in pieces."""
        raise NotImplementedError

    def forget_prefixes(self) -> None:
        """No block of the pool stays committed. Called between two steps."""
        raise NotImplementedError

    def movable_blocks(self) -> Movable | None:
        """The blocks of the pool as bytes; None if they cannot leave it."""
        return None

    def reset_rows(self) -> None:
        """Closes all rows, for a new lease. Committed blocks stay."""
        raise NotImplementedError

    def rows_used(self) -> int:
        """The number of open rows."""
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> Any:
        """Starts a step while the previous one still runs. Any thread may wait for the `result` of what it returns."""
        raise NotImplementedError

    def work_when_idle(self) -> bool:
        """Does a short part of the work that can wait until the worker is idle. False if there is none."""
        return False
