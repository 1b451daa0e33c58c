"""How large the pool may be: what is left of the device once the largest steps have shown what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.step_buffer import Bucket
from worker_svc.engine.kv_cache import DEFAULT_MEMORY, KVCachePool

BYTES_PER_GRAPH = 8 << 20  # its nodes and their parameters, beside the memory that all graphs share


@dataclass(frozen=True, slots=True)
class Shares:
    """What the device's memory is divided into, beside the weights."""

    num_blocks: int
    graph_bytes: int  # that recorded graphs may take


@contextmanager
def fitting(what: str, advice: str) -> Iterator[None]:
    """What does not fit within is told as a setting that can be changed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the GPU's memory does not hold {what}; {advice} ({str(error).splitlines()[0]})") from error


def make_pool(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros [layers, 2, num_blocks, block_size, kv_heads, head_dim]: a kernel may read rows behind a sequence's end."""
    heads = model.heads
    size = (model.num_layers, 2, num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    return torch.zeros(size, dtype=dtype, device=device)


def divide_memory(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, compute: StepCompute, device: torch.device
) -> Shares:
    """num_blocks, or what fits kv_cache_memory, or what the device has left. ValueError if that holds no block.

    Runs the largest steps on a pool of one block; all kernels of mixed steps are compiled then.
    """
    compute.use_cache(make_pool(1, config.block_size, model, dtype, device))
    largest = f"a step of max_num_batched_tokens {config.max_num_batched_tokens}, max_num_seqs {config.max_num_seqs}"
    with fitting(largest, "lower one of them, or raise tensor_parallel_size"):
        peak, graph_bytes = _measure(config, compute, device)
    if config.num_blocks is not None:
        return Shares(config.num_blocks, graph_bytes)
    memory = config.kv_cache_memory or _left(config, peak + graph_bytes, device)
    heads = model.heads
    per_block = KVCachePool.bytes_per_block(
        model.num_layers, config.block_size, heads.num_kv_heads, heads.head_dim, dtype
    )
    if memory < per_block:
        raise ValueError(
            f"{max(memory, 0)} bytes are left for KV, one block takes {per_block}; raise gpu_memory_utilization, "
            "or lower max_num_batched_tokens, max_num_seqs or cuda_graph_tokens"
        )
    return Shares(memory // per_block, graph_bytes)


def _measure(config: EngineConfig, compute: StepCompute, device: torch.device) -> tuple[int, int]:
    """Bytes that the largest step takes on top of what is held, and bytes for all graphs."""
    buckets = compute.buckets() if config.cuda_graphs != "off" else []
    if device.type != "cuda":
        return 0, BYTES_PER_GRAPH * len(buckets)  # interpreted, and nobody is waiting for a compiler
    compute.warm_up(config.max_num_batched_tokens)
    peak = _peak(lambda: compute.warm_up(config.max_num_batched_tokens), device)
    shared = max((_peak(partial(compute.compute_nothing, bucket), device) for bucket in _largest(buckets)), default=0)
    torch.cuda.empty_cache()
    return peak, shared + BYTES_PER_GRAPH * len(buckets)


def _largest(buckets: list[Bucket]) -> list[Bucket]:
    """Of each kind, with and without filters."""
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
