"""Facts that follow from settings and checkpoint together, for every backend."""

from __future__ import annotations

import logging
from typing import Any

import torch

from request_fields.checks import default_sampling
from request_fields.sizes import SizeLimits
from worker_svc.engine.checkpoint.model_folder import bundle_digest, eos_token_ids
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import ComputeDtype, EngineConfig, EngineInfo
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.rotary import length_choice
from worker_svc.engine.kernels.numerics import build

logger = logging.getLogger(__name__)


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint) -> ComputeDtype:
    """The number type of a model: as configured, or float32 if the checkpoint has it, else bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if checkpoint.stored_dtype() is torch.float32 else "bfloat16"


def choose_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest sequence: as configured, or the limit of model and pool. ValueError above the model's limit."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} is above the model's {limit}")
    chosen = config.max_model_len or limit
    window = model.within(chosen).attention_window
    capacity = SizeLimits.of_pool(chosen, num_blocks, config.block_size, window).pool_tokens
    if capacity >= chosen or config.max_model_len is not None:
        return chosen  # workers of a model must have the same configured length; their pool sizes may differ
    logger.warning("max_model_len is capped to the %d tokens that %d KV blocks hold", capacity, num_blocks)
    return capacity


def make_engine_info(
    config: EngineConfig, checkpoint: Checkpoint, dtype: ComputeDtype, backend: str, numerics: str, **of_model: Any
) -> EngineInfo:
    """The facts about an engine whose checkpoint is loaded. `of_model` are fields of EngineInfo that backend and model
    determine; they come before the settings."""
    weights_digest = checkpoint.weights_digest()
    of_settings = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_adapters": config.max_adapters,
    }
    return EngineInfo(
        model=config.model_name or config.model_dir.resolve().name,
        revision=revision_of(config, checkpoint, dtype, numerics, weights_digest, of_model["max_model_len"]),
        weights_digest=weights_digest,
        block_size=config.block_size,
        dtype=dtype,
        determinism=config.determinism,
        backend=backend,
        numerics=numerics,
        build=build(),
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype,
        eos_token_ids=eos_token_ids(checkpoint.generation_config, checkpoint.config),
        default_sampling=default_sampling(checkpoint.generation_config),
        **(of_settings | of_model),
    )


def revision_of(
    config: EngineConfig, checkpoint: Checkpoint, dtype: ComputeDtype, numerics: str, digest: str, max_model_len: int
) -> str:
    """The revision of an engine with weights of this digest. It depends on tokenizer, templates and generation defaults
    too: a continuation on a model with others would have other tokens."""
    shared = numerics if config.determinism == "exact" else None
    parts = (bundle_digest(checkpoint.folder), length_choice(checkpoint.config, max_model_len))
    return checkpoint.revision(digest, getattr(torch, dtype), config.quantize, shared, config.kv_cache_dtype, *parts)
