"""What a simulated worker reads of a model folder and of an adapter's folder: everything but the tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from request_fields.checks import default_sampling
from request_fields.sizes import SizeLimits
from step_protocol.columns import U32
from step_protocol.types import ImageInfo
from worker_svc.engine.adapters.config import CONFIG_FILE, WEIGHTS_FILE, AdapterError, read_adapter_config
from worker_svc.engine.checkpoint.model_folder import CheckpointError, eos_token_ids, open_regular, read_object
from worker_svc.engine.config import ComputeDtype, EngineConfig, EngineInfo

DEFAULT_NUM_BLOCKS = 4096


def read_info(config: EngineConfig) -> EngineInfo:
    """Facts about the folder's model. Its revision never equals that of a loaded model."""
    folder = config.model_dir
    model = read_object(folder / "config.json")
    given = read_object(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    num_blocks = config.num_blocks or DEFAULT_NUM_BLOCKS
    limit = int(model.get("max_position_embeddings") or num_blocks * config.block_size)
    dtype: ComputeDtype = "float32" if config.dtype == "auto" else config.dtype
    window = _attention_window(model)
    pool_tokens = SizeLimits.of_pool(limit, num_blocks, config.block_size, window).pool_tokens
    max_model_len = config.max_model_len or min(limit, pool_tokens)
    return EngineInfo(
        model=config.model_name or folder.resolve().name,
        revision="sim-" + xxhash.xxh3_128_hexdigest(json.dumps([model, config.quantize], sort_keys=True).encode()),
        max_model_len=max_model_len,
        vocab_size=model["vocab_size"],
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=eos_token_ids(given, model),
        default_sampling=default_sampling(given),
        dtype=dtype,
        determinism=config.determinism,
        backend="sim",
        numerics="sim",
        build="sim",
        quantize=config.quantize,
        hidden_size=int(model.get("hidden_size") or 0),
        max_adapters=config.max_adapters,
        attention_window=window if window is not None and window < max_model_len else None,
        images=_image_shape(model),
    )


def _attention_window(model: dict[str, Any]) -> int | None:
    """The window of a decoder whose layers all have one. None for other models, also those that no backend serves."""
    if not model.get("sliding_window"):
        return None
    from worker_svc.engine.decoder.parse import parse_config  # it imports torch, which other models do not need

    try:
        return parse_config(model).attention_window
    except CheckpointError:
        return None


def _image_shape(model: dict[str, Any]) -> ImageInfo | None:
    """How images become positions, from config.json; None: the model takes none."""
    vision = model.get("vision_config")
    if not isinstance(vision, dict) or "image_token_id" not in model:
        return None
    channels = int(vision.get("in_channels", 3))
    merge_size, patch_size = int(vision.get("spatial_merge_size", 2)), int(vision.get("patch_size", 14))
    return ImageInfo(int(model["image_token_id"]), merge_size, channels * patch_size**2, channels)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The duration of a simulated step, and how output ends. Values are checked; ValueError names the field."""

    step_ms: float = 5.0  # duration of every step with rows
    prefill_tokens_per_s: float = 50_000.0  # adds time for tokens of rows that compute more than one
    token_us: float = 0.0  # adds time for every row that computes one token
    eos_probability: float = 0.0  # probability that an output token ends its sequence

    def __post_init__(self) -> None:
        for name in ("step_ms", "token_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.prefill_tokens_per_s <= 0:
            raise ValueError(f"prefill_tokens_per_s must be above 0, got {self.prefill_tokens_per_s}")

    def step_s(self, query_lens: U32) -> float:
        """Duration of a step whose rows compute `query_lens` tokens."""
        if not len(query_lens):
            return 0.0
        num_decodes = int((query_lens == 1).sum())
        num_prefill_tokens = int(query_lens.sum()) - num_decodes
        return self.step_ms / 1e3 + num_prefill_tokens / self.prefill_tokens_per_s + num_decodes * self.token_us / 1e6


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """An adapter without tensors. Its digest is part of the digests of its rows' contexts."""

    digest: bytes
    num_bytes: int = 0


def read_sim_adapter(folder: Path) -> SimAdapter:
    """An adapter whose digest follows from the files of its folder. Raises AdapterError."""
    read_adapter_config(folder)
    try:
        with open_regular(folder / WEIGHTS_FILE) as file:
            content = file.read() + (folder / CONFIG_FILE).read_bytes()
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(f"cannot read {folder / WEIGHTS_FILE}: {error.strerror}; copy the adapter again") from None
    return SimAdapter(xxhash.xxh3_128_digest(content), len(content))
