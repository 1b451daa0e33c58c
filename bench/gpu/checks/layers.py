"""Cases of a layer's kernels around attention: linear, norm, rotation with the store of keys and values, activation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.backend import Norm, QkvPart, RotaryTable
from worker_svc.engine.cpu.torch_ops import split_heads
from worker_svc.engine.gpu.kernels import activation, fp8, norm, rope_store
from worker_svc.engine.gpu.kernels.linears import linear

NUM_ROWS = 3
LINEAR_ROWS = linear.TILE.rows + 1  # two tiles; the second has one row
POSITIONS = (0, 1, 77, 300)
PADDING = -1  # a token without a slot


def linear_cases(setup: Setup) -> Iterator[Case]:
    """Cases of linear layers, in exact mode only: otherwise cuBLAS computes them. Each has all inputs of a weight and
    three tiles of its outputs; the last tile has the width of the last tile of the weight."""
    if not setup.is_exact:
        return
    model, heads = setup.model, setup.model.heads
    q_size, kv_size = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    shapes = {
        (model.hidden_size, q_size + 2 * kv_size, model.has_qkv_bias),
        (q_size, model.hidden_size, model.has_o_bias),
        (model.hidden_size, model.widest_inner * (2 if model.is_gated else 1), model.has_mlp_bias),
        (model.widest_inner, model.hidden_size, model.has_mlp_bias),
        (model.hidden_size, len(setup.group.vocab_part(setup.vocab_size)), False),
    }
    tiles = 2 * linear.TILE.columns
    cut = {(size, min(out, tiles + out % linear.TILE.columns), has_bias) for size, out, has_bias in shapes}
    for in_size, out_size, has_bias in sorted(cut):
        yield _linear_case(setup, in_size, out_size, has_bias=has_bias)


def _linear_case(setup: Setup, in_size: int, out_size: int, *, has_bias: bool) -> Case:
    x, weight = setup.random(LINEAR_ROWS, in_size), setup.random(out_size, in_size, seed=1)
    bias = setup.random(out_size, seed=2) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return Case(
        "linear",
        f"[{LINEAR_ROWS}, {in_size}] x [{in_size}, {out_size}] {'with' if has_bias else 'without'} bias, {setup.dtype}",
        range(LINEAR_ROWS + 1),
        lambda first, last: {"output": linear.linear(x[first:last].clone(), weight, bias)},
        {"output": expected},
        {"output": TOLERANCES[setup.dtype]},
    )


def norm_cases(setup: Setup) -> Iterator[Case]:
    """A norm with a residual and one without."""
    dim = setup.model.hidden_size
    x, residual = (setup.random(NUM_ROWS, dim, seed=i) for i in range(2))
    chosen = _random_norm(setup, dim, seed=2)
    for added in (None, residual):
        total, normed = norm.reference(x, added, chosen)
        yield Case(
            "norm",
            f"{chosen.kind}, [{NUM_ROWS}, {dim}] {'without' if added is None else 'with'} residual, {setup.dtype}",
            range(NUM_ROWS + 1),
            partial(_norm, x, added, chosen),
            {"residual": total, "output": normed},
            {"output": TOLERANCES[setup.dtype]},
        )


def _random_norm(setup: Setup, dim: int, *, seed: int) -> Norm:
    """A norm of the model's kind."""
    kind = setup.model.norm
    bias = setup.random(dim, seed=seed + 1) if kind == "layer" else None
    weight = 0.2 * setup.random(dim, seed=seed) + (0.0 if kind == "rms_offset" else 1.0)
    return Norm(weight, bias, setup.model.norm_eps, kind)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, chosen: Norm, first: int, last: int) -> Outputs:
    total = x[first:last].clone()
    out = torch.full_like(total, torch.nan)
    norm.add_norm(total, None if residual is None else residual[first:last].clone(), chosen, out)
    return {"residual": total, "output": out}


def activation_cases(setup: Setup) -> Iterator[Case]:
    """The activation that the model uses."""
    dim, name = setup.model.widest_inner, setup.model.activation
    if not setup.model.is_gated:
        yield _plain_activation_case(setup, 3 * setup.random(NUM_ROWS, dim), name)
        return
    gate_up = (6 if name == "clamped_swiglu" else 3) * setup.random(NUM_ROWS, 2 * dim)  # also beyond its limits

    def run(first: int, last: int) -> Outputs:
        out = gate_up.new_full((last - first, dim), torch.nan)
        activation.gated_activation(gate_up[first:last].clone(), out, name)
        return {"output": out}

    yield Case(
        "gated_activation",
        f"{name}, [{NUM_ROWS}, 2 x {dim}], {setup.dtype}",
        range(NUM_ROWS + 1),
        run,
        {"output": activation.reference(gate_up, name)},
        {"output": TOLERANCES[setup.dtype]},
    )


def _plain_activation_case(setup: Setup, x: torch.Tensor, name: str) -> Case:
    def run(first: int, last: int) -> Outputs:
        out = x[first:last].clone()
        activation.activate(out, name)
        return {"output": out}

    return Case(
        "activation",
        f"{name}, {list(x.shape)}, {setup.dtype}",
        range(NUM_ROWS + 1),
        run,
        {"output": activation.reference_activate(x, name)},
        {"output": TOLERANCES[setup.dtype]},
    )


def soft_cap_cases(setup: Setup) -> Iterator[Case]:
    """The soft cap of logits, if the model has one."""
    cap = setup.model.logit_soft_cap
    if cap is None:
        return
    x = 2 * cap * setup.random(NUM_ROWS, len(setup.group.vocab_part(setup.vocab_size)))

    def run(first: int, last: int) -> Outputs:
        out = x[first:last].clone()
        activation.soft_cap(out, cap)
        return {"output": out}

    expected = {"output": cap * torch.tanh(x.float() / cap)}
    inputs = f"cap {cap}, {list(x.shape)}, {setup.dtype}"
    yield Case("soft_cap", inputs, range(NUM_ROWS + 1), run, expected, {"output": TOLERANCES[setup.dtype]})


def rope_store_cases(setup: Setup) -> Iterator[Case]:
    """Includes the norms of queries and keys if the model has them, and rounding to fp8 if the cache is fp8."""
    heads, count = setup.model.heads, len(POSITIONS)
    qkv = setup.random(count, (heads.num_q_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    norms, rotary, positions = _qk_norms(setup), _rotary(setup), setup.ints(*POSITIONS)
    q, *stored = split_heads(qkv, QkvPart(heads, rotary, norms), positions)
    scales = None
    if setup.has_scaled_cache:
        scales = 2.0 ** (torch.arange(2 * heads.num_kv_heads, device=setup.device).view(2, -1) % 3 - 1.0)
        stored = [fp8.reference(x, scale[:, None]) for x, scale in zip(stored, scales, strict=True)]
    keys, values = (torch.cat((x[:-1], torch.zeros_like(x[:1]))) for x in stored)  # the last token is padding

    def run(first: int, last: int) -> Outputs:
        pools = _Pools(setup, keys.dtype)
        out = qkv.new_full((last - first, heads.num_q_heads, heads.head_dim), torch.nan)
        rope_store.rope_store(
            qkv[first:last].clone(), norms, rotary, positions[first:last].clone(), pools.slots[first:last].clone(),
            pools.served, out, heads, scales,
        )  # fmt: skip
        return {"queries": out, **pools.read(first, last)}

    yield Case(
        "rope_store",
        f"{count} tokens, {heads.num_q_heads} query heads, {heads.num_kv_heads} KV heads, head_dim {heads.head_dim}, "
        f"{'with' if norms else 'without'} norms, {setup.dtype}, block_size {setup.block_size}, cache {keys.dtype}",
        range(count + 1),
        run,
        {"queries": q, "keys": keys, "values": values, "stores outside the slots": torch.zeros(count)},
        {"queries": TOLERANCES[setup.dtype], "keys": TOLERANCES[keys.dtype]},
    )


def _qk_norms(setup: Setup) -> tuple[Norm, Norm] | None:
    widths = setup.model.qk_norm_widths(0)
    return None if widths is None else (_random_norm(setup, widths[0], seed=1), _random_norm(setup, widths[1], seed=2))


def _rotary(setup: Setup) -> RotaryTable | None:
    if not setup.model.rotaries:
        return None
    table = setup.model.rotaries[0].table(max(POSITIONS) + 1)
    return RotaryTable(table.cos.to(setup.device), table.sin.to(setup.device))


class _Pools:
    """Empty pools of keys and values, with a block before and after them to which no slot refers."""

    NUM_BLOCKS = 3

    def __init__(self, setup: Setup, dtype: torch.dtype) -> None:
        heads, size = setup.model.heads, setup.block_size
        shape = (self.NUM_BLOCKS + 2, size, heads.num_kv_heads, heads.head_dim)
        self._all = [torch.zeros(shape, device=setup.device).to(dtype) for _ in range(2)]
        self._block_size = size
        self.served = self._all[0][1:-1], self._all[1][1:-1]
        # The last slot, one in the middle, the first of a block; and a token that is not stored.
        self.slots = setup.ints(self.NUM_BLOCKS * size - 1, size // 2, size, PADDING)

    def read(self, first: int, last: int) -> Outputs:
        """Keys and values of these tokens, and the number of values written elsewhere."""
        slots = self.slots[first:last].long() + self._block_size
        as_bytes = [pool.flatten(0, 1).view(torch.uint8) for pool in self._all]
        keys, values = (flat[slots].view(self._all[0].dtype) for flat in as_bytes)
        for flat in as_bytes:
            flat[slots[slots >= self._block_size]] = 0
        num_stray = sum(int(flat.count_nonzero()) for flat in as_bytes)
        return {"keys": keys, "values": values, "stores outside the slots": torch.full((last - first,), num_stray)}
