"""The runners of steps, as the executor sees them, and the choice of one."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from step_protocol.columns import U32
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import TensorChecksum
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineConfig, EngineInfo, StagedWeights
from worker_svc.engine.decoder.pool.block_payload import Movable
from worker_svc.engine.nodes import Nodes
from worker_svc.flags import sim_config
from worker_svc.metrics import ImageCounts
from worker_svc.simulator.runner import SimRunner

log = logging.getLogger(__name__)


class Runner(Protocol):
    """The methods of `worker_svc.engine.model_runner.ModelRunner` that the shell uses."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def adapters(self) -> AdapterStore[Any, Any] | None: ...
    def execute(self, batch: StepBatch) -> StepOutput: ...
    def committed_blocks(self) -> Iterable[tuple[U32, list[bytes], U32]]: ...
    def forget_prefixes(self) -> None: ...
    def movable_blocks(self) -> Movable | None: ...
    def reset_rows(self) -> None: ...
    def rows_used(self) -> int: ...


class Launched(Protocol):
    """A started step."""

    def result(self) -> StepOutput:
        """Waits for its output, in any thread."""
        ...


@runtime_checkable
class PipelinedRunner(Protocol):
    """A runner that starts a step on its device while the previous one still runs."""

    def launch(self, batch: StepBatch) -> Launched: ...


@runtime_checkable
class UpdatableRunner(Protocol):
    """A runner whose weights can change. `activate` and `sleep` are called in the model thread, between two steps."""

    def check_update(self, files: Sequence[Path]) -> list[TensorChecksum]: ...
    def stage(self, version: int, updates: Sequence[Path]) -> StagedWeights: ...
    def activate(self, staged: StagedWeights) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...


@runtime_checkable
class IdleRunner(Protocol):
    """A runner with work that can wait until the worker is idle."""

    def work_when_idle(self) -> bool:
        """Does a short part of it. False if there is none."""
        ...


@runtime_checkable
class ImageRunner(Protocol):
    """A runner whose model may take images."""

    @property
    def images(self) -> ImageCounts | None:
        """What it counts; None if its model takes none."""
        ...


def make_runner(
    args: argparse.Namespace, settings: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None
) -> Runner:
    """The simulation, or an engine with its model. Raises ValueError for settings that contradict the machine or the
    model."""
    if args.executor == "sim":
        return SimRunner(settings, sim_config(args))
    # After the flags are checked and the port is bound: importing torch takes seconds.
    log.info("starting: importing torch")  # `quire up` shows these lines
    from worker_svc.engine.backend import BackendUnavailableError
    from worker_svc.engine.engines import load_runner

    try:
        return load_runner(settings, progress, nodes)
    except BackendUnavailableError as error:
        raise ValueError(f"--backend {settings.backend}: {error}") from error
