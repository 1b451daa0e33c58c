"""What follows from the settings and the checkpoint together; the same for every backend."""

from __future__ import annotations

import logging

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.batch import SamplingParams
from worker_svc.engine.checkpoint import Checkpoint, CheckpointError
from worker_svc.engine.config import EngineConfig

logger = logging.getLogger(__name__)


def choose_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest sequence: what was asked for, or what model and pool allow. ValueError above the model's limit."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} is above the model's {limit}")
    chosen = config.max_model_len or limit
    if model.sliding_window is not None and model.sliding_window < chosen:
        logger.warning("max_model_len is capped to the model's sliding window of %d tokens", model.sliding_window)
        chosen = model.sliding_window
    capacity = num_blocks * config.block_size
    if capacity >= chosen or config.max_model_len is not None:
        return chosen  # a length that was asked for stays: workers of one model agree in it, not in their pools
    logger.warning("max_model_len is capped to the %d tokens that %d KV blocks hold", capacity, num_blocks)
    return capacity


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The tokens that end an answer. CheckpointError for anything but ids."""
    ids = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    if ids is None:
        return ()
    found = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, found {ids!r}")
    return tuple(found)


def default_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """What generation_config.json says."""
    given = checkpoint.generation_config
    temperature = 0.0 if given.get("do_sample") is False else given.get("temperature", 1.0)
    return SamplingParams(
        temperature=_or(temperature, 1.0),
        top_k=int(_or(given.get("top_k"), 0)),
        top_p=_or(given.get("top_p"), 1.0),
        min_p=_or(given.get("min_p"), 0.0),
        seed=0,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
