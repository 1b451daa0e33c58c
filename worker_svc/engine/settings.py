"""Values derived from settings and checkpoint together, for every backend."""

from __future__ import annotations

import logging

from request_fields.sizes import SizeLimits
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig

logger = logging.getLogger(__name__)


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
