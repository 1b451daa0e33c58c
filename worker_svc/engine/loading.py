"""Loads the model of a folder with its KV pool: a decoder, or an encoder whose pool has one layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from request_fields.inputs import ImageShape
from request_fields.sizes import largest_pool
from step_protocol.messages import PoolingKind
from worker_svc.engine.adapters.adapter import Adapter, make_store
from worker_svc.engine.adapters.packed import PackedAdapter, reserved_bytes
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.backend import Backend, ForwardBatch, KVLayout, LayerBackend
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.checkpoint.vocabulary import check_same_vocabulary
from worker_svc.engine.config import CacheGroupInfo, ComputeDtype, EncoderInfo, EngineConfig, EngineInfo, PoolingInfo
from worker_svc.engine.cpu.backends import make_backend
from worker_svc.engine.decoder.cache_groups import divide_pool
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.kv_cache import DEFAULT_MEMORY, KVCachePool
from worker_svc.engine.decoder.model import DecoderModel, Progress
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.weights import WeightLoader
from worker_svc.engine.encoder.config import EncoderConfig, parse_encoder
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder.model import EncoderModel
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder, parse_encoder_decoder
from worker_svc.engine.encoder_decoder.load import load_encoder_decoder
from worker_svc.engine.engine_info import choose_max_model_len
from worker_svc.engine.kernels.machine import available_memory
from worker_svc.engine.pooling.config import PoolingConfig, read_pooling
from worker_svc.engine.pooling.weights import PoolingWeights, load_pooling, pooling_info
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.rows.embedder import InputEmbedder, StepInputReader
from worker_svc.engine.rows.images import ImageEncoder, image_shape
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.draft_model import DraftModel
from worker_svc.engine.speculation.eagle import EagleFolder, EagleHead
from worker_svc.engine.speculation.heads import Head, MtpHead, mtp_layout, predicting_layer
from worker_svc.engine.vision.config import VisionConfig
from worker_svc.engine.vision.tower import VisionTower

logger = logging.getLogger(__name__)

Adapters = AdapterStore[Adapter, PackedAdapter]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS_WITH_DRAFTS = 2  # whose states within drafts are kept in a step, if all drafts are computed
STEPS_IN_FLIGHT = 3  # whose texts have blocks at the same time


class Model(Protocol):
    """A loaded decoder or encoder; see DecoderModel."""

    @property
    def hidden(self) -> torch.Tensor: ...

    def fuse(self, pool: KVCachePool) -> None: ...

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor: ...

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Report:
    """How loading reports its progress, and the threads that compute the digest of the weights meanwhile."""

    threads: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything of a decoder that its tensors determine."""

    model: DecoderModel
    images: ImageEncoder | None
    pooling: PoolingWeights
    head: Head | None  # None: none proposes drafts


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with everything that belongs to it."""

    model: Model
    pool: KVCachePool
    num_blocks: int
    max_model_len: int
    vocab_size: int
    pooling: PoolingWeights | None  # None: the model computes no embeddings
    pooling_info: PoolingInfo | None
    is_encoder: bool
    adapters: Adapters
    inputs: StepInputReader
    max_num_batched_tokens: int
    input_size: int = 0  # width of input embeddings that rows may carry; 0: none
    encoder: EncoderInfo | None = None  # of an encoder-decoder model
    attention_window: int | None = None  # as in EngineInfo
    images: ImageEncoder | None = None  # None: the model takes no images
    image_shape: ImageShape | None = None
    head: Head | None = None
    groups: tuple[CacheGroupInfo, ...] = ()  # as in EngineInfo
    num_snapshots: int | None = None  # as in EngineInfo
    snapshot_tokens: int = 0


def load_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: Backend,
    dtype: torch.dtype,
    report: Report,
    layers: LayerBackend | None = None,
) -> Loaded:
    """`layers`: computes the layers of models that are no decoders, in place of the backend. Raises CheckpointError for
    a folder that cannot be served, ValueError for settings that contradict the model."""
    if is_encoder_decoder(checkpoint.config):
        return _load_encoder_decoder(checkpoint, config, layers or backend, dtype, report)
    if encoder_of(checkpoint.config) is not None:
        return _load_encoder(checkpoint, config, backend, dtype, report, layers or backend)
    return _load_decoder(checkpoint, config, backend, dtype, report)


def _load_decoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: Backend,
    dtype: torch.dtype,
    report: Report,
) -> Loaded:
    model = parse_config(checkpoint.config).named_in(checkpoint.has)
    modules = WeightLoader(checkpoint, model, backend, dtype).modules()
    reserved = config.max_adapters * reserved_bytes(modules, config.max_adapter_rank, dtype)
    reserved += 0 if model.vision is None else config.image_cache_memory
    state_bytes = StatePool.bytes_per_slot(model.recurrences)
    num_snapshots = config.snapshot_memory // state_bytes if state_bytes else 0
    num_drafts = 0 if config.speculate is None else ROWS_WITH_DRAFTS * config.max_drafts
    reserved += (config.max_num_seqs + num_snapshots + num_drafts) * state_bytes
    groups = divide_pool(config, model, dtype, _pool_memory(config, reserved)) if config.has_groups else None
    layouts = model.kv_layouts() + _head_layouts(checkpoint, config, model)
    if groups is None:
        num_blocks = config.num_blocks or _fitting_blocks(config, layouts, dtype, reserved, _draft_block_bytes(config))
    else:
        num_blocks = groups.num_blocks
    block_bytes = max(1, KVCachePool.bytes_per_block(model.kv_layouts(), config.block_size, dtype))
    max_model_len = choose_max_model_len(config, model, num_blocks)
    model = model.within(max_model_len)
    check_features(model.features() | ({"adapters"} if config.max_adapters else set()), backend.name)
    weights = load_decoder_weights(checkpoint, config, backend, dtype, max_model_len, report)
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    states = None
    if model.is_recurrent:
        states = StatePool(model.recurrences, config.max_num_seqs, num_snapshots, num_drafts)
    pool = KVCachePool(layouts, num_blocks, config.block_size, dtype, states, groups)
    adapters = make_store(
        config, modules, model.names, dtype, lambda adapter: backend.pack_adapter(adapter, model.num_layers)
    )
    return Loaded(
        weights.model,
        pool,
        num_blocks,
        max_model_len,
        model.vocab_size,
        weights.pooling,
        pooling_info(settings, weights.pooling, max_model_len),
        is_encoder=False,
        adapters=adapters,
        attention_window=model.attention_window,
        input_size=model.hidden_size if model.per_layer_table() is None else 0,  # layers read rows of its token too
        inputs=InputEmbedder(model.hidden_size, dtype, weights.images, scale=model.given_embedding_scale),
        max_num_batched_tokens=config.max_num_batched_tokens,
        images=weights.images,
        image_shape=image_shape(model),
        head=weights.head,
        groups=() if groups is None else groups.groups,
        num_snapshots=num_snapshots if model.is_recurrent else None,
        snapshot_tokens=state_bytes * config.block_size // block_bytes,
    )


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: Backend,
    dtype: torch.dtype,
    max_model_len: int,
    report: Report,
) -> DecoderWeights:
    """The weights of a checkpoint whose digest has not begun. Raises CheckpointError."""
    model = parse_config(checkpoint.config).named_in(checkpoint.has).within(max_model_len)
    loader = WeightLoader(checkpoint, model, backend, dtype)
    loader.check()
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    checkpoint.start_digest(report.threads)
    decoder = DecoderModel.load(loader, model, backend, max_model_len, report.progress)
    images = None
    if model.vision is not None:
        unquantized = make_backend(config.backend, report.threads, config.determinism)
        images = load_images(checkpoint, config, model.vision, unquantized, dtype)
    head = model.classes(settings.num_classes)
    sizes, generates = (model.hidden_size, model.vocab_size), model.head == "tokens"
    pooling = load_pooling(checkpoint, settings, head, backend, sizes=sizes, generates=generates)
    return DecoderWeights(decoder, images, pooling, _load_head(checkpoint, config, decoder, backend, max_model_len))


def _head_layouts(checkpoint: Checkpoint, config: EngineConfig, model: ModelConfig) -> list[KVLayout]:
    """What a head that proposes drafts keeps of a token, in a layer of the pool after those of the model."""
    if config.proposer == "eagle" and config.draft_dir is not None:
        return [EagleFolder(config.draft_dir, model).kv_layout()]
    return [mtp_layout(checkpoint, model)] if config.proposer == "mtp" else []


def _load_head(
    checkpoint: Checkpoint, config: EngineConfig, target: DecoderModel, backend: Backend, max_len: int
) -> Head | None:
    if config.proposer == "eagle" and config.draft_dir is not None:
        return EagleHead(EagleFolder(config.draft_dir, target.parts.config), target, backend, max_len)
    if config.proposer != "mtp":
        return None
    layer = predicting_layer(checkpoint, target.parts.config)
    loader = WeightLoader(checkpoint, layer, backend, target.parts.embedding.dtype)
    return MtpHead(loader, layer, target, backend)


def load_images(
    checkpoint: Checkpoint, config: EngineConfig, vision: VisionConfig, backend: LayerBackend, dtype: torch.dtype
) -> ImageEncoder:
    """The tower of a model. It is never quantized."""
    return ImageEncoder(VisionTower(checkpoint, vision, backend, dtype), config.image_cache_memory)


def _load_encoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: Backend,
    dtype: torch.dtype,
    report: Report,
    layers: LayerBackend,
) -> Loaded:
    family = encoder_of(checkpoint.config)
    assert family is not None
    check_features({"encoder"}, layers.name)
    if config.max_adapters:
        raise ValueError(f"max_adapters is {config.max_adapters}, but encoders take no adapters; set it to 0")
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.MEAN)
    model = parse_encoder(checkpoint.config, family, settings.num_classes).named_in(checkpoint.has)
    max_length = _longest_text(config, model, settings)
    num_blocks = config.num_blocks or _blocks_of_texts(config, max_length)
    checkpoint.start_digest(report.threads)
    encoder = EncoderModel(checkpoint, model, layers, dtype, max_length, report.progress)
    sizes = (model.hidden_size, model.vocab_size)
    pooling = load_pooling(checkpoint, settings, model.head, backend, sizes=sizes, generates=False)
    pool = KVCachePool([KVLayout.of(model.heads)], num_blocks, config.block_size, dtype, device=layers.device)
    info = pooling_info(settings, pooling, max_length)
    return Loaded(
        encoder, pool, num_blocks, max_length, model.vocab_size, pooling, info, is_encoder=True,
        adapters=_no_adapters(), inputs=InputEmbedder(model.hidden_size, dtype),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )  # fmt: skip


def _load_encoder_decoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: LayerBackend,
    dtype: torch.dtype,
    report: Report,
) -> Loaded:
    model = parse_encoder_decoder(checkpoint.config)
    num_blocks = config.num_blocks or _fitting_blocks(config, model.kv_layouts(), dtype, 0)
    check_features(model.features() | ({"adapters"} if config.max_adapters else set()), backend.name)
    encoder = load_encoder_decoder(config, checkpoint, model, backend, dtype, report.progress)
    pool = KVCachePool(model.kv_layouts(), num_blocks, config.block_size, dtype, device=backend.device)
    return Loaded(
        encoder.model, pool, num_blocks, encoder.max_model_len, model.vocab_size, None, None,
        is_encoder=False, adapters=_no_adapters(), input_size=model.hidden_size if encoder.max_samples else 0,
        inputs=encoder, max_num_batched_tokens=encoder.max_num_batched_tokens,
        encoder=encoder.info, attention_window=model.attention_window,
    )  # fmt: skip


def _no_adapters() -> Adapters:
    def refuse(folder: Path) -> Adapter:
        raise ValueError(f"adapter {folder}: encoders take no adapters")

    def pack(adapter: Adapter) -> PackedAdapter:
        raise ValueError("encoders take no adapters")

    return AdapterStore(refuse, pack, max_resident=0, max_loaded=0)


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


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint) -> ComputeDtype:
    """The number type of a model: as configured, or float32 if the checkpoint has it, else bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if checkpoint.stored_dtype() is torch.float32 else "bfloat16"


def load_draft_model(
    config: EngineConfig, folder: Path, info: EngineInfo, threads: int
) -> Callable[[OpenRows], DraftModel]:
    """The model of a folder, which proposes drafts for the loaded model. Raises CheckpointError, ValueError."""
    checkpoint = Checkpoint(folder)
    model = _draft_config(checkpoint, folder)
    check_same_vocabulary(config.model_dir, folder, info.vocab_size, model.vocab_size)
    backend = make_backend(config.backend, threads, config.determinism, config.quantize)
    max_len = min(info.max_model_len, model.max_position_embeddings)
    draft_config = replace(
        config, model_dir=folder, num_blocks=info.num_blocks, max_model_len=max_len, adapters=(), max_adapters=0,
        speculate=None,
    )  # fmt: skip
    dtype = DTYPES[choose_dtype(config, checkpoint)]
    loaded = load_model(checkpoint, draft_config, backend, dtype, Report(threads, None))
    decoder, pool = loaded.model, loaded.pool
    if not isinstance(decoder, DecoderModel):
        raise ValueError(f"speculate={config.speculate}: {folder} is not a decoder")
    decoder.fuse(pool)
    backend.end_load()
    max_tokens = config.max_num_batched_tokens
    return lambda rows: DraftModel(decoder, pool, backend, rows, max_tokens=max_tokens, max_len=max_len)


def _draft_config(checkpoint: Checkpoint, folder: Path) -> ModelConfig:
    if is_encoder_decoder(checkpoint.config) or encoder_of(checkpoint.config) is not None:
        raise ValueError(f"speculate: the model of {folder} is not a decoder, so it cannot propose drafts")
    model = parse_config(checkpoint.config)
    if model.is_recurrent:
        raise ValueError(f"speculate: the model of {folder} has recurrent layers, so it cannot propose drafts")
    return model


def _draft_block_bytes(config: EngineConfig) -> int:
    """What each block of the pool takes in the pool of the model that proposes drafts."""
    if config.proposer != "draft" or config.draft_dir is None:
        return 0
    checkpoint = Checkpoint(config.draft_dir)
    model, dtype = _draft_config(checkpoint, config.draft_dir), DTYPES[choose_dtype(config, checkpoint)]
    return KVCachePool.bytes_per_block(model.kv_layouts(), config.block_size, dtype)


def _pool_memory(config: EngineConfig, reserved: int) -> int:
    """`reserved`: memory for adapters and images, which the default size of the pool leaves free."""
    return config.kv_cache_memory or min(DEFAULT_MEMORY, max(available_memory() - reserved, 0) // 2)


def _fitting_blocks(
    config: EngineConfig,
    layouts: Sequence[KVLayout],
    dtype: torch.dtype,
    reserved: int,
    beside: int = 0,
) -> int:
    """The blocks of a pool in which a block holds all layers. `beside`: bytes that each block takes in another pool."""
    memory = _pool_memory(config, reserved)
    per_block = max(1, KVCachePool.bytes_per_block(layouts, config.block_size, dtype) + beside)
    if memory < per_block:
        raise ValueError(
            f"kv_cache_memory of {memory} bytes is below one block of {per_block} bytes; raise kv_cache_memory"
        )
    return min(memory // per_block, largest_pool(config.block_size))
