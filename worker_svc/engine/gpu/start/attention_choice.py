"""The attention implementations for `--attention`, in the order in which a start tries them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu.attention.flash import FlashAttention, flash_package
from worker_svc.engine.gpu.attention.flash3 import Flash3Attention, flash3_package
from worker_svc.engine.gpu.attention.paged import Attention, TorchAttention, TritonAttention
from worker_svc.engine.gpu.start.setup import Setup

logger = logging.getLogger(__name__)

FLASH_BLOCK = 256
HOPPER = (9, 0)  # here the Triton kernel is as fast as flash-attn 2, and flash-attn 3 is faster for prompts
BLACKWELL = (10, 0)  # first compute capability without kernels in flash-attn 3


def attentions(setup: Setup) -> Iterator[Attention]:
    """The requested attention, then those that replace it if it fails. `auto` prefers a library that is better on this
    GPU, if it can serve. Raises BackendUnavailableError if the requested one cannot serve these settings."""
    name = setup.config.attention
    if "attention" in setup.in_torch:
        if name not in ("auto", "torch"):
            raise BackendUnavailableError(f"attention {name} cannot compute this model; use --attention auto")
        name = "torch"
    if name not in ("auto", "triton") and setup.is_exact:
        raise BackendUnavailableError(
            f"attention {name} cannot be exact: its results depend on the batch; "
            "use --attention triton or --determinism best_effort"
        )
    if name in LIBRARIES and setup.config.speculate is not None:
        raise BackendUnavailableError(f"attention {name} cannot verify drafts; use --attention triton")
    if name in LIBRARIES and setup.has_sinks:
        raise BackendUnavailableError(f"attention {name} has no sinks, which this model needs; use --attention triton")
    if name in LIBRARIES:
        yield LIBRARIES[name](setup)
    library = preferred_library(setup) if name == "auto" and not setup.is_exact else None
    if library is not None:
        try:
            preferred = LIBRARIES[library](setup)
        except BackendUnavailableError as error:
            is_missing = isinstance(error.__cause__, ImportError)
            logger.log(logging.INFO if is_missing else logging.WARNING, "--attention auto uses triton: %s", error)
        else:
            yield preferred
    if name != "torch" and setup.config.kernels != "torch":
        yield _make_triton(setup)
    yield TorchAttention(is_exact=setup.is_exact)


def preferred_library(setup: Setup) -> str | None:
    """The library that `auto` prefers to Triton on this device. None: no library.

    flash-attn 3 is not preferred for an fp8 cache, because it also rounds queries and softmax weights to fp8.
    """
    if setup.device.type != "cuda" or setup.config.kernels == "torch" or setup.config.speculate is not None:
        return None
    if setup.has_sinks:
        return None
    capability = torch.cuda.get_device_capability(setup.device)
    if capability < HOPPER:
        return "flash"
    return "flash3" if capability < BLACKWELL and not setup.has_scaled_cache else None


def _make_triton(setup: Setup) -> TritonAttention:
    return TritonAttention(
        setup.model.heads, setup.config.determinism, max_rows=setup.config.max_num_seqs, max_tokens=setup.max_tokens,
        windows=[shape.window for shape in setup.attention_shapes], num_layers=setup.model.num_layers,
        dtype=setup.dtype, device=setup.device,
    )  # fmt: skip


def _make_flash(setup: Setup) -> Attention:
    if setup.has_scaled_cache:
        raise BackendUnavailableError("attention flash cannot read kv_cache_dtype fp8; use --attention triton")
    if setup.config.block_size % FLASH_BLOCK:
        raise BackendUnavailableError(
            f"attention flash needs a block_size that is a multiple of {FLASH_BLOCK}, got {setup.config.block_size}; "
            f"use --block-size {FLASH_BLOCK} or --attention triton"
        )
    return FlashAttention(flash_package())


def _make_flash3(setup: Setup) -> Attention:
    return Flash3Attention(flash3_package(), setup.attention_shapes, setup.config.block_size, setup.cache_dtype)


LIBRARIES: dict[str, Callable[[Setup], Attention]] = {"flash": _make_flash, "flash3": _make_flash3}
