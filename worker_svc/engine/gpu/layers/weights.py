"""Loads weights from the checkpoint to the device. A rank reads only its own shard."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property

import torch

from worker_svc.engine.backend import SITES, BackendUnavailableError, HeadShape, Linear, Module, Norm
from worker_svc.engine.checkpoint.architecture import Role
from worker_svc.engine.checkpoint.features import FEATURES
from worker_svc.engine.checkpoint.quantization_config import Packed, Scaled
from worker_svc.engine.checkpoint.quantized import order_of, read_fp8_rows, read_int4_rows
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import Quantization
from worker_svc.engine.decoder.config import Experts, LayerSpec, ModelConfig
from worker_svc.engine.decoder.layer import FeedForward, Layer, RoutedExperts
from worker_svc.engine.decoder.stored import Stored
from worker_svc.engine.decoder.weights import WeightLoader, in_factors
from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.fp8 import scale_for
from worker_svc.engine.gpu.kernels.linears import int4_linear
from worker_svc.engine.gpu.kernels.linears.expert_linear import ExpertWeights
from worker_svc.engine.gpu.kernels.linears.int4_linear import Int4Weight
from worker_svc.engine.gpu.kernels.linears.int8_linear import torch_int8_rows
from worker_svc.engine.gpu.kernels.linears.scaled_linear import FP8, SMALLEST_GROUP, Fp8Weight, quantized
from worker_svc.engine.gpu.layers.adapter_shapes import AdapterShapes, ModuleShard, SiteShard
from worker_svc.engine.gpu.layers.experts import StackedExperts
from worker_svc.engine.gpu.layers.linears import DeviceLinears, StoredWeight, WeightFormat, has_fp8, has_int4
from worker_svc.engine.gpu.uploads import Uploader
from worker_svc.engine.kernels.torch_linear import Int8Rows, check_int8_width

COLUMN_PARALLEL = ("q", "gate", "up")  # each rank computes a shard of the output
KEY_VALUE = ("k", "v")  # the same, but several ranks may hold the same head
ROW_PARALLEL = ("o", "down")  # each rank multiplies a shard of the input; outputs are added
INT4_BITS = 4
FP8_NAME = "float8_e4m3fn"  # in quantization_config.py
UNDIVIDED = {"recurrent", "latents", "kv_layouts", "layer_inputs", "streams", "output_gate", "experts_beside"}
KEPT = ("router", "head")  # not rounded by `quantize`: a small error there changes experts and tokens


def kv_scales(layer: Layer, heads: HeadShape) -> torch.Tensor:
    """Scales in fp8 of a layer's keys, values, and queries that share a KV head, float32 [3, kv_heads]. They are
    computed from the weights alone, so all workers of a model use the same scales and no calibration is needed.

    A normed input has about unit variance, so the norm of a projection row estimates the size of its output.
    """
    if not isinstance(layer.qkv, StoredWeight):
        raise TypeError(f"layer.qkv is a {type(layer.qkv).__name__}; estimating fp8 scales needs its weight")
    weight, norm, dim = layer.qkv.widened().double(), layer.input_layernorm, heads.head_dim
    if norm is None:
        raise BackendUnavailableError(
            "kv_cache_dtype fp8 needs the norm before attention, which this model lacks; use kv_cache_dtype auto"
        )
    squares = (weight * _gain(norm)).square().sum(1)
    for shift in (layer.qkv.bias, None if norm.bias is None else weight @ norm.bias.double()):
        squares += 0.0 if shift is None else shift.double().square()
    group = heads.num_q_heads // heads.num_kv_heads
    sizes = [rows * heads.num_kv_heads * heads.head_dim for rows in (group, 1, 1)]
    squares = squares[: sum(sizes)]  # a gate of the outputs follows
    queries, keys, values = (part.view(heads.num_kv_heads, -1, dim).mean(1) for part in torch.split(squares, sizes))
    if layer.qk_norms is not None:
        gains = [_gain(norm).square().view(-1, dim) for norm in layer.qk_norms]
        queries = gains[0].expand(heads.num_q_heads, dim).reshape(heads.num_kv_heads, group, dim).mean(1)
        keys = gains[1].expand_as(keys)
    return scale_for(torch.stack((keys, values, queries)).mean(-1).sqrt())


def _gain(norm: Norm) -> torch.Tensor:
    return norm.weight.double() + (norm.kind == "rms_offset")


def whole_experts(num_experts: int, group: Group) -> range | None:
    """The experts of one rank, if each rank can hold equally many. None: it holds a part of every expert."""
    count, rest = divmod(num_experts, group.size)
    return None if rest or group.size == 1 else range(group.rank * count, (group.rank + 1) * count)


def shard_config(config: ModelConfig, group: Group) -> ModelConfig:
    """The shape of one rank's shard. Raises BackendUnavailableError if the model cannot be divided evenly.

    With more ranks than KV heads, several ranks hold the same head.
    """
    heads, size = config.heads, group.size
    if size > 1 and config.architecture.qk_norm == "projection":
        raise BackendUnavailableError(
            "norms of queries and keys that span all heads cannot be divided; use tensor_parallel_size 1"
        )
    if size > 1 and (whole := config.features() & UNDIVIDED):
        what = ", ".join(FEATURES[feature] for feature in sorted(whole))
        raise BackendUnavailableError(f"{what} cannot be divided among GPUs; use tensor_parallel_size 1")
    for name, value in (
        ("num_attention_heads", heads.num_q_heads),
        *{("intermediate_size", layer.inner) for layer in config.layers if _is_inner_divided(layer, group)},
        *{("width of shared experts", layer.experts.shared_inner) for layer in config.layers if layer.experts},
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
    if size == 1:
        return config
    shape = HeadShape(heads.num_q_heads // size, max(heads.num_kv_heads // size, 1), heads.head_dim)
    inners = [layer.inner // size if _is_inner_divided(layer, group) else layer.inner for layer in config.layers]
    pairs = zip(config.layers, inners, strict=True)
    return replace(config, layers=tuple(replace(layer, heads=shape, inner=inner) for layer, inner in pairs))


def _is_inner_divided(layer: LayerSpec, group: Group) -> bool:
    return layer.experts is None or whole_experts(layer.experts.routing.num_experts, group) is None


def _range_of(indices: torch.Tensor) -> range:
    """Successive indices as a range."""
    return range(int(indices[0]), int(indices[-1]) + 1)


def _spread(numbers: torch.Tensor, times: int, count: int) -> torch.Tensor:
    """Each number of [out, groups] repeated for the shorter groups that its group becomes, `count` of which exist."""
    return numbers.repeat_interleave(times, 1)[:, :count] if times > 1 else numbers


class ShardLoader(WeightLoader):
    """Loads one rank's shard to the device. `formats` are those of the quantized weights that it has made so far; the
    others are in a float type."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        linears: DeviceLinears,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        quantize: Quantization | None = None,
    ) -> None:
        super().__init__(checkpoint, config, linears, dtype)
        self.formats: set[WeightFormat] = set()
        self._linears = linears
        self._quantize = quantize
        self._device = device
        self._group = group
        self._uploader = Uploader(dtype, device)
        self._embedding: torch.Tensor | None = None

    def adapter_shapes(self, max_rank: int) -> AdapterShapes:
        """This rank's part of the linear layers that adapters may change."""
        count = self._config.num_layers
        stored = [self._stored.layer(index) for index in range(count)]
        found: list[dict[Module, ModuleShard]] = [{} for _ in range(count * len(SITES))]
        for name, module in self.modules().items():
            roles = dict(stored[module.layer][SITES[module.site]].tensors())[name]
            found[module.layer * len(SITES) + module.site][module] = self._module_shard(module, roles)
        sites = (SiteShard(index, modules, max_rank) if modules else None for index, modules in enumerate(found))
        return AdapterShapes(tuple(sites), self._dtype)

    def _module_shard(self, module: Module, roles: tuple[tuple[Role, int], ...]) -> ModuleShard:
        role = roles[0][0]
        inputs, outputs = torch.arange(module.num_inputs), torch.arange(module.num_outputs)
        if role in ROW_PARALLEL:
            return ModuleShard(_range_of(self._part(role, inputs[None])[0]), (_range_of(outputs),))
        return ModuleShard(_range_of(inputs), tuple(map(_range_of, self._parts(roles, outputs))))

    def embedding(self) -> torch.Tensor:
        """This rank's rows of the embedding; kept for a tied output layer."""
        if self._embedding is None:
            self._embedding = super().embedding()
        return self._embedding

    def head(self) -> Linear | None:
        if self._config.is_tied and self._config.head == "tokens":
            return self._backend.make_linear(self.embedding(), None)
        return super().head()

    def _linear(self, stored: Stored) -> Linear:
        weight = self._fp8_weight(stored)
        if weight is not None:
            return self._linears.make_fp8_linear(weight, self._bias(stored))
        packed = self._int4_weight(stored)
        if packed is None:
            return super()._linear(stored)
        self.formats.add("int4")
        return self._linears.make_int4_linear(packed, self._bias(stored))

    def _routed(self, spec: LayerSpec, experts: Experts, stored: dict[str, Stored], prefix: str) -> RoutedExperts:
        routing = experts.routing
        numbers = whole_experts(routing.num_experts, self._group)
        reader = self if numbers is None else self._undivided
        numbers = numbers or range(routing.num_experts)
        gate_up = reader._stack([stored[f"gate_up{number}"] for number in numbers])
        down = reader._stack([stored[f"down{number}"] for number in numbers])
        correction, shared = self._correction(experts, prefix), None
        if routing.shared != "none":
            names = (f"{name}{routing.num_experts}" for name in ("gate_up", "down"))
            shared = FeedForward(*(self._linear(stored[name]) for name in names))
        stacked = StackedExperts(
            *(self._views(gate_up), self._views(down), routing, correction, self._config.is_gated),
            *(gate_up, down, self._linears.is_exact, numbers.start),
            shared=shared,
        )
        return RoutedExperts(self._router(routing, stored["router"]), stacked)

    def _placed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._device)

    @cached_property
    def _undivided(self) -> ShardLoader:
        """A loader of whole tensors, with the same `formats`."""
        loader = copy(self)
        loader._group = ALONE
        return loader

    def _stack(self, experts: list[Stored]) -> ExpertWeights:
        """One weight of all experts. It is in fp8 only if all are, with equal groups."""
        found = [bias for expert in experts if (bias := self._bias(expert)) is not None]
        biases = torch.stack(found) if found else None
        if len({self._fp8_scheme(expert) for expert in experts}) > 1:
            return ExpertWeights(torch.stack([self._float_weight(expert) for expert in experts]), biases=biases)
        steps, group = torch.empty(0), 0
        scales: list[torch.Tensor] = []
        for number, expert in enumerate(experts):
            weight = self._fp8_weight(expert)
            part = self._float_weight(expert) if weight is None else weight.steps
            steps = part.new_empty(len(experts), *part.shape) if number == 0 else steps
            steps[number].copy_(part)
            if weight is not None:
                scales, group = [*scales, weight.scales], weight.group
        return ExpertWeights(steps, torch.stack(scales) if scales else None, group, biases)

    def _views(self, stacked: ExpertWeights) -> list[Linear]:
        """The linear layer of each expert."""
        biases = [None] * len(stacked.steps) if stacked.biases is None else list(stacked.biases)
        if stacked.scales is None:
            return [self._linears.make_linear(*part) for part in zip(stacked.steps, biases, strict=True)]
        parts = zip(stacked.steps, stacked.scales, biases, strict=True)
        make = self._linears.make_fp8_linear
        return [make(Fp8Weight(steps, scales, stacked.group), bias) for steps, scales, bias in parts]

    def _float_weight(self, stored: Stored) -> torch.Tensor:
        """The weight [out, in] in the dtype of the model."""
        weights = []
        for name, roles in stored.tensors():
            weights += self._parts(roles, self._weight(name, stored, roles))
        joined = in_factors(stored, self._join(weights))
        return joined if stored.order is None else joined[stored.order]

    def _fp8_weight(self, stored: Stored) -> Fp8Weight | None:
        """The weight as it is stored, or rounded to fp8. None: it is used in a float type."""
        scheme = self._fp8_scheme(stored)
        if scheme is not None:
            self.formats.add("fp8")
            return self._stored_fp8(stored, scheme)
        if self._quantize != "fp8" or stored.roles[0][0] in KEPT:
            return None
        self.formats.add("fp8")
        return quantized(self._float_weight(stored))

    def _fp8_scheme(self, stored: Stored) -> Scaled | None:
        """How a layer is stored whose weight can be multiplied in fp8."""
        schemes = {self._scheme(name) for name in stored.names}
        if len(schemes) != 1 or stored.factors or not has_fp8(self._device):
            return None
        (scheme,) = schemes
        if not isinstance(scheme, Scaled) or scheme.dtype != FP8_NAME:
            return None
        columns = scheme.block[1]
        return scheme if columns is None or self._may_divide(stored, columns) else None

    def _stored_fp8(self, stored: Stored, scheme: Scaled) -> Fp8Weight:
        columns = scheme.block[1]
        steps, scales = [], []
        for name, roles in stored.tensors():
            shape = stored.shape(roles)
            stored_steps, stored_scales = read_fp8_rows(self._checkpoint, name, scheme, shape)
            steps += self._parts(roles, stored_steps.view(torch.uint8))
            # A scale of all inputs is repeated, so that each rank finds it in its part
            spread = stored_scales if columns else stored_scales.expand(shape[0], self._group.size)
            scales += self._parts(roles, spread)
        whole = self._join(steps, self._bytes_uploader, torch.uint8).view(FP8)
        found = torch.cat(scales)[:, : None if columns else 1]
        if stored.order is not None:
            whole, found = whole.view(torch.uint8)[stored.order].view(FP8), found[stored.order]
        placed = found.T.contiguous().to(self._device)
        return Fp8Weight(whole, placed, columns or whole.shape[1])

    def _int8_rows(self, stored: Stored) -> Int8Rows | None:
        if self._quantize == "int8" and stored.roles[0][0] not in KEPT:
            weight = self._float_weight(stored)
            check_int8_width(weight.shape[1])
            self.formats.add("int8")
            return torch_int8_rows(weight)
        whole = super()._int8_rows(stored) if stored.order is None else None
        if whole is None:
            return None
        self.formats.add("int8")
        spread = whole.scales[:, None].expand(-1, self._group.size)  # so that each rank finds its part
        steps = self._join(self._parts(stored.roles, whole.steps.view(torch.uint8)), self._bytes_uploader, torch.uint8)
        scales = torch.cat(self._parts(stored.roles, spread))[:, 0].contiguous()
        return Int8Rows(steps.view(torch.int8), scales.to(self._device))

    def _int4_weight(self, stored: Stored) -> Int4Weight | None:
        """The weight in int4 as it is stored. None: it is converted."""
        schemes = {self._scheme(name) for name in stored.names}
        scheme = next(iter(schemes))
        if stored.order is not None or stored.factors:
            return None
        if len(schemes) > 1 or not isinstance(scheme, Packed) or not has_int4(self._dtype, self._device):
            return None
        group, count = scheme.group or stored.in_features, stored.in_features
        unit = int4_linear.unit_of(group, count)
        if scheme.bits != INT4_BITS or not self._may_divide(stored, unit):
            return None
        found = [
            read_int4_rows(self._checkpoint, name, scheme, stored.shape(roles)) for name, roles in stored.tensors()
        ]
        order = order_of([rows.groups for rows in found], group)
        if order is None or (len(order) and self._is_divided(stored)):
            return None
        steps, scales, zeros = [], [], []
        for rows, (_, roles) in zip(found, stored.tensors(), strict=True):
            steps += self._parts(roles, rows.steps[:, order] if len(order) else rows.steps)
            scales += self._parts(roles, _spread(rows.scales, group // unit, count // unit))
            zeros += self._parts(roles, _spread(rows.zeros, group // unit, count // unit))
        if sum(map(len, steps)) % int4_linear.OUTPUTS or steps[0].shape[1] % int4_linear.DEPTH:
            return None
        words = int4_linear.packed(self._join(steps, self._bytes_uploader, torch.uint8))
        numbers = int4_linear.scales_and_zeros(torch.cat(scales), torch.cat(zeros), self._dtype)
        return Int4Weight(words, numbers.to(self._device), unit, order.to(self._device) if len(order) else None)

    def _is_divided(self, stored: Stored) -> bool:
        """Whether each rank has a part of the inputs."""
        return self._group.size > 1 and stored.roles[0][0] in ROW_PARALLEL

    def _may_divide(self, stored: Stored, columns: int) -> bool:
        """Whether the kernel can compute groups of `columns` inputs, none of which belongs to two ranks."""
        size = self._group.size if self._is_divided(stored) else 1
        return columns % SMALLEST_GROUP == 0 and (size == 1 or stored.in_features % (size * columns) == 0)

    @cached_property
    def _bytes_uploader(self) -> Uploader:
        return Uploader(torch.uint8, self._device)

    def _vocabulary(self, name: str) -> torch.Tensor:
        whole = self._checkpoint.tensor(f"{name}.weight", (self._config.vocab_size, self._config.hidden_size), None)
        part = self._group.vocab_part(self._config.vocab_size)
        return self._join([whole[part.start : part.stop]])

    def _join(
        self, parts: list[torch.Tensor], uploader: Uploader | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Concatenates the rows of `parts` on the device."""
        sizes = [len(part) for part in parts]
        whole = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=dtype or self._dtype, device=self._device)
        for part, place in zip(parts, torch.split(whole, sizes), strict=True):
            (uploader or self._uploader).copy(part, place)
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
        if role == "head":
            part = self._group.vocab_part(self._config.vocab_size)
            return tensor[part.start : part.stop]
        if role in ROW_PARALLEL and rank > 0:
            return torch.zeros_like(tensor)  # only rank 0 adds the bias
        return tensor
