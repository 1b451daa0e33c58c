"""Loads a decoder with its KV pool, and what belongs to it: images, pooling, adapters, a head that proposes drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from step_protocol.types import PoolingKind
from worker_svc.engine.adapters.adapter import make_store
from worker_svc.engine.adapters.packed import reserved_bytes
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import check_same_vocabulary, eos_token_ids
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.model import DecoderModel
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.pool.cache_groups import divide_pool
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.weights import WeightLoader
from worker_svc.engine.engine_info import choose_dtype, choose_max_model_len
from worker_svc.engine.loading import Loaded, ModelSource, fitting_blocks, pool_memory
from worker_svc.engine.pooling.config import read_pooling
from worker_svc.engine.pooling.weights import PoolingWeights, load_pooling, pooling_info
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.rows.embedder import InputEmbedder
from worker_svc.engine.rows.images import ImageEncoder, image_shape, load_images
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.sampling.grammars import compiled_grammars
from worker_svc.engine.speculation.draft_model import DraftModel, draft_block_bytes, draft_config
from worker_svc.engine.speculation.heads import Head, head_layouts, load_head


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything of a decoder that its tensors determine."""

    model: DecoderModel
    images: ImageEncoder | None
    pooling: PoolingWeights
    head: Head | None  # None: none proposes drafts


def load_decoder(source: ModelSource) -> Loaded:
    """Raises CheckpointError for a folder that cannot be served, ValueError for settings that contradict the model."""
    checkpoint, config, backend, dtype = source.checkpoint, source.config, source.backend, source.dtype
    model = parse_config(checkpoint.config).named_in(checkpoint.has)
    modules = WeightLoader(checkpoint, model, backend, dtype).modules()
    reserved = config.max_adapters * reserved_bytes(modules, config.max_adapter_rank, dtype)
    reserved += 0 if model.vision is None else config.image_cache_memory
    states = StatePool.of_model(model.recurrences, config)
    reserved += 0 if states is None else states.slots.nbytes
    groups = divide_pool(config, model, dtype, pool_memory(config, reserved)) if config.has_groups else None
    layouts = model.kv_layouts() + head_layouts(checkpoint, config, model)
    if groups is None:
        num_blocks = config.num_blocks or fitting_blocks(config, layouts, dtype, reserved, draft_block_bytes(config))
    else:
        num_blocks = groups.num_blocks
    max_model_len = choose_max_model_len(config, model, num_blocks)
    model = model.within(max_model_len)
    check_features(model.features() | ({"adapters"} if config.max_adapters else set()), backend.name)
    weights = load_decoder_weights(source, max_model_len)
    adapters = make_store(
        config, modules, model.names, dtype, lambda adapter: backend.pack_adapter(adapter, model.num_layers)
    )
    for name, folder in config.adapters:
        adapters.load(name, folder)
    scale, row_adapters = model.given_embedding_scale, RowAdapters(config.max_num_seqs, adapters.find)
    of_groups = () if groups is None else groups.groups
    facts = {"groups": of_groups} | state_facts(states, config.block_size, model, dtype)
    return Loaded(
        weights.model,
        KVCachePool(layouts, num_blocks, config.block_size, dtype, states, groups),
        facts=decoder_facts(checkpoint, model, weights.pooling, num_blocks, max_model_len) | facts,
        features=lambda: (
            decoder_features(checkpoint, config, model, weights.pooling)
            | {"adapters": row_adapters, "states": states, "groups": of_groups}
        ),
        inputs=lambda tables: InputEmbedder(tables.inputs, model.hidden_size, dtype, weights.images, scale=scale),
        adapters=adapters,
        weights=weights,
    )


def decoder_facts(
    checkpoint: Checkpoint, model: ModelConfig, pooling: PoolingWeights, num_blocks: int, max_model_len: int
) -> dict[str, Any]:
    """The fields of EngineInfo that a decoder determines on every backend."""
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    return {
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "vocab_size": model.vocab_size,
        "attention_window": model.within(max_model_len).attention_window,
        "hidden_size": _input_size(model),
        "pooling": pooling_info(settings, pooling, max_model_len),
        "images": image_shape(model),
    }


def state_facts(states: StatePool | None, block_size: int, model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of EngineInfo that the states of recurrent layers determine."""
    if states is None:
        return {}
    block_bytes = max(1, KVCachePool.bytes_per_block(model.kv_layouts(), block_size, dtype))
    tokens = states.slots.shape[1] * states.slots.itemsize * block_size // block_bytes
    return {"num_snapshots": states.num_snapshots, "snapshot_tokens": tokens}


def decoder_features(
    checkpoint: Checkpoint, config: EngineConfig, model: ModelConfig, pooling: PoolingWeights
) -> dict[str, Any]:
    """The arguments of `add_tables` that a decoder determines on every backend."""
    eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)
    return {
        "grammars": compiled_grammars(config.model_dir, model.vocab_size, eos_ids) if pooling.generates else None,
        "pooling": pooling,
        "hidden_size": _input_size(model),
        "images": image_shape(model),
    }


def _input_size(model: ModelConfig) -> int:
    """The width of the embeddings that rows may carry. 0: none, because layers read rows of its token too."""
    return model.hidden_size if model.per_layer_table() is None else 0


def load_decoder_weights(source: ModelSource, max_model_len: int) -> DecoderWeights:
    """The weights of a checkpoint whose digest has not begun. Raises CheckpointError."""
    checkpoint, config, backend = source.checkpoint, source.config, source.backend
    model = parse_config(checkpoint.config).named_in(checkpoint.has).within(max_model_len)
    loader = WeightLoader(checkpoint, model, backend, source.dtype)
    loader.check()
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    checkpoint.start_digest(source.threads)
    decoder = DecoderModel.load(loader, model, backend, max_model_len, source.progress)
    images = None
    if model.vision is not None:
        unquantized = make_backend(config.backend, source.threads, config.determinism)
        images = load_images(checkpoint, config, model.vision, unquantized, source.dtype)
    head = model.classes(settings.num_classes)
    sizes, generates = (model.hidden_size, model.vocab_size), model.head == "tokens"
    pooling = load_pooling(checkpoint, settings, head, backend, sizes=sizes, generates=generates)
    return DecoderWeights(decoder, images, pooling, load_head(checkpoint, config, decoder, backend, max_model_len))


def load_draft_model(
    config: EngineConfig, folder: Path, info: EngineInfo, threads: int
) -> Callable[[OpenRows], DraftModel]:
    """The model of a folder, which proposes drafts for the loaded model. Raises CheckpointError, ValueError."""
    checkpoint = Checkpoint(folder)
    model = draft_config(checkpoint, folder)
    check_same_vocabulary(config.model_dir, folder, info.vocab_size, model.vocab_size)
    backend = make_backend(config.backend, threads, config.determinism, config.quantize)
    max_len = min(info.max_model_len, model.max_position_embeddings)
    settings = replace(
        config, model_dir=folder, num_blocks=info.num_blocks, max_model_len=max_len, adapters=(), max_adapters=0,
        speculate=None,
    )  # fmt: skip
    dtype = getattr(torch, choose_dtype(config, checkpoint))
    loaded = load_decoder(ModelSource(checkpoint, settings, backend, backend, dtype, threads))
    decoder, pool = loaded.weights.model, loaded.pool
    decoder.fuse(pool)
    backend.end_load()
    max_tokens = config.max_num_batched_tokens
    return lambda rows: DraftModel(decoder, pool, backend, rows, max_tokens=max_tokens, max_len=max_len)
