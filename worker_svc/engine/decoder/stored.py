"""Where a checkpoint has the linear layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from worker_svc.engine.backend import HeadShape, Routing
from worker_svc.engine.checkpoint.architecture import RecurrentNames, Role
from worker_svc.engine.checkpoint.tensors import Checkpoint, View
from worker_svc.engine.decoder import latents
from worker_svc.engine.decoder.config import LatentSpec, LayerSpec, ModelConfig
from worker_svc.engine.recurrent import Recurrence


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one linear layer in a checkpoint: each has the outputs of one role, or a single one of all."""

    names: tuple[str, ...]
    roles: tuple[tuple[Role, int], ...]  # with the number of outputs
    in_features: int
    has_bias: bool
    order: torch.Tensor | None = None  # of the outputs, if the forward pass has another one
    expert: int | None = None  # the tensors hold the layers of all experts, and this is one of them
    factors: tuple[float, ...] = ()  # of the outputs of each role, multiplied into weights

    def shape(self, roles: tuple[tuple[Role, int], ...]) -> tuple[int, int]:
        """The shape [out, in] of a tensor with the outputs of `roles`."""
        return sum(size for _, size in roles), self.in_features

    def tensors(self) -> Iterator[tuple[str, tuple[tuple[Role, int], ...]]]:
        """Names, each with its roles."""
        if len(self.names) == 1:
            yield self.names[0], self.roles
        else:
            yield from ((name, (role,)) for name, role in zip(self.names, self.roles, strict=True))


def stored_plain(name: str, outputs: int, inputs: int) -> Stored:
    return Stored((name,), (("o", outputs),), inputs, has_bias=False)


def _gates_last(heads: HeadShape) -> torch.Tensor:
    """[q | gate] of each head, k, v become q, k, v, gate."""
    q_size, kv_size = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    q, gate = torch.arange(2 * q_size).view(-1, 2, heads.head_dim).unbind(1)
    return torch.cat((q.flatten(), torch.arange(2 * q_size, 2 * q_size + 2 * kv_size), gate.flatten()))


def present(names: RecurrentNames | None) -> RecurrentNames:
    if names is None:
        raise RuntimeError("an architecture with recurrent layers does not name their tensors: a bug in its row")
    return names


def _recurrent_linears(prefix: str, names: RecurrentNames, spec: Recurrence, hidden: int) -> dict[str, Stored]:
    """The projections of a recurrent layer, and the layer of its outputs."""
    sizes, order = _projections(names, spec)
    roles: tuple[tuple[Role, int], ...] = tuple(("state", size) for size in sizes)
    has_bias = spec.has_projection_bias
    inputs = Stored(tuple(prefix + name for name in names.inputs), roles, hidden, has_bias=has_bias, order=order)
    out = Stored((prefix + names.out,), (("o", hidden),), spec.num_values, has_bias=has_bias)
    return {"qkv": inputs, "o": out}


def _projections(names: RecurrentNames, spec: Recurrence) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """The widths of the stored projections, and their order if it is not [q | k | v | z | b | a]."""
    if spec.kind == "short_conv":
        return (spec.width,), None
    if names.layout == "mamba":
        z, rest = torch.arange(spec.num_values), spec.num_values + conv_order(names, spec)
        steps, keys = torch.arange(spec.width - spec.num_heads, spec.width), spec.num_key_heads * spec.key_dim
        return (spec.num_values, spec.num_values, keys, keys, spec.num_heads), torch.cat((rest, z, steps))
    if names.layout == "by_key_head":
        groups = spec.num_key_heads
        parts = [spec.num_key_heads * spec.key_dim] * 2 + [spec.num_values] * 2, [spec.num_heads] * 2
        first = sum(parts[0])
        orders = [*_ungrouped(parts[0], groups, 0), *_ungrouped(parts[1], groups, first)]
        return (first, sum(parts[1])), torch.cat(orders)
    return (spec.channels, spec.num_values, spec.num_heads, spec.num_heads), None


def conv_order(names: RecurrentNames, spec: Recurrence) -> torch.Tensor:
    """The channels [q | k | v] of the convolution, as they are stored."""
    channels = torch.arange(spec.channels)
    if names.layout != "mamba":
        return channels
    keys = spec.num_key_heads * spec.key_dim
    v, k, q = torch.split(channels, [spec.num_values, keys, keys])
    return torch.cat((q, k, v))


def _ungrouped(sizes: list[int], num_groups: int, first: int) -> list[torch.Tensor]:
    """The indices of parts, of which each group has an equal share."""
    indices = torch.arange(first, first + sum(sizes)).view(num_groups, -1)
    return [part.flatten() for part in torch.split(indices, [size // num_groups for size in sizes], dim=1)]


class StoredLayers:
    """The linear layers of a model by layer."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._names = config.names

    def expert_views(self, checkpoint: Checkpoint) -> dict[str, View]:
        """The experts by the row's names, where a checkpoint has those of a layer in one tensor [experts, out, in], as
        in transformers. Raises CheckpointError for another shape."""
        names, hidden = self._names, self._config.hidden_size
        views: dict[str, View] = {}
        *gates, down = names.expert_linears
        joined = "gate_up_proj" if len(gates) > 1 else gates[0]
        for index, layer in enumerate(self._config.layers):
            prefix = names.layer.format(index)
            for stack in (prefix + names.experts.partition("{}")[0], f"{prefix}mlp.experts."):
                if layer.experts is None or names.stacked_experts or not checkpoint.has(stack + joined):
                    continue
                count, width = layer.experts.routing.num_experts, layer.inner
                checkpoint.tensor(stack + joined, (count, len(gates) * width, hidden), None)
                checkpoint.tensor(f"{stack}down_proj", (count, hidden, width), None)
                for expert in range(count):
                    own = prefix + names.experts.format(expert)
                    for i, gate in enumerate(gates):
                        rows = slice(i * width, (i + 1) * width)
                        views[f"{own}{gate}.weight"] = f"{stack}{joined}", (expert, rows)
                    views[f"{own}{down}.weight"] = f"{stack}down_proj", (expert,)
        return views

    def head(self) -> Stored:
        """The layer from hidden states to logits."""
        return Stored(
            (self._names.head,), (("head", self._config.vocab_size),), self._config.hidden_size, has_bias=False
        )

    def layer(self, index: int) -> dict[str, Stored]:
        """The linear layers of a layer by name."""
        config, names, spec = self._config, self._names, self._config.layers[index]
        prefix = names.layer.format(index)
        found = self._attention(spec, prefix) if spec.attends else {}
        if spec.recurrence is not None:
            sides = _recurrent_linears(prefix, present(names.recurrent), spec.recurrence, config.hidden_size)
            found |= {f"beside_{side}": linear for side, linear in sides.items()} if spec.attends else sides
        inner = spec.inner if spec.experts is None else spec.dense_inner
        if inner:
            found |= self._feed_forward((*names.gate_up, *names.down), prefix, inner, has_bias=config.has_mlp_bias)
        for name, factors in (config.factors or {}).items():
            found[name] = replace(found[name], factors=factors)
        return found if spec.experts is None else found | self._experts(spec, spec.experts.routing, prefix)

    def _feed_forward(self, linears: tuple[str, ...], prefix: str, width: int, *, has_bias: bool) -> dict[str, Stored]:
        """The linear layers of a feed-forward part, whose names are `linears`."""
        *gate_up, down = (prefix + name for name in linears)
        hidden = self._config.hidden_size
        gates: tuple[tuple[Role, int], ...] = (
            (("gate", width), ("up", width)) if self._config.is_gated else (("up", width),)
        )
        return {
            "gate_up": Stored(tuple(gate_up), gates, hidden, has_bias),
            "down": Stored((down,), (("down", hidden),), width, has_bias),
        }

    def _experts(self, spec: LayerSpec, routing: Routing, prefix: str) -> dict[str, Stored]:
        """The router, and the linear layers of each expert."""
        names, has_bias = self._names, self._config.architecture.has_expert_bias
        routers: tuple[tuple[Role, int], ...] = (("router", routing.num_experts), ("router", 1))
        count = 2 if routing.shared == "gated" else 1
        routed = tuple(prefix + name for name in (names.router, names.shared_gate)[:count])
        found = {"router": Stored(routed, routers[:count], self._config.hidden_size, has_bias)}
        for expert, width in enumerate(spec.expert_widths()):
            is_shared = expert == routing.num_experts
            of_expert = prefix + (names.shared if is_shared else names.experts.format(expert))
            linears = names.shared_linears if is_shared else names.expert_linears
            index_in_stack = expert if names.stacked_experts and not is_shared else None
            sides = self._feed_forward(linears, of_expert, width, has_bias=has_bias)
            found |= {f"{side}{expert}": replace(linear, expert=index_in_stack) for side, linear in sides.items()}
        return found

    def _attention(self, spec: LayerSpec, prefix: str) -> dict[str, Stored]:
        """The linear layers of attention."""
        config, names, heads, hidden = self._config, self._names, spec.heads, self._config.hidden_size
        q_size, kv_size = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        heads_of: tuple[tuple[Role, int], ...] = (("q", q_size), ("k", kv_size), ("v", kv_size))
        if spec.has_output_gate:
            heads_of = (("q", 2 * q_size), *heads_of[1:])
        order = _gates_last(heads) if spec.has_output_gate else None
        if spec.kv_owner is not None:
            heads_of = heads_of[:1]
        elif spec.has_one_key_value:
            heads_of, keys = heads_of[:2], torch.arange(q_size, q_size + kv_size)
            order = torch.cat((torch.arange(q_size), keys, keys))
        if spec.latents is not None:
            found = self._latents(spec.latents, prefix)
            q_size = spec.latents.shape.num_heads * spec.latents.shape.value_dim
        else:
            qkv_names = names.qkv if len(names.qkv) == 1 else names.qkv[: len(heads_of)]
            qkv = tuple(prefix + name for name in qkv_names)
            found = {"qkv": Stored(qkv, heads_of, hidden, config.has_qkv_bias, order)}
        o = tuple(prefix + name for name in names.o)
        return found | {"o": Stored(o, (("o", hidden),), q_size, config.has_o_bias)}

    def _latents(self, spec: LatentSpec, prefix: str) -> dict[str, Stored]:
        """The linear layers of latent attention up to the heads."""
        shape, hidden = spec.shape, self._config.hidden_size
        first = latents.QUERY if spec.query_rank is None else latents.QUERY_DOWN
        joined: tuple[tuple[Role, int], ...] = (("q", spec.first_outputs), ("latent", shape.rank + shape.rope_dim))
        names = prefix + first, prefix + latents.DOWN
        found = {"qkv": Stored(names, joined, hidden, self._config.has_qkv_bias)}
        up: tuple[tuple[Role, int], ...] = (("latent", shape.num_heads * (shape.key_dim + shape.value_dim)),)
        found["latent_up"] = Stored((prefix + latents.UP,), up, shape.rank, has_bias=False)
        if spec.query_rank is not None:
            queries: tuple[tuple[Role, int], ...] = (("q", shape.num_heads * shape.query_dim),)
            found["query_up"] = Stored((prefix + latents.QUERY_UP,), queries, spec.query_rank, has_bias=False)
        return found
