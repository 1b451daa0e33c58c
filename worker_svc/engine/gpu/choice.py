"""Which attention serves: the one behind `--attention`, if it can and computes what it should."""

from __future__ import annotations

import logging
from functools import partial

import torch

from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.attention import Attention, TorchAttention, TritonAttention
from worker_svc.engine.gpu.check import MAX_ROWS, MAX_TOKENS, check_attention
from worker_svc.engine.gpu.flash import FlashAttention, flash_package

logger = logging.getLogger(__name__)

FLASH_BLOCK = 256
HOPPER = (9, 0)  # on which our kernel is as fast


def choose_attention(
    name: str,
    shape: HeadShape,
    determinism: Determinism,
    *,
    block_size: int,
    dtype: torch.dtype,
    max_rows: int,
    max_tokens: int,
    max_model_len: int,
    device: torch.device,
    has_scaled_cache: bool = False,
) -> Attention:
    """The attention asked for. `auto` is ours, unless flash-attn can serve and the device is older than Hopper.

    Raises BackendUnavailableError for one that cannot serve these settings.
    """
    if name == "torch":
        _refuse_exact(name, determinism)
        return TorchAttention(shape)
    if name == "flash":
        _refuse_exact(name, determinism)
        if block_size % FLASH_BLOCK:
            raise BackendUnavailableError(
                f"attention flash needs a block_size that {FLASH_BLOCK} divides, got {block_size}; "
                f"use --block-size {FLASH_BLOCK} or --attention triton"
            )
        return _make_flash(shape, block_size, max_model_len, dtype, device)
    if name == "auto" and is_flash_first(device) and determinism != "exact" and block_size % FLASH_BLOCK == 0:
        try:
            return _make_flash(shape, block_size, max_model_len, dtype, device)
        except BackendUnavailableError as error:
            logger.warning("attention is triton: %s", error)
    make = partial(
        TritonAttention, shape, determinism, max_model_len=max_model_len, dtype=dtype, device=device
    )  # fmt: skip
    if is_compiled(device):
        check_attention(
            make(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS), shape, block_size=block_size, max_model_len=max_model_len,
            dtype=dtype, device=device, name="our attention kernel, as Triton compiles it for this GPU,",
            has_scaled_cache=has_scaled_cache,
            advice="use another version of Triton, or --attention flash or torch with --determinism best_effort",
        )  # fmt: skip
    return make(max_rows=max_rows, max_tokens=max_tokens)


def is_flash_first(device: torch.device) -> bool:
    """Whether flash-attn is worth trying unasked."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < HOPPER


def is_compiled(device: torch.device) -> bool:
    """Whether kernels come from a compiler; the interpreter that stands for it elsewhere is tested as it is."""
    return device.type == "cuda"


def _make_flash(
    shape: HeadShape, block_size: int, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> Attention:
    attention = FlashAttention(shape, flash_package())
    check_attention(
        attention, shape, block_size=block_size, max_model_len=max_model_len, dtype=dtype, device=device,
        name="flash-attn", advice="install another version or use --attention triton",
    )  # fmt: skip
    return attention


def _refuse_exact(name: str, determinism: Determinism) -> None:
    if determinism == "exact":
        raise BackendUnavailableError(
            f"attention {name} cannot be exact: its results depend on the batch; "
            "use --attention triton or --determinism best_effort"
        )
