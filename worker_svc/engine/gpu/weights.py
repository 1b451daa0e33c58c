"""Loads weights from the checkpoint to the device. A rank reads only its own shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.backend import BackendUnavailableError, HeadShape, Linear
from worker_svc.engine.checkpoint import Checkpoint
from worker_svc.engine.config import Determinism
from worker_svc.engine.families import Role
from worker_svc.engine.gpu.kernels import linear
from worker_svc.engine.gpu.kernels.fp8 import scale_for
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.uploads import Uploader
from worker_svc.engine.weights import Layer, WeightLoader

COLUMN_PARALLEL = ("q", "gate", "up")  # each rank computes a shard of the output
KEY_VALUE = ("k", "v")  # the same, but several ranks may hold the same head
ROW_PARALLEL = ("o", "down")  # each rank multiplies a shard of the input; outputs are added


class DeviceLinears:
    """Linear layers on the device: cuBLAS, or in exact mode the Triton kernel, whose rows are independent."""

    copies_weights = False

    def __init__(self, determinism: Determinism) -> None:
        self._product = linear.linear if determinism == "exact" else F.linear

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return DeviceLinear(self._product, weight, bias)


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A weight [out, in] on the device and the function that multiplies by it."""

    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


def kv_scales(layer: Layer, heads: HeadShape) -> torch.Tensor:
    """Scales of a layer's keys and values in fp8, float32 [2, kv_heads]. They are computed from the weights alone, so
    all workers of a model use the same scales and no calibration is needed.

    A normed input has about unit variance, so the norm of a projection row estimates the size of its output.
    """
    if not isinstance(layer.qkv, DeviceLinear):
        raise TypeError(f"layer.qkv is a {type(layer.qkv).__name__}; estimating fp8 scales needs a DeviceLinear")
    gained = layer.qkv.weight.double() * layer.input_norm.weight.double()
    squares = gained.square().sum(1)
    if layer.qkv.bias is not None:
        squares += layer.qkv.bias.double().square()
    size = heads.num_kv_heads * heads.head_dim
    parts = squares[-2 * size :].view(2, heads.num_kv_heads, heads.head_dim)
    if layer.qk_norms is not None:
        parts[0] = layer.qk_norms[1].weight.double().square()
    return scale_for(parts.mean(-1).sqrt())


def shard_config(config: ModelConfig, group: Group) -> ModelConfig:
    """The shape of one rank's shard. Raises BackendUnavailableError if the model cannot be divided evenly.

    With more ranks than KV heads, several ranks hold the same head.
    """
    heads, size = config.heads, group.size
    for name, value in (
        ("num_attention_heads", heads.num_q_heads),
        *{("intermediate_size", layer.inner) for layer in config.layers},
    ):
        if value % size:
            raise BackendUnavailableError(
                f"{name} {value} is not divisible by tensor_parallel_size {size}; use a size that divides it"
            )
    if max(heads.num_kv_heads, size) % min(heads.num_kv_heads, size):
        raise BackendUnavailableError(
            f"tensor_parallel_size {size} must be a divisor or a multiple of num_key_value_heads {heads.num_kv_heads}"
        )
    if not Group(size - 1, size).vocab_part(config.vocab_size):
        raise BackendUnavailableError(
            f"vocab_size {config.vocab_size} is too small for tensor_parallel_size {size}; lower tensor_parallel_size"
        )
    shape = HeadShape(heads.num_q_heads // size, max(heads.num_kv_heads // size, 1), heads.head_dim)
    return replace(
        config, heads=shape, layers=tuple(replace(layer, inner=layer.inner // size) for layer in config.layers)
    )


class ShardLoader(WeightLoader):
    """Loads one rank's shard to the device."""

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
        self._uploader = Uploader(dtype, device)
        self._embedding: torch.Tensor | None = None

    def embedding(self) -> torch.Tensor:
        """This rank's rows of the embedding; kept for a tied output layer."""
        if self._embedding is None:
            self._embedding = super().embedding()
        return self._embedding

    def head(self) -> Linear | None:
        return self._backend.make_linear(self.embedding(), None) if self._config.is_tied else super().head()

    def _vocabulary(self, name: str) -> torch.Tensor:
        whole = self._checkpoint.tensor(f"{name}.weight", (self._config.vocab_size, self._config.hidden_size), None)
        part = self._group.vocab_part(self._config.vocab_size)
        return self._join([whole[part.start : part.stop]])

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Concatenates the rows of `parts` on the device."""
        sizes = [len(part) for part in parts]
        whole = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=self._dtype, device=self._device)
        for part, place in zip(parts, torch.split(whole, sizes), strict=True):
            self._uploader.copy(part, place)
        return whole

    def _part(self, role: Role, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor, memory-mapped."""
        rank, size = self._group.rank, self._group.size
        if size == 1:
            return tensor
        if role in COLUMN_PARALLEL:
            return tensor.chunk(size)[rank]
        if role in KEY_VALUE:
            parts = min(size, self._config.heads.num_kv_heads)
            return tensor.chunk(parts)[rank * parts // size]
        if role in ROW_PARALLEL and tensor.dim() == 2:
            return tensor.chunk(size, dim=1)[rank]
        if role in ROW_PARALLEL and rank > 0:
            return torch.zeros_like(tensor)  # only rank 0 adds the bias
        return tensor
