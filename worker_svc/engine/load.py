"""Loads a model with the engine of `--backend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig

if TYPE_CHECKING:
    from worker_svc.engine.gpu.runner import DeviceRunner
    from worker_svc.engine.model_runner import ModelRunner


def load_runner(config: EngineConfig, progress: Callable[[float], None]) -> ModelRunner | DeviceRunner:
    """The loaded model. Raises BackendUnavailableError for a backend that cannot run here."""
    if config.backend != "cuda":
        from worker_svc.engine.model_runner import ModelRunner

        return ModelRunner(config, progress)
    try:
        from worker_svc.engine.gpu.ranks import ParallelRunner
        from worker_svc.engine.gpu.runner import DeviceRunner
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"{error.name} is not installed; pip install 'quire[cuda]'") from error
    return (DeviceRunner if config.tensor_parallel_size == 1 else ParallelRunner)(config, progress)
