"""The engines by `--backend`: each is imported when it loads a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.model_folder import decoder_config, read_object
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder
from worker_svc.engine.nodes import Facts, Leader, Nodes

if TYPE_CHECKING:
    from worker_svc.engine.gpu.runner import DeviceRunner
    from worker_svc.engine.model_runner import ModelRunner


def load_runner(
    config: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None = None
) -> ModelRunner | DeviceRunner:
    """The loaded model. `nodes`: the links to other hosts, if nnodes is 2 or more. Raises BackendUnavailableError for a
    backend that cannot run here."""
    from worker_svc.engine.model_runner import ModelRunner

    if config.backend != "cuda":
        return ModelRunner(config, progress)
    if not is_decoder(config.model_dir):
        from worker_svc.engine.gpu.torch_layers import layers_for

        return ModelRunner(config, progress, layers_for(config))
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


def is_decoder(folder: Path) -> bool:
    """Whether the model of a folder is neither an encoder nor an encoder-decoder. Raises CheckpointError."""
    config = decoder_config(read_object(folder / "config.json"))
    return encoder_of(config) is None and not is_encoder_decoder(config)


def _not_installed(error: ModuleNotFoundError) -> BackendUnavailableError:
    return BackendUnavailableError(f"{error.name} is not installed; pip install 'quire[cuda]'")
