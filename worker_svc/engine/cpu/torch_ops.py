"""Operations of the decoder in torch, on any device. Their result for a row depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from worker_svc.engine.backend import (
    ExpertLinears,
    LatentAttention,
    LatentShape,
    LatentTokens,
    Norm,
    QkvPart,
    RotaryTable,
    Routing,
)  # fmt: skip
from worker_svc.engine.kernels import exact_ops

SMALLEST_SUM = 1e-20  # added to sums of shares, which may be 0 in float32
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


class Activations(Protocol):
    """The activations of a `Backend`."""

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None: ...

    def activation(self, x: torch.Tensor, activation: str) -> None: ...


def activated(backend: Activations, up: torch.Tensor, activation: str, *, is_gated: bool) -> torch.Tensor:
    """The activation of [gate | up], or of up alone, which is changed then."""
    if not is_gated:
        backend.activation(up, activation)
        return up
    out = up.new_empty(len(up), up.shape[1] // 2)
    backend.gated_activation(up, out, activation)
    return out


def experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: ExpertLinears,
    backend: Activations,
    activation: str,
    out: torch.Tensor,
) -> None:
    """`Backend.experts`, expert by expert."""
    routing = experts.routing
    shares, chosen = route(router_logits, routing, experts.correction)
    if experts.scales is not None:
        shares = shares * experts.scales[chosen]
    terms = x.new_zeros(*chosen.shape, out.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        if (linears := experts.pair(expert)) is None:
            continue
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        given = x[rows]
        if routing.scales_inputs:
            given = (given.float() * shares[rows, ranks, None]).to(x.dtype)
        up = activated(backend, linears[0](given), activation, is_gated=experts.is_gated)
        terms[rows, ranks] = linears[1](up)
    total = torch.zeros(out.shape, device=x.device)
    for rank in range(routing.num_used):
        term = terms[:, rank].float()
        total += term if routing.scales_inputs else term * shares[:, rank, None]
    out.copy_(total)


def route(
    router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares, float32 [n, num_used], and indices [n, num_used] of the experts of each token; see `Routing`."""
    logits = router_logits.float()[:, : routing.num_experts]
    scores = sigmoid(logits) if routing.is_sigmoid else exact_ops.exp(logits - logits.amax(-1, keepdim=True))
    ones = torch.ones(len(logits), 1, device=logits.device)
    total = ones if routing.is_sigmoid else exact_ops.ordered_sum(scores)
    keys = scores if correction is None else scores / total + correction
    keys = in_top_groups(keys, routing)
    chosen = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    top = scores.gather(1, chosen)
    shares = top / (exact_ops.ordered_sum(top) + SMALLEST_SUM if routing.is_normalized else total) * routing.scale
    if routing.shared == "none":
        return shares, chosen
    shared = sigmoid(router_logits[:, -1:].float()) if routing.shared == "gated" else ones
    last = torch.full_like(chosen[:, :1], routing.num_experts)
    return torch.cat((shares, shared), 1), torch.cat((chosen, last), 1)


def in_top_groups(keys: torch.Tensor, routing: Routing) -> torch.Tensor:
    """keys [n, num_experts], those outside of the best groups replaced by -inf."""
    if routing.num_groups == 1:
        return keys
    groups = keys.view(len(keys), routing.num_groups, -1)
    best = torch.sort(groups, dim=-1, descending=True, stable=True).values[..., : routing.group_best]
    order = torch.sort(exact_ops.ordered_sum(best)[..., 0], dim=-1, descending=True, stable=True).indices
    is_kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, order[:, : routing.top_groups], 1)
    return groups.masked_fill(~is_kept[..., None], -torch.inf).view_as(keys)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The logistic function of float32 x."""
    return 1.0 / (1.0 + exact_ops.exp(-x))


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`Backend.gated_activation` of float32 gate and up."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1.0) * (gate * sigmoid(SWIGLU_ALPHA * gate))


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of float32 x."""
    if activation == "silu":
        return x / (1.0 + exact_ops.exp(-x))
    if activation == "relu2":
        return x.clamp(min=0.0) ** 2
    if activation == "gelu_tanh":
        inner = 0.79788456080286536 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (exact_ops.exp(2.0 * inner) + 1.0))
    return 0.5 * x * (1.0 + exact_ops.erf(x * 0.70710678118654752))


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """`norm` of x [.., dim], in the dtype of x. None: x."""
    if norm is None:
        return x
    wide = x.float()
    if norm.kind == "layer":
        wide = wide - exact_ops.ordered_sum(wide) / x.shape[-1]
    scale = 1.0 / torch.sqrt(exact_ops.ordered_sum(wide * wide) / x.shape[-1] + norm.eps)
    if norm.kind == "rms":
        return (wide * scale).to(x.dtype) * norm.weight
    if norm.kind == "rms_offset":
        return (wide * scale * (1.0 + norm.weight.float())).to(x.dtype)
    bias = 0.0 if norm.bias is None else norm.bias.float()
    return (wide * scale * norm.weight.float() + bias).to(x.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 x."""
    return cap * (1.0 - 2.0 / (exact_ops.exp(2.0 / cap * x) + 1.0))


def gate_outputs(out: torch.Tensor, gate: torch.Tensor) -> None:
    """`Backend.gate_outputs`."""
    out.copy_(out.float() * sigmoid(gate.float()))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) of float32 x: max(x, 0) + 2 atanh(y / (2 + y)) for y = e^-|x|."""
    y = exact_ops.exp(-x.abs())
    z = y / (y + 2.0)
    square = z * z
    total = torch.full_like(z, 1 / 17)
    for odd in (15, 13, 11, 9, 7, 5, 3):
        total = total * square + 1 / odd
    return x.clamp_min(0.0) + 2.0 * (total * square * z + z)


Normed = Callable[[torch.Tensor, Norm | None], torch.Tensor]


def split_heads(
    qkv: torch.Tensor, part: QkvPart, positions: torch.Tensor, norm_of: Normed = normed
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [T, heads, dim] of qkv [T, heads * dim] as attention reads them."""
    shape, rotary = part.heads, part.rotary
    heads = [shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(positions), -1, shape.head_dim), heads, dim=1)
    q_norm, k_norm = part.norms or (None, None)
    positions = positions.long()
    q, k = (_norm_rotate(x, norm, rotary, positions, norm_of) for x, norm in ((q, q_norm), (k, k_norm)))
    if rotary is not None and rotary.q_scales is not None:
        q = (q.float() * rotary.q_scales[positions][:, None, None]).to(q.dtype)
    return q, k, v


def _norm_rotate(
    x: torch.Tensor, norm: Norm | None, rotary: RotaryTable | None, positions: torch.Tensor, norm_of: Normed
) -> torch.Tensor:
    """x [T, heads, dim] after norm and rotation, in the dtype of x."""

    def head_norm(x: torch.Tensor) -> torch.Tensor:  # a wide norm is one of all heads together
        return x if norm is None else norm_of(x.reshape(len(x), -1, len(norm.weight)), norm).view(x.shape)

    if rotary is None:
        return head_norm(x)
    if rotary.is_first:
        return head_norm(rotate(x, rotary, positions).to(x.dtype))
    return rotate(head_norm(x), rotary, positions).to(x.dtype)


def rotate(x: torch.Tensor, rotary: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] rotated, in float32."""
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    rest = 2 * cos.shape[-1]
    rotated = x[..., :rest].float()
    if rotary.is_interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, x[..., rest:].float()), dim=-1)


def latent_rope_store(
    tokens: LatentTokens,
    part: LatentAttention,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    """`Backend.latent_rope_store`. Tokens of slot -1 are not stored."""
    (q, latents, rotary), shape = tokens, part.shape
    used, is_stored = shape.rank + shape.rope_dim, slots >= 0
    rows = latents.new_zeros(len(latents), shape.width)
    rows[:, : shape.rank] = normed(latents[:, : shape.rank], part.norm)
    rows[:, shape.rank : used] = rotate(_paired(latents[:, None, shape.rank :], shape), rotary, positions)[:, 0]
    cache.view(-1, shape.width)[slots[is_stored].long()] = rows[is_stored]
    rotated = _paired(q.reshape(len(q), shape.num_heads, -1)[..., shape.key_dim :], shape)
    q_out[..., shape.rank : used] = rotate(rotated, rotary, positions)
    q_out[..., used:] = 0


def _paired(x: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """x with the two numbers of each rotated pair in its two halves."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1) if shape.is_interleaved else x
