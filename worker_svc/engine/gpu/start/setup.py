"""What is chosen and checked before the weights are loaded: device, dtype, shapes of this rank; and the progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from worker_svc.engine.backend import AttentionShape, BackendUnavailableError, NoDeviceError
from worker_svc.engine.checkpoint.features import FEATURES, IN_TORCH
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import ComputeDtype, EngineConfig, Kernels
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels.language import triton, why_not_launched
from worker_svc.engine.gpu.layers.linears import FP8_CAPABILITY, has_fp8
from worker_svc.engine.gpu.layers.weights import shard_config

logger = logging.getLogger(__name__)

DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
STORED = {dtype: name for name, dtype in DTYPES.items()}
HEAD_DIMS = (16, 256)  # lower limit: tensor cores; upper limit: registers and shared memory


class Degradations(list[str]):
    """Why this worker serves slower than it could."""

    def note(self, reason: str) -> None:
        """Adds a reason, and logs it."""
        logger.warning("%s", reason)
        self.append(reason)


@dataclass(frozen=True, slots=True)
class Setup:
    """The shapes and settings of this rank."""

    config: EngineConfig
    whole: ModelConfig
    model: ModelConfig  # this rank's shard: its heads and its part of the intermediate size
    dtype_name: ComputeDtype
    device: torch.device
    group: Group
    degradations: Degradations = field(default_factory=Degradations)
    in_torch: tuple[str, ...] = ()  # kernels whose torch forms compute this model

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def is_exact(self) -> bool:
        return self.config.determinism == "exact"

    @property
    def is_compiled(self) -> bool:
        """Whether kernels are compiled. Elsewhere they are interpreted, which tests cover."""
        return self.device.type == "cuda"

    @property
    def has_scaled_cache(self) -> bool:
        return self.config.kv_cache_dtype == "fp8"

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.has_scaled_cache else self.dtype

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.whole.max_position_embeddings

    @property
    def max_tokens(self) -> int:
        """Of a step."""
        return max(self.config.max_num_batched_tokens, self.config.max_num_seqs)

    @property
    def vocab(self) -> range:
        """This rank's part of the vocabulary."""
        return self.group.vocab_part(self.whole.vocab_size)

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks: the libraries do not compute them."""
        return bool(self.whole.architecture.names.sinks)

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        """The different attentions of the layers."""
        return list(dict.fromkeys(self.model.attention(index) for index in range(self.model.num_layers)))


def make_setup(
    config: EngineConfig,
    checkpoint: Checkpoint,
    whole: ModelConfig,
    device: torch.device,
    group: Group,
    degradations: Degradations,
) -> Setup:
    """Raises BackendUnavailableError for a model or settings that the device cannot serve."""
    model = shard_config(whole, group)
    in_torch = () if config.kernels == "torch" else kernels_in_torch(model, config.kernels, degradations)
    if config.kv_cache_dtype == "fp8" and (lacking := whole.features() & {"latents", "kv_layouts"}):
        raise BackendUnavailableError(
            f"kv_cache_dtype fp8 cannot be used with {FEATURES[min(lacking)]}; use --kv-cache-dtype auto"
        )
    if config.kv_cache_dtype == "fp8":
        _check_fp8(device, "kv_cache_dtype fp8", "use --kv-cache-dtype auto")
    if config.quantize == "fp8":
        _check_fp8(device, "quantize fp8", "start the worker without --quantize")
    if config.quantize == "int8" and any(layer.experts is not None for layer in whole.layers):
        raise BackendUnavailableError(
            "quantize int8 does not serve experts on a GPU; use --quantize fp8, or --backend cpu"
        )
    if model.is_recurrent and config.kernels != "torch":
        degradations.note("recurrent layers run in plain torch, prompts token by token, which is slower")
    if model.is_recurrent and config.speculate is not None:
        degradations.note("no step is launched ahead, because the host chooses the states that follow right drafts")
    dtype = choose_dtype(config, checkpoint, device)
    return Setup(config, whole, model, dtype, device, group, degradations, in_torch)


def kernels_in_torch(model: ModelConfig, kernels: Kernels, degradations: Degradations) -> tuple[str, ...]:
    """The kernels that no form in Triton has for this model. Raises BackendUnavailableError if Triton is required."""
    reasons: dict[str, str] = {}
    for feature in sorted(model.features() & IN_TORCH.keys()):
        reasons |= dict.fromkeys(IN_TORCH[feature], f"the model has {FEATURES[feature]}")
    least, most = HEAD_DIMS
    for dim in {layer.heads.head_dim for layer in model.layers if layer.attends and layer.latents is None}:
        if not least <= dim <= most:
            reasons.setdefault("attention", f"head_dim {dim} is outside {least} to {most}")
    for name, reason in reasons.items():
        if kernels == "triton":
            raise BackendUnavailableError(f"Triton has no form of {name} here: {reason}; use --kernels auto")
        degradations.note(f"plain torch replaces {name}, which is slower: {reason}")
    return tuple(reasons)


def find_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """This rank's GPU, or the CPU for torch forms and for Triton's interpreter. Raises NoDeviceError if there is
    neither, BackendUnavailableError if only this rank has none."""
    if torch.cuda.is_available():
        if rank >= torch.cuda.device_count():
            raise BackendUnavailableError(
                f"rank {rank} of this host has no GPU: {torch.cuda.device_count()} are visible; lower "
                "tensor_parallel_size"
            )
        device = torch.device("cuda", rank)
        try:
            torch.cuda.set_device(device)
            torch.ones(1, device=device).add_(1)
            torch.cuda.synchronize(device)
        except RuntimeError as error:  # for example: in use by another process, or too old for this torch
            raise NoDeviceError(f"{device} cannot be used: {_first_line(error)}") from error
        return device
    if config.kernels == "torch" or triton.knobs.runtime.interpret:
        return torch.device("cpu")
    raise NoDeviceError(f"no CUDA device was found: {_why_no_device()}")


def usable_kernels(config: EngineConfig, device: torch.device, degradations: Degradations) -> Kernels:
    """`--kernels`, or torch where no kernel of Triton can be launched. Raises BackendUnavailableError if Triton is
    required there."""
    if config.kernels == "torch" or (reason := why_not_launched(device)) is None:
        return config.kernels
    if config.kernels == "triton":
        raise BackendUnavailableError(f"{reason}; use --kernels auto, or --backend cpu")
    degradations.note(f"plain torch replaces all kernels, which is slower: {reason}")
    return "torch"


def _why_no_device() -> str:
    """Torch's reason, for example a driver that is too old for the CUDA version of this torch."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"{_first_line(error)} (torch {torch.__version__} is built for CUDA {built_for})"
    return f"torch {torch.__version__}, built for CUDA {built_for}, sees no GPU; check CUDA_VISIBLE_DEVICES"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _check_fp8(device: torch.device, setting: str, advice: str) -> None:
    if not has_fp8(device):
        major, minor = FP8_CAPABILITY
        raise BackendUnavailableError(f"{setting} needs a GPU of compute capability {major}.{minor} or newer; {advice}")


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> ComputeDtype:
    """The dtype of the weights and of the KV cache, as set or as stored."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = STORED.get(checkpoint.stored_dtype(), "bfloat16")  # other types are refused when they are read
    if dtype == "bfloat16" and device.type != "cuda" and config.kernels != "torch":
        raise BackendUnavailableError("Triton's interpreter multiplies bfloat16 wrongly; use --dtype float32")
    return dtype


class Stages:
    """Combines the progress of weights and graphs. Weights may take minutes, graphs seconds."""

    WEIGHTS = 0.8  # fraction of the weights if graphs follow

    def __init__(self, progress: Callable[[float], None] | None, *, has_graphs: bool) -> None:
        self._progress = progress or (lambda fraction: None)
        self._share = self.WEIGHTS if has_graphs else 1.0

    def weights(self, fraction: float) -> None:
        self._progress(fraction * self._share)

    def graphs(self, fraction: float) -> None:
        self._progress(self._share + fraction * (1 - self._share))

    def end(self) -> None:
        self._progress(1.0)
