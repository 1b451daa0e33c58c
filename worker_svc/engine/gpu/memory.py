"""How large the pool may be: what is left of the device once the largest step has shown what it takes."""

from __future__ import annotations

import torch

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.kv_cache import DEFAULT_MEMORY, KVCachePool

GRAPH_RESERVE = 1 << 30  # bytes for the memory that captured graphs share


def make_pool(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros [layers, 2, num_blocks, block_size, kv_heads, head_dim]: a kernel may read rows behind a sequence's end."""
    heads = model.heads
    size = (model.num_layers, 2, num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    return torch.zeros(size, dtype=dtype, device=device)


def fitting_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, compute: StepCompute, device: torch.device
) -> int:
    """num_blocks, or what fits kv_cache_memory, or what the device has left. ValueError if that holds no block.

    Runs the largest step on a pool of one block; all kernels of mixed steps are compiled then.
    """
    compute.use_cache(make_pool(1, config.block_size, model, dtype, device))
    peak = _warm_up(config, compute, device)
    if config.num_blocks is not None:
        return config.num_blocks
    memory = config.kv_cache_memory or _left(config, peak, device)
    heads = model.heads
    per_block = KVCachePool.bytes_per_block(
        model.num_layers, config.block_size, heads.num_kv_heads, heads.head_dim, dtype
    )
    if memory < per_block:
        raise ValueError(
            f"{max(memory, 0)} bytes are left for KV, one block takes {per_block}; "
            "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return memory // per_block


def _warm_up(config: EngineConfig, compute: StepCompute, device: torch.device) -> int:
    """Bytes that the largest step takes on top of what is held."""
    if device.type != "cuda":
        return 0  # interpreted, and nobody is waiting for a compiler
    compute.warm_up(config.max_num_batched_tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    compute.warm_up(config.max_num_batched_tokens)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - held
    torch.cuda.empty_cache()
    return peak


def _left(config: EngineConfig, peak: int, device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_MEMORY
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) - (total - free) - peak - GRAPH_RESERVE
