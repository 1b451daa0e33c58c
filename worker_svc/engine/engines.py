"""The engines by `--backend`: each is imported when it loads a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker_svc.engine.backend import BackendUnavailableError, NoDeviceError
from worker_svc.engine.checkpoint.model_folder import decoder_config, read_config
from worker_svc.engine.config import CPU_SIZES, EngineConfig
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder
from worker_svc.engine.nodes import Facts, Leader, Nodes

if TYPE_CHECKING:
    from worker_svc.engine.gpu.runner import DeviceRunner
    from worker_svc.engine.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Settings of GPUs, and what a CPU uses instead.
OF_GPUS = {"dtype": ("float16", "bfloat16"), "kv_cache_dtype": ("fp8", "auto"), "quantize": ("fp8", None)}


def load_runner(
    config: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None = None
) -> ModelRunner | DeviceRunner:
    """The loaded model. `nodes`: the links to other hosts, if nnodes is 2 or more. Without a usable GPU the CPU engine
    loads it, unless `kernels` is "triton". Raises BackendUnavailableError for a backend that cannot run here."""
    from worker_svc.engine.model_runner import ModelRunner

    if config.backend != "cuda":
        return ModelRunner(config, progress)
    try:
        return _load_on_gpu(config, progress, nodes)
    except NoDeviceError as error:
        if config.kernels == "triton" or config.nnodes > 1:
            raise
        on_cpu, reason = _for_cpu(config, error.reason)
    logger.warning("%s", reason)
    return ModelRunner(on_cpu, progress, degradations=(reason,))


def _for_cpu(config: EngineConfig, reason: str) -> tuple[EngineConfig, str]:
    """Settings with which the CPU engine serves the model, and why it does."""
    unused = {name: instead for name, (value, instead) in OF_GPUS.items() if getattr(config, name) == value}
    ignored = "".join(f", without {name} {OF_GPUS[name][0]}" for name in unused)
    step = min(config.max_num_batched_tokens, CPU_SIZES.max_num_batched_tokens)
    fields: dict[str, Any] = {"backend": "cpu", "tensor_parallel_size": 1, "max_num_batched_tokens": step} | unused
    return replace(config, **fields), f"the CPU engine serves{ignored}, which is much slower: {reason}"


def _load_on_gpu(
    config: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None
) -> ModelRunner | DeviceRunner:
    """Raises NoDeviceError before anything is loaded or started."""
    from worker_svc.engine.gpu.start.setup import find_device
    from worker_svc.engine.model_runner import ModelRunner

    find_device(config)
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
    config = decoder_config(read_config(folder))
    return encoder_of(config) is None and not is_encoder_decoder(config)


def _not_installed(error: ModuleNotFoundError) -> BackendUnavailableError:
    return BackendUnavailableError(f"{error.name} is not installed; pip install 'quire[cuda]'")
