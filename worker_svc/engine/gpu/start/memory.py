"""Sizes the KV pool: the device memory that weights, the largest step and CUDA graphs leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from request_fields.sizes import largest_pool
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.pool.kv_cache import DEFAULT_MEMORY, KVCachePool
from worker_svc.engine.gpu.attention.paged import DevicePool
from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.step.step_buffer import Bucket

BYTES_PER_GRAPH = 8 << 20  # nodes and their parameters, besides the memory that all graphs share


@dataclass(frozen=True, slots=True)
class Shares:
    """Device memory for the KV pool and for CUDA graphs."""

    num_blocks: int
    graph_bytes: int  # limit for recorded graphs


@contextmanager
def fitting(what: str, advice: str) -> Iterator[None]:
    """Turns out-of-memory into a ValueError that names a setting to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU has too little memory for {what}; {advice} ({str(error).splitlines()[0]})"
        ) from error


def make_pool(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DevicePool:
    return DevicePool(model.kv_layouts(), num_blocks, block_size, dtype, device)


def divide_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    compute: StepCompute,
    device: torch.device,
    group: Group = ALONE,
) -> Shares:
    """Sizes the pool by num_blocks, else kv_cache_memory, else free device memory. ValueError if no block fits.

    Runs the largest steps on a pool of one block. Before, their kernels are compiled.
    """
    compute.use_cache(make_pool(1, config.block_size, model, dtype, device))
    largest = f"a step of max_num_batched_tokens {config.max_num_batched_tokens}, max_num_seqs {config.max_num_seqs}"
    steps = [partial(compute.warm_up, config.max_num_batched_tokens)]
    steps += [partial(compute.run_empty, bucket) for bucket in _largest(compute.buckets())]
    if forms.chosen() is not forms.TORCH:
        from worker_svc.engine.gpu.start.compilation import compile_first  # it needs Triton

        compile_first(steps, group)
    with fitting(largest, "lower one of them, or raise tensor_parallel_size"):
        peak, graph_bytes = _measure(config, compute, device)
    if config.num_blocks is not None:
        return Shares(config.num_blocks, graph_bytes)
    images = 0 if model.vision is None else config.image_cache_memory
    memory = config.kv_cache_memory or _left(config, peak + graph_bytes + images, device)
    per_block = KVCachePool.bytes_per_block(model.kv_layouts(), config.block_size, dtype)
    if memory < per_block:
        raise ValueError(
            f"{max(memory, 0)} bytes are left for the KV cache, but one block takes {per_block}; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens, max_num_seqs or cuda_graph_tokens"
        )
    return Shares(min(memory // per_block, largest_pool(config.block_size)), graph_bytes)


def _measure(config: EngineConfig, compute: StepCompute, device: torch.device) -> tuple[int, int]:
    """Peak bytes of the largest step, and bytes of all graphs."""
    buckets = compute.buckets() if config.cuda_graphs != "off" else []
    if device.type != "cuda":
        return 0, BYTES_PER_GRAPH * len(buckets)  # the interpreter compiles nothing and takes no device memory
    compute.warm_up(config.max_num_batched_tokens)
    peak = _peak(lambda: compute.warm_up(config.max_num_batched_tokens), device)
    shared = max((_peak(partial(compute.run_empty, bucket), device) for bucket in _largest(buckets)), default=0)
    torch.cuda.empty_cache()
    return peak, shared + BYTES_PER_GRAPH * len(buckets)


def _largest(buckets: list[Bucket]) -> list[Bucket]:
    """The largest bucket with and without prompts, each with and without filters."""
    return list({(bucket.is_decode, bucket.is_filtered): bucket for bucket in reversed(buckets)}.values())


def _peak(step: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated(device)) - held


def _left(config: EngineConfig, taken: int, device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_MEMORY
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) - (total - free) - taken
