"""Loads a model, or a rank's shard of it, on a device: weights, adapters, and the tables of all rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from request_fields.checks import default_sampling
from step_protocol.types import PoolingKind
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.engine_info import make_engine_info
from worker_svc.engine.gpu.adapters import DeviceAdapters
from worker_svc.engine.gpu.attention.paged import Attention, DevicePool
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.drafts import empty_tables
from worker_svc.engine.gpu.layers.linears import DeviceLinears
from worker_svc.engine.gpu.layers.weights import ShardLoader
from worker_svc.engine.gpu.model import DeviceDecoder
from worker_svc.engine.gpu.start.attention_choice import attentions
from worker_svc.engine.gpu.start.memory import divide_memory, fitting, make_pool
from worker_svc.engine.gpu.start.setup import Degradations, Setup, Stages, make_setup
from worker_svc.engine.gpu.step.device_rows import make_state
from worker_svc.engine.gpu.step.graphs import GraphError, make_recorder
from worker_svc.engine.gpu.step.pooling import load_device_pooling
from worker_svc.engine.gpu.step.step_buffer import StepBuffer
from worker_svc.engine.gpu.torch_layers import TorchLayers
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.numerics import device_numerics, torch_numerics
from worker_svc.engine.loaders.decoders import decoder_facts, decoder_features, state_facts
from worker_svc.engine.pooling.config import read_pooling
from worker_svc.engine.pooling.weights import PoolingWeights
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.rows.images import ImageEncoder, load_images

logger = logging.getLogger(__name__)

MOST_DRAFTS = 256  # of a step: beyond it, further tokens take time


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, which needs a KV pool to serve."""

    setup: Setup
    checkpoint: Checkpoint
    loader: ShardLoader
    pooling: PoolingWeights
    compute: StepCompute
    buffer: StepBuffer
    state: torch.Tensor  # records of all rows
    adapters: DeviceAdapters | None  # None: the worker was started without any
    attention: Attention
    other_attentions: Iterator[Attention]  # that may replace it
    images: ImageEncoder | None  # None: the model takes none
    states: StatePool | None  # None: no layer is recurrent

    @cached_property
    def features(self) -> dict[str, Any]:
        """The arguments of `add_tables`."""
        adapters = None if self.adapters is None else self.adapters.rows
        found = decoder_features(self.checkpoint, self.setup.config, self.setup.whole, self.pooling)
        return found | {"adapters": adapters, "states": self.states, "are_logprobs_raw": True}

    def info(self, num_blocks: int, max_model_len: int, attention: str, chosen: forms.Forms) -> EngineInfo:
        """The facts about the engine with a pool. `chosen`: with these forms of its kernels."""
        setup, backend, is_compiled = self.setup, f"cuda/{attention}", forms.ALL not in chosen.in_torch
        numerics = device_numerics(
            backend, setup.device, setup.group.size, self.loader.formats, chosen.in_torch, is_compiled=is_compiled,
            has_one_tile=chosen.has_one_tile,
        )  # fmt: skip
        if self.images is not None:
            numerics += f", tower {torch_numerics(setup.device)}"
        facts = decoder_facts(self.checkpoint, setup.whole, self.pooling, num_blocks, max_model_len)
        facts |= state_facts(self.states, setup.config.block_size, setup.model, setup.cache_dtype)
        return make_engine_info(
            setup.config, self.checkpoint, setup.dtype_name, backend, numerics,
            degradations=tuple(setup.degradations), **facts,
        )  # fmt: skip


def load_model(
    config: EngineConfig,
    group: Group,
    device: torch.device,
    progress: Callable[[float], None],
    degradations: Degradations,
) -> LoadedModel:
    """Raises CheckpointError for an unsupported model folder, BackendUnavailableError for settings or a machine that
    cannot serve it, ValueError for settings that contradict the model."""
    checkpoint = Checkpoint(config.model_dir)
    whole = parse_config(checkpoint.config).named_in(checkpoint.has)
    whole = whole.within(config.max_model_len or whole.max_position_embeddings)
    default_sampling(checkpoint.generation_config)  # raises before the weights are read
    check_features(whole.features() | ({"adapters"} if config.max_adapters else set()), "cuda")
    setup = make_setup(config, checkpoint, whole, device, group, degradations)
    linears = DeviceLinears(config.determinism, setup.dtype)
    loader = ShardLoader(checkpoint, whole, linears, setup.dtype, device, group, config.quantize)
    loader.check()
    pooling_config = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    if group.local_rank == 0:  # hosts compare their digests; for the other ranks it stays empty
        checkpoint.start_digest(available_cores())
    choices = attentions(setup)
    attention = next(choices)
    pooling = load_device_pooling(checkpoint, pooling_config, whole, config.determinism, device)
    with fitting("the weights", "raise tensor_parallel_size, or use a smaller dtype or model"):
        decoder = DeviceDecoder(
            loader, setup.model, group, setup.max_model_len, device, progress, has_scaled_cache=setup.has_scaled_cache
        )
    with fitting("the states of rows and snapshots", "lower max_num_seqs or snapshot_memory"):
        decoder.states = states = StatePool.of_model(whole.recurrences, config, device)
    images = None
    if whole.vision is not None:
        layers = TorchLayers(device, config.determinism)
        with fitting("the vision tower", "use a smaller dtype or model"):
            images = load_images(checkpoint, config, whole.vision, layers, setup.dtype)
    with fitting("the slots of adapters", "lower max_adapters or max_adapter_rank"):
        adapters = DeviceAdapters(config, loader, whole.names, device) if config.max_adapters else None
    state = make_state(config.max_num_seqs, -(-setup.max_model_len // config.block_size), device)
    max_rows, drafts, num_drafts = config.max_num_seqs, None, 0
    if config.speculate is not None:
        drafts = empty_tables(max_rows, config.max_drafts, device)
        num_drafts = min(max_rows * config.max_drafts, MOST_DRAFTS if states is None else states.num_drafts)
    buffer = StepBuffer(max_rows, max_rows + num_drafts, setup.max_tokens, state, device)
    with fitting("the tables of all rows", "lower max_num_seqs"):
        compute = StepCompute(
            decoder, attention, buffer, state, config.block_size, setup.vocab, group,
            min(config.cuda_graph_tokens, setup.max_tokens), pooling, None if adapters is None else adapters.slots,
            drafts,
        )  # fmt: skip
    return LoadedModel(
        setup, checkpoint, loader, pooling, compute, buffer, state, adapters, attention, choices, images, states
    )


def fill_memory(loaded: LoadedModel, stages: Stages) -> DevicePool:
    """Divides the memory that is left, makes the KV pool, and records graphs."""
    setup, config, compute = loaded.setup, loaded.setup.config, loaded.compute
    shares = divide_memory(config, setup.model, setup.cache_dtype, compute, setup.device, setup.group)
    num_blocks = setup.group.all_reduce_min(shares.num_blocks)
    with fitting(f"{num_blocks} blocks", "lower num_blocks or kv_cache_memory"):
        pool = make_pool(num_blocks, config.block_size, setup.model, setup.cache_dtype, setup.device)
    compute.use_cache(pool)
    recorder = make_recorder(setup.device) if config.cuda_graphs != "off" and not forms.chosen().in_torch else None
    if recorder is not None:
        try:
            compute.record(recorder, shares.graph_bytes, stages.graphs, is_lazy=config.cuda_graphs == "lazy")
        except GraphError as error:
            if config.kernels == "triton":
                raise BackendUnavailableError(f"{error}; use --cuda-graphs off") from error
            setup.degradations.note(
                f"{error}; {compute.num_graphs} CUDA graphs are recorded, and steps of other sizes launch their "
                "kernels one by one, which is slower"
            )
    stages.end()
    logger.info("%d CUDA graphs, %d blocks", compute.num_graphs, num_blocks)
    return pool
