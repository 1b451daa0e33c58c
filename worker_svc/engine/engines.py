"""The engines by `--backend`: each is imported when it loads a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.nodes import Facts, Leader, Nodes

if TYPE_CHECKING:
    from worker_svc.engine.gpu.runner import DeviceRunner
    from worker_svc.engine.model_runner import ModelRunner


def load_runner(
    config: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None = None
) -> ModelRunner | DeviceRunner:
    """The loaded model. `nodes`: the links to other hosts, if nnodes is 2 or more. Raises BackendUnavailableError for a
    backend that cannot run here."""
    if config.backend != "cuda":
        from worker_svc.engine.model_runner import ModelRunner

        return ModelRunner(config, progress)
    try:
        from worker_svc.engine.gpu.ranks.parallel_runner import ParallelRunner
        from worker_svc.engine.gpu.runner import DeviceRunner
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    return (
        DeviceRunner(config, progress) if config.tensor_parallel_size == 1 else ParallelRunner(config, progress, nodes)
    )


def follow(config: EngineConfig, connect: Callable[[Facts], Leader]) -> None:
    """Runs the ranks of a node other than 0 until the leader stops them. `connect` joins the leader. Raises as
    `load_runner`, ValueError for settings or a model that cannot be used."""
    try:
        from worker_svc.engine.gpu.ranks.node import run_node
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    run_node(config, connect)


def _not_installed(error: ModuleNotFoundError) -> BackendUnavailableError:
    return BackendUnavailableError(f"{error.name} is not installed; pip install 'quire[cuda]'")
