"""The runners of steps, as the executor sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from step_protocol.columns import U32
from step_protocol.messages import StepBatch, StepOutput
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineInfo
from worker_svc.metrics import ImageCounts


class Runner(Protocol):
    """The methods of `worker_svc.engine.model_runner.ModelRunner` that the shell uses."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def adapters(self) -> AdapterStore[Any, Any] | None: ...
    def execute(self, batch: StepBatch) -> StepOutput: ...
    def committed_blocks(self) -> Iterable[tuple[U32, list[bytes], U32]]: ...
    def reset_rows(self) -> None: ...
    def rows_used(self) -> int: ...


class Launched(Protocol):
    """A started step."""

    def result(self) -> StepOutput:
        """Waits for its output, in any thread."""
        ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that starts a step on its device while the previous one still runs."""

    def launch(self, batch: StepBatch) -> Launched: ...


@runtime_checkable
class ImageRunner(Protocol):
    """A runner whose model may take images."""

    @property
    def images(self) -> ImageCounts | None:
        """What it counts; None if its model takes none."""
        ...
