"""Weights from the checkpoint to the device: what a rank does not hold is never copied."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.backend import BackendUnavailableError, HeadShape, Linear
from worker_svc.engine.checkpoint import Checkpoint
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels import linear
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.model import EMBEDDING, HEAD, WeightLoader

COLUMN_PARALLEL = ("q_proj", "gate_proj", "up_proj")  # each rank makes a part of the output
KEY_VALUE = ("k_proj", "v_proj")  # the same, but several ranks may need one head
ROW_PARALLEL = ("o_proj", "down_proj")  # each rank takes a part of the input; outputs are added


class DeviceLinears:
    """Prepares weights for the device: the library's product, or ours where rows must not know each other."""

    def __init__(self, determinism: Determinism) -> None:
        self._product = linear.linear if determinism == "exact" else F.linear

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        product = self._product
        return lambda x: product(x, weight, bias)


def shard_config(config: ModelConfig, group: Group) -> ModelConfig:
    """The shape of one rank's part. BackendUnavailableError where ranks cannot share evenly.

    Ranks beyond the number of key-value heads hold copies of them.
    """
    heads, size = config.heads, group.size
    for name, value in (
        ("num_attention_heads", heads.num_q_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if value % size:
            raise BackendUnavailableError(
                f"tensor_parallel_size {size} does not divide {name} {value}; use a size that does"
            )
    if max(heads.num_kv_heads, size) % min(heads.num_kv_heads, size):
        raise BackendUnavailableError(
            f"tensor_parallel_size {size} neither divides num_key_value_heads {heads.num_kv_heads} nor is a multiple "
            "of it; use a size that does or is"
        )
    if not Group(size - 1, size).vocab_part(config.vocab_size):
        raise BackendUnavailableError(f"vocab_size {config.vocab_size} is too small for tensor_parallel_size {size}")
    shape = HeadShape(heads.num_q_heads // size, max(heads.num_kv_heads // size, 1), heads.head_dim)
    return replace(config, heads=shape, intermediate_size=config.intermediate_size // size)


class ShardLoader(WeightLoader):
    """A loader whose tensors are one rank's part, on the device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        linears: DeviceLinears,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__(checkpoint, config, linears, dtype)
        self._device = device
        self._group = group

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._shard(name, super()._tensor(name, *shape)).to(self._device)

    def _shard(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        rank, size = self._group.rank, self._group.size
        if size == 1:
            return whole
        kind = name.split(".")[-2]
        if name in (EMBEDDING, HEAD):
            part = self._group.vocab_part(self._config.vocab_size)
            return whole[part.start : part.stop].contiguous()
        if kind in COLUMN_PARALLEL:
            return whole.chunk(size)[rank].contiguous()
        if kind in KEY_VALUE:
            parts = min(size, self._config.heads.num_kv_heads)
            return whole.chunk(parts)[rank * parts // size].contiguous()
        if kind in ROW_PARALLEL and whole.dim() == 2:
            return whole.chunk(size, dim=1)[rank].contiguous()
        if kind in ROW_PARALLEL and rank > 0:
            return torch.zeros_like(whole)  # a bias is added once
        return whole
