"""Chooses and checks the attention implementation for `--attention`."""

from __future__ import annotations

import logging
from functools import partial

import torch

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu.attention import Attention, TorchAttention, TritonAttention
from worker_svc.engine.gpu.checks.attention import MAX_ROWS, MAX_TOKENS, attention_cases
from worker_svc.engine.gpu.checks.case import Setup, verify
from worker_svc.engine.gpu.flash import FlashAttention, flash_package

logger = logging.getLogger(__name__)

FLASH_BLOCK = 256
HOPPER = (9, 0)  # on this and newer GPUs the Triton kernel is as fast as flash-attn 2
OTHER_ATTENTION = "install another version of Triton, or use --attention flash or torch with --determinism best_effort"


def choose_attention(name: str, setup: Setup, *, max_rows: int, max_tokens: int) -> Attention:
    """The requested attention. `auto` selects flash-attn on GPUs older than Hopper if it can serve, otherwise Triton.

    Raises BackendUnavailableError if it cannot serve these settings or fails its start-up check.
    """
    if name == "torch":
        _refuse_exact(name, setup)
        return TorchAttention()
    if name == "flash":
        return _make_flash(setup)
    if name == "auto" and is_flash_first(setup.device) and not setup.is_exact:
        try:
            return _make_flash(setup)
        except BackendUnavailableError as error:
            logger.warning("--attention auto uses triton: %s", error)
    make = partial(
        TritonAttention, setup.model.heads, setup.determinism,
        windows=[shape.window for shape in setup.attention_shapes], max_model_len=setup.max_model_len,
        dtype=setup.dtype, device=setup.device,
    )  # fmt: skip
    if setup.is_compiled:
        attention = make(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS)
        _check(attention, "paged_attention", OTHER_ATTENTION, setup)
    return make(max_rows=max_rows, max_tokens=max_tokens)


def is_flash_first(device: torch.device) -> bool:
    """Whether `auto` prefers flash-attn on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < HOPPER


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


def _check(attention: Attention, name: str, advice: str, setup: Setup) -> None:
    for case in attention_cases(attention, name, setup):
        verify(case, advice, is_exact=setup.is_exact)


def _refuse_exact(name: str, setup: Setup) -> None:
    if setup.is_exact:
        raise BackendUnavailableError(
            f"attention {name} cannot be exact: its results depend on the batch; "
            "use --attention triton or --determinism best_effort"
        )
