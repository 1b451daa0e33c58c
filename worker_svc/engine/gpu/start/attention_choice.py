"""Chooses and checks the attention implementation for `--attention`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu.attention.flash import FlashAttention, flash_package
from worker_svc.engine.gpu.attention.flash3 import Flash3Attention, flash3_package
from worker_svc.engine.gpu.attention.flashinfer import FlashInferAttention, flashinfer_package
from worker_svc.engine.gpu.attention.paged import Attention, TorchAttention, TritonAttention
from worker_svc.engine.gpu.start.checks.attention import MAX_ROWS, MAX_TOKENS, attention_cases
from worker_svc.engine.gpu.start.checks.case import TOLERANCES, Case, Setup, verify

logger = logging.getLogger(__name__)

FLASH_BLOCK = 256
HOPPER = (9, 0)  # here the Triton kernel is as fast as flash-attn 2, and flash-attn 3 is faster for prompts
BLACKWELL = (10, 0)  # first compute capability without kernels in flash-attn 3
FP8_TOLERANCE = 2 * TOLERANCES[torch.float8_e4m3fn]  # queries and softmax weights are rounded as well
OTHER_ATTENTION = "install another version of Triton, or use --attention flash or torch with --determinism best_effort"


def choose_attention(name: str, setup: Setup, *, max_rows: int, max_tokens: int) -> Attention:
    """The requested attention. `auto` selects a library that is better on this GPU if it can serve, otherwise Triton.

    Raises BackendUnavailableError if it cannot serve these settings or fails its start-up check.
    """
    if name == "torch":
        _refuse_exact(name, setup)
        return TorchAttention()
    if name == "flashinfer":
        return _make_flashinfer(setup, max_rows, max_tokens)
    if name in LIBRARIES:
        return LIBRARIES[name](setup)
    library = preferred_library(setup) if name == "auto" and not setup.is_exact else None
    if library is not None:
        try:
            return LIBRARIES[library](setup)
        except BackendUnavailableError as error:
            is_missing = isinstance(error.__cause__, ImportError)
            logger.log(logging.INFO if is_missing else logging.WARNING, "--attention auto uses triton: %s", error)
    if setup.is_compiled:
        for case in triton_cases(setup):
            verify(case, OTHER_ATTENTION, is_exact=setup.is_exact)
    return _make_triton(setup, max_rows, max_tokens)


def triton_cases(setup: Setup) -> Iterator[Case]:
    """The cases that check the Triton kernel."""
    return attention_cases(_make_triton(setup, MAX_ROWS, MAX_TOKENS), "paged_attention", setup)


def _make_triton(setup: Setup, max_rows: int, max_tokens: int) -> TritonAttention:
    return TritonAttention(
        setup.model.heads, setup.determinism, max_rows=max_rows, max_tokens=max_tokens,
        windows=[shape.window for shape in setup.attention_shapes], max_model_len=setup.max_model_len,
        dtype=setup.dtype, device=setup.device,
    )  # fmt: skip


def preferred_library(setup: Setup) -> str | None:
    """The library that `auto` prefers to Triton on this device. None: no library.

    flash-attn 3 is not preferred for an fp8 cache, because it also rounds queries and softmax weights to fp8.
    """
    if setup.device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(setup.device)
    if capability < HOPPER:
        return "flash"
    return "flash3" if capability < BLACKWELL and not setup.has_scaled_cache else None


def _make_flash(setup: Setup) -> Attention:
    _refuse_exact("flash", setup)
    if setup.has_scaled_cache:
        raise BackendUnavailableError("attention flash cannot read kv_cache_dtype fp8; use --attention triton")
    if setup.block_size % FLASH_BLOCK:
        raise BackendUnavailableError(
            f"attention flash needs a block_size that is a multiple of {FLASH_BLOCK}, got {setup.block_size}; "
            f"use --block-size {FLASH_BLOCK} or --attention triton"
        )
    attention = FlashAttention(flash_package())
    _check(attention, "flash-attn", "install another version of flash-attn, or use --attention triton", setup)
    return attention


def _make_flash3(setup: Setup) -> Attention:
    _refuse_exact("flash3", setup)
    attention = Flash3Attention(flash3_package(), setup.attention_shapes, setup.block_size, setup.cache_dtype)
    advice = "install another version of flash-attn 3, or use --attention triton"
    _check(attention, "flash-attn 3", advice, setup, FP8_TOLERANCE if setup.has_scaled_cache else None)
    return attention


def _make_flashinfer(setup: Setup, max_rows: int, max_tokens: int) -> Attention:
    """`auto` never chooses it, because it compiles its kernels at first use, which takes minutes."""
    _refuse_exact("flashinfer", setup)
    attention = FlashInferAttention(
        flashinfer_package(), setup.attention_shapes, block_size=setup.block_size, max_rows=max(max_rows, MAX_ROWS),
        max_tokens=max(max_tokens, max_rows, MAX_TOKENS), max_model_len=setup.max_model_len, dtype=setup.dtype,
        kv_dtype=setup.cache_dtype, device=setup.device,
    )  # fmt: skip
    _check(attention, "flashinfer", "install another version of flashinfer, or use --attention triton", setup)
    return attention


LIBRARIES: dict[str, Callable[[Setup], Attention]] = {"flash": _make_flash, "flash3": _make_flash3}


def _check(attention: Attention, name: str, advice: str, setup: Setup, tolerance: float | None = None) -> None:
    for case in attention_cases(attention, name, setup, tolerance):
        verify(case, advice, is_exact=setup.is_exact)


def _refuse_exact(name: str, setup: Setup) -> None:
    if setup.is_exact:
        raise BackendUnavailableError(
            f"attention {name} cannot be exact: its results depend on the batch; "
            "use --attention triton or --determinism best_effort"
        )
