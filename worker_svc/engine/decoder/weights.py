"""Loads the weights of a decoder: reads them from the checkpoint, concatenates them and prepares them for a backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from worker_svc.engine.adapters.targets import modules_of
from worker_svc.engine.backend import (
    ExpertLinears,
    LatentAttention,
    Linear,
    LinearMaker,
    Module,
    Norm,
    RecurrentWeights,
    Routing,
)
from worker_svc.engine.checkpoint.architecture import LAYER_NORMS, Role
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.quantization_config import Mxfp4, Packed, Scaled, Scheme
from worker_svc.engine.checkpoint.quantized import (
    four_bit_rows,
    fp4_rows,
    read_int4_rows,
    read_int8_rows,
    read_mxfp4,
    read_weight,
)
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.decoder import latents
from worker_svc.engine.decoder.config import Experts, LayerSpec, ModelConfig
from worker_svc.engine.decoder.layer import Beside, ExpertsBeside, FeedForward, Layer, RoutedExperts
from worker_svc.engine.decoder.plain_part import Part, PlainPart
from worker_svc.engine.decoder.stored import Stored, StoredLayers, conv_order, present, stored_plain
from worker_svc.engine.kernels import exact_ops
from worker_svc.engine.kernels.four_bits import FourBitRows
from worker_svc.engine.kernels.torch_linear import MAX_INT8_INPUTS, Int8Rows
from worker_svc.engine.recurrent import Recurrence
from worker_svc.engine.vision.config import tower_tensors

FOUR_BITS = 4
BESIDE_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
IGNORED_ENDINGS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@runtime_checkable
class Int8LinearMaker(Protocol):
    """A backend that computes with int8 weights as a checkpoint stores them."""

    def make_int8_linear(self, rows: Int8Rows, bias: torch.Tensor | None) -> Linear: ...


@runtime_checkable
class FourBitLinearMaker(Protocol):
    """A backend that computes with weights in 4 bits as a checkpoint stores them."""

    def make_four_bit_linear(self, rows: FourBitRows, bias: torch.Tensor | None) -> Linear | None:
        """None: it does not compute these, so they are converted."""


def in_factors(stored: Stored, weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] of all roles, times their factors."""
    if not stored.factors:
        return weight
    sizes = torch.tensor([size for _, size in stored.roles])
    return weight * torch.tensor(stored.factors).repeat_interleave(sizes)[:, None].to(weight)


class WeightLoader:
    """Reads the tensors of a model. Subclasses may keep a part of each tensor (`_part`), or store it elsewhere
    (`_join`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, backend: LinearMaker, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._names = config.names
        self._stored = StoredLayers(config)
        self._backend = backend
        self._dtype = dtype
        self._scratch = torch.empty(0, dtype=dtype)  # joined matrices, if the backend copies them
        checkpoint.add_views(self._stored.expert_views(checkpoint))
        embedding, head = f"{self._names.embedding}.weight", f"{self._names.head}.weight"
        if config.is_tied and checkpoint.has(head) and not checkpoint.has(embedding):
            checkpoint.add_views({embedding: (head, ())})

    def check(self) -> None:
        """Raises CheckpointError unless the checkpoint has all tensors and no others."""
        embedding, head = f"{self._names.embedding}.weight", f"{self._names.head}.weight"
        is_tied = self._config.is_tied
        expected = self._expected_names()
        if self._config.vision is not None:
            expected += tower_tensors(self._config.vision)
        has_ignored_head = is_tied or self._config.head != "tokens"
        ignored = (*IGNORED_ENDINGS, *((head,) if has_ignored_head else ()))
        self._checkpoint.check_names(expected, ignored, self._config.unread_tensors())
        if is_tied and head in self._checkpoint.tensor_names and not self._is_same(head, embedding):
            raise CheckpointError(
                f"tie_word_embeddings is true, but {head} differs from {embedding}; set tie_word_embeddings to false "
                f"in config.json to use {head}, or remove {head} from the checkpoint"
            )

    def _is_same(self, one: str, other: str) -> bool:
        shape = self._config.vocab_size, self._config.hidden_size
        return torch.equal(self._checkpoint.tensor(one, shape, None), self._checkpoint.tensor(other, shape, None))

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]; left memory-mapped where the dtype allows it."""
        return self._vocabulary(self._names.embedding)

    def position_embedding(self) -> torch.Tensor | None:
        """[max_position_embeddings, hidden], if positions are learned."""
        if not self._names.position_embedding:
            return None
        shape = (self._config.max_position_embeddings, self._config.hidden_size)
        return self._join([self._checkpoint.tensor(f"{self._names.position_embedding}.weight", shape, None)])

    def final_norm(self) -> Norm:
        return self._norm(self._names.final_norm, self._config.hidden_size)

    def head(self) -> Linear | None:
        """The layer from hidden states to logits; None if the model has none."""
        if self._config.head != "tokens":
            return None
        if not self._config.is_tied and self._scheme(self._names.head) is not None:
            return self._linear(self._stored.head())
        name = self._names.embedding if self._config.is_tied else self._names.head
        return self._backend.make_linear(self._vocabulary(name), None)

    def layer(self, index: int) -> Layer:
        names, stored, widths = self._names, self._stored.layer(index), self._config.qk_norm_widths(index)
        prefix = names.layer.format(index)
        spec, qk_norms = self._config.layers[index], None
        recurrent = None if spec.recurrence is None else self._recurrent(prefix, spec.recurrence)
        if widths is not None and spec.attends:
            q_norm, k_norm = (name and prefix + name for name in (names.q_norm, names.k_norm))
            own = k_norm if spec.kv_owner is None else q_norm  # keys of another layer have their norm
            qk_norms = self._norm(q_norm, widths[0]), self._norm(own, widths[1])
        norms: dict[str, Norm | None] = dict.fromkeys(LAYER_NORMS)
        for norm, name in self._layer_norms(spec).items():
            norms[norm] = self._norm(prefix + name, self._config.hidden_size)
        beside = None
        if recurrent is not None and spec.attends:
            beside = Beside(self._linear(stored["beside_qkv"]), recurrent, self._linear(stored["beside_o"]))
        return Layer(
            qkv=self._linear(stored["qkv"]) if "qkv" in stored else None,
            qk_norms=qk_norms,
            sinks=self._sinks(index),
            is_parallel=self._config.architecture.is_parallel,
            latents=self._latents(index, stored),
            o=self._linear(stored["o"]) if "o" in stored else None,
            feed_forward=self._feed_forward(spec, stored, prefix) if spec.inner else None,
            recurrent=recurrent if beside is None else None,
            beside=beside,
            per_layer=self.plain(self._config.per_layer_weights(index)),
            streams=self.plain(self._config.stream_weights(index)),
            laurel=self.plain(self._config.laurel(index)),
            experts_beside=self._experts_beside(spec, stored, prefix),
            value_norm=self._norm("", spec.heads.head_dim) if spec.has_value_norm else None,
            scale=self._scale(prefix) if names.layer_scale else 1.0,
            **norms,
        )

    def _scale(self, prefix: str) -> float:
        return float(self._checkpoint.tensor(prefix + self._names.layer_scale, (1,), torch.float32))

    def plain(self, part: PlainPart[Part] | None) -> Part | None:
        """A part of the model; None: it has none."""
        if part is None:
            return None
        linears = {field: self._linear(stored_plain(*linear)) for field, linear in part.linears.items()}
        norms = {field: self._norm(*norm) for field, norm in part.norms.items()}
        tensors = {
            field: self._placed(self._checkpoint.tensor(name, shape, dtype or self._dtype))
            for field, (name, shape, dtype) in part.tensors.items()
        }
        return part.make(**linears, **norms, **tensors)

    def _plain_names(self, part: PlainPart[Any]) -> list[str]:
        """The tensors of a part."""
        linears = [name for linear in part.linears.values() for name in self._weight_names(stored_plain(*linear))]
        norms = [f"{name}.weight" for name, _ in part.norms.values()]
        return [*linears, *norms, *(name for name, _, _ in part.tensors.values())]

    def _layer_norms(self, spec: LayerSpec) -> dict[str, str]:
        """The names of a layer's norms."""
        is_lacking = {LAYER_NORMS[:2]: not spec.has_mixer, LAYER_NORMS[2:]: not spec.inner}
        lacking = {norm for norms, is_one in is_lacking.items() if is_one for norm in norms}
        return {norm: name for norm, name in self._names.layer_norms().items() if norm not in lacking}

    def _recurrent(self, prefix: str, spec: Recurrence) -> RecurrentWeights:
        names = present(self._names.recurrent)

        def floats(name: str, *shape: int) -> torch.Tensor | None:
            return self._placed(self._checkpoint.tensor(prefix + name, shape, torch.float32)) if name else None

        conv = self._checkpoint.tensor(f"{prefix}{names.conv}.weight", (spec.channels, 1, spec.kernel), torch.float32)
        is_shared = spec.kind == "gated_delta"
        has_norm = names.norm and spec.has_norm
        norm = floats(f"{names.norm}.weight" if has_norm else "", spec.norm_width if is_shared else spec.num_values)
        decay, order = floats(names.decay, spec.num_heads), conv_order(names, spec)
        bias = floats(f"{names.conv}.bias" if spec.has_conv_bias else "", spec.channels)
        return RecurrentWeights(
            self._placed(conv[order, 0].T.contiguous()),
            None if bias is None else bias[order],
            None if decay is None else -exact_ops.exp(decay),
            floats(names.step_bias, spec.num_heads),
            floats(names.skip, spec.num_heads),
            norm,
        )

    def _recurrent_names(self, prefix: str, spec: Recurrence) -> list[str]:
        """The tensors of a recurrent layer besides its linear layers."""
        names = present(self._names.recurrent)
        found = [f"{names.conv}.weight", names.step_bias, names.decay, names.skip]
        found += [f"{names.conv}.bias"] if spec.has_conv_bias else []
        found += [f"{names.norm}.weight"] if names.norm and spec.has_norm else []
        return [prefix + name for name in found if name]

    def _latents(self, index: int, stored: dict[str, Stored]) -> LatentAttention | None:
        spec, prefix = self._config.layers[index].latents, self._names.layer.format(index)
        if spec is None:
            return None
        shape, query_norm = spec.shape, None
        if spec.query_rank is not None:
            query_norm = self._latent_norm(prefix + latents.QUERY_NORM, spec.query_rank)
        up = stored["latent_up"]
        weight = self._placed(self._weight(up.names[0], up, up.roles).to(self._dtype))
        heads = [torch.split(head, [shape.key_dim, shape.value_dim]) for head in weight.chunk(shape.num_heads)]
        return LatentAttention(
            shape,
            query_norm,
            None if query_norm is None else self._linear(stored["query_up"]),
            self._latent_norm(prefix + latents.NORM, shape.rank),
            [self._backend.make_linear(key.T.contiguous(), None) for key, _ in heads],
            [self._backend.make_linear(value.contiguous(), None) for _, value in heads],
        )

    def _latent_norm(self, name: str, size: int) -> Norm:
        return replace(self._norm(name, size), eps=latents.NORM_EPS)

    def norm(self, name: str) -> Norm:
        """A norm of hidden states."""
        return self._norm(name, self._config.hidden_size)

    def projection(self, name: str, num_inputs: int) -> Linear:
        """A linear layer to hidden states."""
        return self._linear(Stored((name,), (("o", self._config.hidden_size),), num_inputs, has_bias=False))

    def modules(self) -> dict[str, Module]:
        """The linear layers that adapters may change, by name."""
        stored = [self._stored.layer(index) for index in range(self._config.num_layers)]
        for sites, spec in zip(stored, self._config.layers, strict=True):
            if spec.recurrence is not None and not spec.attends:  # adapters of recurrent layers are not computed
                del sites["qkv"], sites["o"]
            for site in [site for site, linear in sites.items() if linear.order is not None or linear.factors]:
                del sites[site]
        return modules_of(stored)

    def _feed_forward(self, spec: LayerSpec, stored: dict[str, Stored], prefix: str) -> FeedForward | RoutedExperts:
        if spec.experts is None or spec.dense_inner:
            return FeedForward(self._linear(stored["gate_up"]), self._linear(stored["down"]))
        return self._routed(spec, spec.experts, stored, prefix)

    def _routed(self, spec: LayerSpec, experts: Experts, stored: dict[str, Stored], prefix: str) -> RoutedExperts:
        gate_up, down = [], []
        for expert in range(len(spec.expert_widths())):
            gate_up.append(self._linear(stored[f"gate_up{expert}"]))
            down.append(self._linear(stored[f"down{expert}"]))
        routing, correction = experts.routing, self._correction(experts, prefix)
        linears = ExpertLinears(gate_up, down, routing, correction, is_gated=self._config.is_gated)
        return RoutedExperts(self._router(routing, stored["router"]), linears)

    def _experts_beside(self, spec: LayerSpec, stored: dict[str, Stored], prefix: str) -> ExpertsBeside | None:
        if spec.experts is None or not spec.dense_inner:
            return None
        routed, hidden = self._routed(spec, spec.experts, stored, prefix), self._config.hidden_size
        scale, scales = (
            self._placed(self._checkpoint.tensor(*tensor)) for tensor in self._scales(spec.experts, prefix)
        )
        norm, output_norm, dense_output_norm = (self._norm(prefix + name, hidden) for name in BESIDE_NORMS)
        # The router's norm has no weights, but a scale
        router_norm = Norm(scale * hidden**-0.5, None, self._config.norm_eps, self._config.norm)
        experts = replace(routed, experts=replace(routed.experts, scales=scales), router_norm=router_norm)
        return ExpertsBeside(experts, norm, output_norm, dense_output_norm)

    def _scales(self, experts: Experts, prefix: str) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Names, shapes and types: of the state that a router beside a dense part reads, and of shares."""
        sizes = (self._config.hidden_size,), (experts.routing.num_experts,)
        return [
            (f"{prefix}router.scale", sizes[0], self._dtype),
            (f"{prefix}router.per_expert_scale", sizes[1], torch.float32),
        ]

    def _sinks(self, index: int) -> torch.Tensor | None:
        if not self._names.sinks:
            return None
        name = self._names.layer.format(index) + self._names.sinks
        sinks = self._checkpoint.tensor(name, (self._config.layers[index].heads.num_q_heads,), torch.float32)
        return self._placed(self._part("q", sinks))

    def _router(self, routing: Routing, stored: Stored) -> Linear:
        if not routing.is_float32:
            return self._linear(stored)
        weights = [self._weight(name, stored, roles).float() for name, roles in stored.tensors()]
        return self._backend.make_linear(self._placed(torch.cat(weights)), None)

    def _placed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers, where the model computes."""
        return numbers

    def _correction(self, experts: Experts, prefix: str) -> torch.Tensor | None:
        if not experts.has_correction:
            return None
        name = prefix + self._names.correction
        shape = self._checkpoint.shape(name)
        correction = self._checkpoint.tensor(name, shape, torch.float32).flatten()
        if len(correction) != experts.routing.num_experts:
            raise CheckpointError(
                f"tensor {name} has shape {list(shape)}, but config.json requires {experts.routing.num_experts} numbers"
            )
        return self._placed(correction)

    def _expected_names(self) -> list[str]:
        names, linears = self._names, []
        norms = [names.final_norm]
        if not self._config.is_tied and self._config.head == "tokens":
            linears += self._weight_names(self._stored.head())
        if self._config.head == "classes":
            linears.append("score.weight")
        for index in range(self._config.num_layers):
            prefix = names.layer.format(index)
            layer = self._config.layers[index]
            norms += [prefix + name for name in self._layer_norms(layer).values()]
            if layer.recurrence is not None:
                linears += self._recurrent_names(prefix, layer.recurrence)
            latent = self._config.layers[index].latents
            if latent is not None:
                norms += [prefix + latents.NORM, *([prefix + latents.QUERY_NORM] if latent.query_rank else [])]
            if self._config.qk_norm_widths(index) is not None and layer.attends and names.q_norm:
                norms += [prefix + names.q_norm, *([] if layer.kv_owner is not None else [prefix + names.k_norm])]
            for stored in self._stored.layer(index).values():
                linears += self._weight_names(stored)
                linears += [self._bias_name(name, stored) for name in stored.names if stored.has_bias]
            if (experts := self._config.layers[index].experts) is not None and experts.has_correction:
                linears.append(prefix + names.correction)
            linears += [prefix + names.sinks] if names.sinks else []
            if layer.experts is not None and layer.dense_inner:
                norms += [prefix + name for name in BESIDE_NORMS]
                linears += [name for name, _, _ in self._scales(layer.experts, prefix)]
            linears += [prefix + names.layer_scale] if names.layer_scale else []
            linears += [name for part in self._config.plain_parts(index) for name in self._plain_names(part)]
        tables = [names.embedding, names.position_embedding]
        linears += [name for part in self._config.plain_tables() for name in self._plain_names(part)]
        expected = [f"{name}.weight" for name in (*tables, *norms) if name] + linears
        has_bias = self._config.norm == "layer" and self._config.architecture.has_norm_bias
        return expected + [f"{name}.bias" for name in norms if has_bias]

    def _linear(self, stored: Stored) -> Linear:
        rows, bias = self._int8_rows(stored), self._bias(stored)
        if rows is not None and isinstance(self._backend, Int8LinearMaker):
            return self._backend.make_int8_linear(rows, bias)
        packed = self._four_bit_rows(stored)
        if packed is not None and isinstance(self._backend, FourBitLinearMaker):
            linear = self._backend.make_four_bit_linear(packed, bias)
            if linear is not None:
                return linear
        weights = []
        for name, roles in stored.tensors():
            weights += self._parts(roles, self._weight(name, stored, roles))
        joined = self._join_in_scratch(weights) if self._backend.copies_weights else self._join(weights)
        joined = in_factors(stored, joined)
        return self._backend.make_linear(joined if stored.order is None else joined[stored.order], bias)

    def _bias(self, stored: Stored) -> torch.Tensor | None:
        if not stored.has_bias:
            return None
        biases = []
        for name, roles in stored.tensors():
            biases += self._parts(roles, self._bias_of(name, stored, roles))
        return self._join(biases) if stored.order is None else self._join(biases)[stored.order]

    def _parts(self, roles: tuple[tuple[Role, int], ...], tensor: torch.Tensor) -> list[torch.Tensor]:
        """The part of each role that is kept, of a tensor with the outputs of `roles`."""
        split = torch.split(tensor, [size for _, size in roles])
        return [self._part(role, part) for (role, _), part in zip(roles, split, strict=True)]

    def _int8_rows(self, stored: Stored) -> Int8Rows | None:
        """The stored values, if the int8 kernel computes what they were quantized for."""
        if not isinstance(self._backend, Int8LinearMaker) or stored.in_features > MAX_INT8_INPUTS or stored.factors:
            return None
        rows = []
        for name, roles in stored.tensors():
            scheme = self._scheme(name)
            if not isinstance(scheme, Scaled) or not scheme.has_int8_rows:
                return None
            rows.append(read_int8_rows(self._checkpoint, name, scheme, stored.shape(roles)))
        steps, scales = torch.cat([part.steps for part in rows]), torch.cat([part.scales for part in rows])
        return Int8Rows(steps, scales) if stored.order is None else Int8Rows(steps[stored.order], scales[stored.order])

    def _four_bit_rows(self, stored: Stored) -> FourBitRows | None:
        """The stored values, if all tensors of a layer are in 4 bits with the same groups."""
        if not isinstance(self._backend, FourBitLinearMaker) or stored.factors:
            return None
        schemes = {self._scheme(name) for name in stored.names}
        scheme = next(iter(schemes))
        if isinstance(scheme, Mxfp4):
            return self._mxfp4_rows(stored, scheme)
        if len(schemes) > 1 or not isinstance(scheme, Packed) or scheme.bits != FOUR_BITS:
            return None
        tensors = stored.tensors()
        rows = [read_int4_rows(self._checkpoint, name, scheme, stored.shape(roles)) for name, roles in tensors]
        found = four_bit_rows(rows, scheme.group or stored.in_features)
        return found if found is None or stored.order is None else found.of_outputs(stored.order)

    def _mxfp4_rows(self, stored: Stored, scheme: Mxfp4) -> FourBitRows | None:
        """The stored values of one expert; None if it is not one of a stack."""
        ((name, roles),) = stored.tensors()
        if stored.expert is None:
            return None
        shape = (self._num_experts(), *stored.shape(roles))
        rows = fp4_rows(*read_mxfp4(self._checkpoint, name, scheme, shape, stored.expert))
        return rows.of_outputs(self._in_halves(name, torch.arange(shape[1])))

    def _num_experts(self) -> int:
        return next(layer.experts.routing.num_experts for layer in self._config.layers if layer.experts is not None)

    def _scheme(self, name: str) -> Scheme | None:
        """How a linear layer is stored. None: in a float type."""
        quantization = self._config.quantization
        scheme = None if quantization is None else quantization.scheme_of(name)
        # config.json does not list all layers that are left in a float type, e.g. heads and routers
        is_float = self._checkpoint.has_float(f"{name}.weight") or self._checkpoint.has_float(name)
        return None if scheme is None or is_float else scheme

    def _weight(self, name: str, stored: Stored, roles: tuple[tuple[Role, int], ...]) -> torch.Tensor:
        """The weight [out, in] of a linear layer."""
        scheme, shape = self._scheme(name), stored.shape(roles)
        if stored.expert is not None:
            return self._stacked_weight(name, scheme, shape, stored.expert)
        if scheme is None:
            return self._matrix(f"{name}.weight", shape)
        return read_weight(self._checkpoint, name, scheme, shape).to(self._dtype)

    def _stacked_weight(self, name: str, scheme: Scheme | None, shape: tuple[int, int], expert: int) -> torch.Tensor:
        """The weight [out, in] of one expert, with outputs in the order [gate | up]."""
        count = self._num_experts()
        if isinstance(scheme, Mxfp4):
            rows = fp4_rows(*read_mxfp4(self._checkpoint, name, scheme, (count, *shape), expert))
            weight = rows.widened().to(self._dtype)
        elif self._names.stacked_experts == "outputs_first":
            weight = self._checkpoint.tensor(name, (count, *shape), None)[expert]
        else:
            weight = self._checkpoint.tensor(name, (count, *shape[::-1]), None)[expert].T
        return self._in_halves(name, weight)

    def _in_halves(self, name: str, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [gate | up] of a stacked tensor that may have them in turns."""
        if not self._names.has_gates_in_turns or name.endswith(self._names.expert_linears[-1]):
            return outputs
        return torch.cat((outputs[::2], outputs[1::2]))

    def _bias_name(self, name: str, stored: Stored) -> str:
        return f"{name}.bias" if stored.expert is None else f"{name}_bias"

    def _bias_of(self, name: str, stored: Stored, roles: tuple[tuple[Role, int], ...]) -> torch.Tensor:
        (size, _), bias_name = stored.shape(roles), self._bias_name(name, stored)
        if stored.expert is None:
            return self._checkpoint.tensor(bias_name, (size,), None)
        count = self._checkpoint.shape(bias_name)[0]
        return self._in_halves(name, self._checkpoint.tensor(bias_name, (count, size), None)[stored.expert])

    def _weight_names(self, stored: Stored) -> list[str]:
        """The tensors of the weights of a linear layer."""
        found = []
        for name, roles in stored.tensors():
            scheme = self._scheme(name)
            if stored.expert is not None:
                found += [name] if scheme is None else [f"{name}_{part}" for part in scheme.parts(*stored.shape(roles))]
                continue
            suffixes = ["weight"] if scheme is None else list(scheme.parts(*stored.shape(roles)))
            found += [f"{name}.{suffix}" for suffix in suffixes]
        return found

    def _matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A weight [out, in], memory-mapped."""
        if not self._names.is_transposed:
            return self._checkpoint.tensor(name, shape, None)
        return self._checkpoint.tensor(name, shape[::-1], None).T

    def _norm(self, name: str, size: int) -> Norm:
        bias = None
        if not name:  # a norm without weights
            return Norm(
                self._placed(torch.ones(size, dtype=self._dtype)), bias, self._config.norm_eps, self._config.norm
            )
        weight = self._join([self._checkpoint.tensor(f"{name}.weight", (size,), None)])
        if self._config.norm == "layer":
            has_bias = self._config.architecture.has_norm_bias
            bias = self._join([self._checkpoint.tensor(f"{name}.bias", (size,), None)]) if has_bias else weight * 0
        return Norm(weight, bias, self._config.norm_eps, self._config.norm)

    def _vocabulary(self, name: str) -> torch.Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._join([self._checkpoint.tensor(f"{name}.weight", shape, None)])

    def _part(self, role: Role, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that is kept."""
        return tensor

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The rows of `parts` in the dtype of the engine."""
        if len(parts) == 1:
            return parts[0].to(self._dtype)
        return torch.cat([part.to(self._dtype) for part in parts])

    def _join_in_scratch(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """As `_join`, in memory that the next call overwrites: new pages cost more than the copy."""
        if len(parts) == 1:
            return self._join(parts)
        shape = sum(len(part) for part in parts), parts[0].shape[1]
        if self._scratch.numel() < math.prod(shape):
            self._scratch = torch.empty(math.prod(shape), dtype=self._dtype)
        joined = self._scratch[: math.prod(shape)].view(shape)
        return torch.cat([part.to(self._dtype) for part in parts], out=joined)
