"""Loads an encoder, whose pool has one layer, or an encoder-decoder model."""

from __future__ import annotations

import logging

from step_protocol.types import PoolingKind
from worker_svc.engine.backend import KVLayout
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.encoder.config import EncoderConfig, parse_encoder
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder.model import EncoderModel
from worker_svc.engine.loading import Loaded, ModelSource
from worker_svc.engine.pooling.config import PoolingConfig, read_pooling
from worker_svc.engine.pooling.weights import load_pooling, pooling_info
from worker_svc.engine.rows.embedder import InputEmbedder

logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 3  # whose texts have blocks at the same time


def load_encoder(source: ModelSource) -> Loaded:
    """Raises CheckpointError for a folder that cannot be served, ValueError for settings that contradict the model."""
    checkpoint, config, layers, dtype = source.checkpoint, source.config, source.layers, source.dtype
    family = encoder_of(checkpoint.config)
    assert family is not None
    check_features({"encoder"}, layers.name)
    if config.max_adapters:
        raise ValueError(f"max_adapters is {config.max_adapters}, but encoders take no adapters; set it to 0")
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.MEAN)
    model = parse_encoder(checkpoint.config, family, settings.num_classes).named_in(checkpoint.has)
    max_length = _longest_text(config, model, settings)
    num_blocks = config.num_blocks or _blocks_of_texts(config, max_length)
    checkpoint.start_digest(source.threads)
    encoder = EncoderModel(checkpoint, model, layers, dtype, max_length, source.progress)
    sizes = (model.hidden_size, model.vocab_size)
    pooling = load_pooling(checkpoint, settings, model.head, source.backend, sizes=sizes, generates=False)
    return Loaded(
        encoder,
        KVCachePool([KVLayout.of(model.heads)], num_blocks, config.block_size, dtype, device=layers.device),
        facts={
            "num_blocks": num_blocks,
            "max_model_len": max_length,
            "vocab_size": model.vocab_size,
            "pooling": pooling_info(settings, pooling, max_length),
            "is_encoder": True,
        },
        features=lambda: {"pooling": pooling},
        inputs=lambda tables: InputEmbedder(tables.inputs, model.hidden_size, dtype),
    )


def _longest_text(config: EngineConfig, model: EncoderConfig, settings: PoolingConfig) -> int:
    """A whole text is computed in one step, beside a token of each other row.

    See docs/adr/0052-encoders-and-pooled-rows.md.
    """
    limit = min(model.max_length, settings.max_length or model.max_length)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} is above the model's {limit}")
    in_one_step = config.max_num_batched_tokens - config.max_num_seqs + 1
    wanted = config.max_model_len or limit
    if wanted <= in_one_step:
        return wanted
    if config.max_model_len is not None or in_one_step < 1:
        raise ValueError(
            f"max_model_len {wanted} is above the {in_one_step} tokens that a step holds for one text; raise "
            f"max_num_batched_tokens to at least {wanted + config.max_num_seqs - 1}"
        )
    logger.warning("max_model_len is capped to %d tokens, of max_num_batched_tokens and max_num_seqs", in_one_step)
    return in_one_step


def _blocks_of_texts(config: EngineConfig, max_length: int) -> int:
    """Blocks for the texts of all steps in flight. They hold one layer."""
    num_tokens = STEPS_IN_FLIGHT * max(config.max_num_batched_tokens, max_length)
    return num_tokens // config.block_size + STEPS_IN_FLIGHT * config.max_num_seqs
