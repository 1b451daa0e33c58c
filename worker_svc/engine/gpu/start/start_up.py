"""The start-up: checks and choices that come before the weights are loaded (device, dtype, attention, kernels), and its
progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import ComputeDtype, EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.gpu.attention.paged import Attention
from worker_svc.engine.gpu.layers.linears import FP8_CAPABILITY, has_fp8
from worker_svc.engine.gpu.start.attention_choice import choose_attention, triton_cases
from worker_svc.engine.gpu.start.checks.adapters import adapter_cases
from worker_svc.engine.gpu.start.checks.case import Case, Setup, launch, verify
from worker_svc.engine.gpu.start.checks.experts import expert_cases
from worker_svc.engine.gpu.start.checks.layers import (
    activation_cases,
    linear_cases,
    norm_cases,
    rope_store_cases,
    soft_cap_cases,
)
from worker_svc.engine.gpu.start.checks.sampling import (
    banned_cases,
    filtered_cases,
    greedy_cases,
    noise_cases,
    processed_cases,
)
from worker_svc.engine.gpu.start.checks.steps import deltas_cases, prepare_cases
from worker_svc.engine.gpu.start.checks.weights import fp8_cases, int4_cases
from worker_svc.engine.gpu.start.compilation import compile_first

DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
STORED = {dtype: name for name, dtype in DTYPES.items()}
HEAD_DIMS = (16, 256)  # lower limit: tensor cores; upper limit: registers and shared memory
OTHER_TRITON = "install another version of Triton, or use --backend cpu"
# The kernels that are checked. Attention is checked where it is chosen (attention_choice.py).
CHECKS: tuple[tuple[Callable[[Setup], Iterator[Case]], str], ...] = (
    (linear_cases, "install another version of Triton, or use --determinism best_effort (linear layers by cuBLAS)"),
    (fp8_cases, OTHER_TRITON),
    (int4_cases, OTHER_TRITON),
    (expert_cases, OTHER_TRITON),
    (adapter_cases, "install another version of Triton, or start the worker without adapters"),
    (norm_cases, OTHER_TRITON),
    (rope_store_cases, OTHER_TRITON),
    (activation_cases, OTHER_TRITON),
    (soft_cap_cases, OTHER_TRITON),
    (deltas_cases, OTHER_TRITON),
    (prepare_cases, OTHER_TRITON),
    (banned_cases, OTHER_TRITON),
    (processed_cases, OTHER_TRITON),
    (greedy_cases, OTHER_TRITON),
    (noise_cases, OTHER_TRITON),
    (filtered_cases, OTHER_TRITON),
)


def choose_checked(config: EngineConfig, setup: Setup) -> Attention:
    """The attention to use, after the start-up checks of all kernels."""
    if setup.has_scaled_cache:
        _check_fp8(setup.device, "kv_cache_dtype fp8", "use --kv-cache-dtype auto")
    if config.quantize == "fp8":
        _check_fp8(setup.device, "quantize fp8", "start the worker without --quantize")
    checks = [(case, advice) for cases, advice in CHECKS for case in cases(setup)] if setup.is_compiled else []
    cases = [case for case, _ in checks]
    if setup.is_compiled and config.attention in ("auto", "triton"):
        cases = [*triton_cases(setup), *cases]  # first what takes longest to compile
    compile_first([partial(launch, case, is_exact=setup.is_exact) for case in cases], setup.group)
    attention = choose_attention(
        config.attention, setup, max_rows=config.max_num_seqs, max_tokens=config.max_num_batched_tokens
    )
    for case, advice in checks:
        verify(case, advice, is_exact=setup.is_exact)
    return attention


def find_device(rank: int = 0) -> torch.device:
    """This rank's GPU, or the CPU under Triton's interpreter. Raises BackendUnavailableError if there is neither."""
    if torch.cuda.is_available():
        if rank >= torch.cuda.device_count():
            raise BackendUnavailableError(
                f"rank {rank} of this host has no GPU: {torch.cuda.device_count()} are visible; lower "
                "tensor_parallel_size"
            )
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    import triton

    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    raise BackendUnavailableError("no CUDA device was found; use --backend cpu")


def check_heads(model: ModelConfig) -> None:
    """Raises BackendUnavailableError for a head size that the kernels do not compute."""
    dim, (least, most) = model.heads.head_dim, HEAD_DIMS
    if not least <= dim <= most:
        raise BackendUnavailableError(
            f"head_dim {dim} is outside {least} to {most}, the range of the cuda backend; use --backend cpu"
        )


def _check_fp8(device: torch.device, setting: str, advice: str) -> None:
    if not has_fp8(device):
        major, minor = FP8_CAPABILITY
        raise BackendUnavailableError(f"{setting} needs a GPU of compute capability {major}.{minor} or newer; {advice}")


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> ComputeDtype:
    """The dtype of the weights and of the KV cache, as set or as stored."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = STORED.get(checkpoint.stored_dtype(), "bfloat16")  # other types are refused when they are read
    if dtype == "bfloat16" and device.type != "cuda":
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
