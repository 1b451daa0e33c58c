"""Loads a model, or a rank's shard of it, on a device: checks, weights, memory, graphs, adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from request_fields.checks import default_sampling
from step_protocol.messages import PoolingKind
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.families import Names
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import eos_token_ids
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.decoder.config import parse_config
from worker_svc.engine.engine_info import choose_max_model_len, make_engine_info
from worker_svc.engine.gpu.adapters import DeviceAdapters
from worker_svc.engine.gpu.attention.paged import Attention
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.layers.linears import DeviceLinears
from worker_svc.engine.gpu.layers.weights import ShardLoader, formats_of, shard_config
from worker_svc.engine.gpu.model import DeviceDecoder
from worker_svc.engine.gpu.start.checks.case import Setup
from worker_svc.engine.gpu.start.memory import Shares, divide_memory, fitting, make_pool
from worker_svc.engine.gpu.start.start_up import DTYPES, Stages, check_heads, choose_checked, choose_dtype
from worker_svc.engine.gpu.step.device_rows import make_state
from worker_svc.engine.gpu.step.graphs import GraphError, make_recorder
from worker_svc.engine.gpu.step.pooling import load_device_pooling
from worker_svc.engine.gpu.step.step_buffer import StepBuffer
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.numerics import device_numerics
from worker_svc.engine.pooling.config import read_pooling
from worker_svc.engine.pooling.pooling import PoolingTable
from worker_svc.engine.pooling.weights import PoolingWeights, pooling_info
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.sampling.grammars import compiled_grammars

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What steps need on the device."""

    compute: StepCompute
    buffer: StepBuffer
    state: torch.Tensor  # records of all rows
    pool: torch.Tensor
    adapters: DeviceAdapters | None  # None: the worker was started without any


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can serve."""

    info: EngineInfo
    rows: OpenRows
    on_device: OnDevice
    dtype: torch.dtype


def load_model(
    config: EngineConfig, group: Group, device: torch.device, progress: Callable[[float], None] | None
) -> LoadedModel:
    """Raises CheckpointError for an unsupported model folder, BackendUnavailableError for settings or a machine that
    cannot serve it, ValueError for settings that contradict the model."""
    checkpoint = Checkpoint(config.model_dir)
    whole = parse_config(checkpoint.config).named_in(checkpoint.has)
    whole = whole.within(config.max_model_len or whole.max_position_embeddings)
    eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)
    sampling = default_sampling(checkpoint.generation_config)
    check_features(whole.features() | ({"adapters"} if config.max_adapters else set()), "cuda")
    model = shard_config(whole, group)
    check_heads(model)
    name = choose_dtype(config, checkpoint, device)
    dtype = DTYPES[name]
    linears = DeviceLinears(config.determinism, dtype)
    loader = ShardLoader(checkpoint, whole, linears, dtype, device, group, config.quantize)
    loader.check()
    settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
    if group.local_rank == 0:  # hosts compare their digests; for the other ranks it stays empty
        checkpoint.start_digest(available_cores())
    setup = Setup(
        model, whole.vocab_size, dtype, config.block_size, config.max_model_len or whole.max_position_embeddings,
        device, group, config.determinism,
        has_scaled_cache=config.kv_cache_dtype == "fp8",
        formats=formats_of(whole, config.quantize, dtype, device),
        max_adapter_rank=config.max_adapter_rank if config.max_adapters else 0,
    )  # fmt: skip
    with torch.inference_mode():
        attention = choose_checked(config, setup)
        pooling = load_device_pooling(checkpoint, settings, whole, config.determinism, device)
        on_device = _load_on_device(config, setup, loader, whole.names, attention, pooling, progress)
    num_blocks = on_device.pool.shape[2]
    logger.info("%d CUDA graphs, %d blocks, attention %s", on_device.compute.num_graphs, num_blocks, attention.name)
    max_model_len = choose_max_model_len(config, whole, num_blocks)
    rows = OpenRows(
        config.max_num_seqs,
        max_model_len,
        config.block_size,
        num_blocks,
        whole.vocab_size,
        compiled_grammars(config.model_dir, whole.vocab_size, eos_ids) if pooling.generates else None,
        hidden_size=whole.hidden_size,
        pooling=PoolingTable(pooling),
        adapters=None if on_device.adapters is None else on_device.adapters.rows,
    )
    if on_device.adapters is not None and group.rank == 0:  # the others receive them
        for name_of_adapter, folder in config.adapters:
            on_device.adapters.store.load(name_of_adapter, folder)
    backend = f"cuda/{attention.name}"
    info = make_engine_info(
        config,
        checkpoint,
        name,
        backend,
        device_numerics(backend, device, group.size, loader.formats),
        max_model_len=max_model_len,
        vocab_size=whole.vocab_size,
        num_blocks=num_blocks,
        hidden_size=whole.hidden_size,
        eos_token_ids=eos_ids,
        default_sampling=sampling,
        attention_window=whole.within(max_model_len).attention_window,
        pooling=pooling_info(settings, pooling, max_model_len),
    )
    return LoadedModel(info, rows, on_device, dtype)


def _load_on_device(
    config: EngineConfig,
    setup: Setup,
    loader: ShardLoader,
    names: Names,
    attention: Attention,
    pooling: PoolingWeights,
    progress: Callable[[float], None] | None,
) -> OnDevice:
    """Loads the weights, divides the memory that is left, and records graphs.

    `names` are those of the model's tensors."""
    device, group = setup.device, setup.group
    stages = Stages(progress, has_graphs=device.type == "cuda" and config.cuda_graphs != "off")
    with fitting("the weights", "raise tensor_parallel_size, or use a smaller dtype or model"):
        decoder = DeviceDecoder(
            loader, setup.model, group, setup.max_model_len, device, stages.weights,
            has_scaled_cache=setup.has_scaled_cache,
        )  # fmt: skip
    with fitting("the slots of adapters", "lower max_adapters or max_adapter_rank"):
        adapters = DeviceAdapters(config, loader, names, device) if config.max_adapters else None
    state = make_state(config.max_num_seqs, -(-setup.max_model_len // config.block_size), device)
    max_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    buffer = StepBuffer(config.max_num_seqs, max_tokens, state, device)
    with fitting("the tables of all rows", "lower max_num_seqs"):
        compute = StepCompute(
            decoder, attention, buffer, state, config.block_size,
            group.vocab_part(setup.vocab_size), group, min(config.cuda_graph_tokens, max_tokens),
            pooling,
            None if adapters is None else adapters.slots,
        )  # fmt: skip
    kv_dtype = setup.cache_dtype
    shares = divide_memory(config, setup.model, kv_dtype, compute, device, group)
    num_blocks = group.all_reduce_min(shares.num_blocks)
    with fitting(f"{num_blocks} blocks", "lower num_blocks or kv_cache_memory"):
        pool = make_pool(num_blocks, config.block_size, setup.model, kv_dtype, device)
    compute.use_cache(pool)
    _record_graphs(config, compute, device, shares, stages)
    return OnDevice(compute, buffer, state, pool, adapters)


def _record_graphs(
    config: EngineConfig, compute: StepCompute, device: torch.device, shares: Shares, stages: Stages
) -> None:
    recorder = make_recorder(device) if config.cuda_graphs != "off" else None
    if recorder is not None:
        is_lazy = config.cuda_graphs == "lazy"
        try:
            compute.record(recorder, shares.graph_bytes, stages.graphs, is_lazy=is_lazy)
        except GraphError as error:
            raise BackendUnavailableError(f"{error}; use --cuda-graphs off") from error
    stages.end()
