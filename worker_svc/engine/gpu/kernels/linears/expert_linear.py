"""Products of tokens with the weights of their experts, and the sum of each token's experts.

A line of a tile is a pair of token and expert (route.py). Its result depends on nothing else, and a token's experts are
added in the order of their shares, so in exact mode, with one tile shape, no other token changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.gpu.kernels.activation import GATED, gated_of
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.linear import Tile
from worker_svc.engine.gpu.kernels.linears.scaled_linear import WIDEST_K, ScaledRows, depth_for
from worker_svc.engine.gpu.kernels.route import ExpertTiles, Routes

COLUMNS = 1024  # of a token that a program adds up


# A tile with gates has half the columns, because it multiplies by two weights.
EXACT = Tile(64, 128, 64)  # for every number of tokens
FEW_ROWS = Tile(16, 128, 64)  # the tensor cores' smallest tile: decode steps are limited by the weights
MANY_ROWS = Tile(128, 128, 64, num_warps=8, num_stages=3)
WIDE_NUMBERS = Tile(64, 64, 32, num_warps=8, num_stages=2)  # float32 on a GPU: see tiles.py


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One weight of all experts, in a float type or in fp8 as in Fp8Weight."""

    steps: torch.Tensor  # [num_experts, out, in]
    scales: torch.Tensor | None = None  # float32 [num_experts, groups, out]
    group: int = 0  # inputs that share a scale
    biases: torch.Tensor | None = None  # [num_experts, out]


@triton.jit(do_not_specialize=["num_pairs", "NUM_GROUPS"])
def expert_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, pair_ptr, tile_expert_ptr, num_tiles_ptr,
    num_pairs, N, K, NUM_GROUPS,
    PAIRS_PER_ROW: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Outputs of pairs [.., N]. GATED: weights [gate | up] give activation(gate) * up. GROUP 0: one scale for all
    inputs."""
    if PDL:
        after_predecessor()
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    pair = tl.load(pair_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    is_pair = pair < num_pairs
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    rows_of_weight = 2 * N if GATED else N
    x_ptrs = x_ptr + row * K + k[None, :]
    weight_ptrs = weight_ptr + (expert * rows_of_weight + column) * K + k[:, None]
    up_ptrs = weight_ptr + (expert * rows_of_weight + N + column) * K + k[:, None]
    scale_ptrs = scale_ptr + expert * NUM_GROUPS * rows_of_weight + column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        is_k = start + k < K
        x = tl.load(x_ptrs, mask=is_pair & is_k[None, :], other=0.0)
        is_weight = (column < N) & is_k[:, None]
        weight = tl.load(weight_ptrs, mask=is_weight, other=0.0)
        if GROUP > 0:
            group = start // GROUP
            x_scale = tl.load(x_scale_ptr + row * NUM_GROUPS + group, mask=is_pair, other=0.0)
            scale = tl.load(scale_ptrs + group * rows_of_weight, mask=column < N, other=0.0)
            total += tl.dot(x, weight) * (x_scale * scale)
        elif SCALED:
            total = tl.dot(x, weight, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(x, weight, total, input_precision="ieee")
        if GATED:
            up = tl.load(up_ptrs, mask=is_weight, other=0.0)
            if GROUP > 0:
                scale = tl.load(scale_ptrs + group * rows_of_weight + N, mask=column < N, other=0.0)
                up_total += tl.dot(x, up) * (x_scale * scale)
            elif SCALED:
                up_total = tl.dot(x, up, up_total, max_num_imprecise_acc=BLOCK_K)
            else:
                up_total = tl.dot(x, up, up_total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    if SCALED and GROUP == 0:
        x_scale = tl.load(x_scale_ptr + row, mask=is_pair, other=0.0)
        total *= x_scale * tl.load(scale_ptrs, mask=column < N, other=0.0)
        if GATED:
            up_total *= x_scale * tl.load(scale_ptrs + N, mask=column < N, other=0.0)
    if BIASED:
        bias_ptrs = bias_ptr + expert * rows_of_weight + column
        total += tl.load(bias_ptrs, mask=column < N, other=0.0).to(tl.float32)
        if GATED:
            up_total += tl.load(bias_ptrs + N, mask=column < N, other=0.0).to(tl.float32)
    if GATED:
        total = gated_of(total, up_total, KIND)
    target = out_ptr + pair.to(tl.int64) * N + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=is_pair & (column < N))


@triton.jit
def add_experts_kernel(
    term_ptr, share_ptr, shared_ptr, logits_ptr, out_ptr, N, GATE,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATE: the index of the logit behind those of the experts."""
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP_K):
        pair = row * TOP_K + rank
        term = tl.load(term_ptr + pair * N + column, mask=is_in, other=0.0).to(tl.float32)
        total += term * tl.load(share_ptr + pair)
    if SHARED:
        term = tl.load(shared_ptr + row * N + column, mask=is_in, other=0.0).to(tl.float32)
        if GATED:
            term /= 1.0 + tl.exp(-tl.load(logits_ptr + row * (GATE + 1) + GATE).to(tl.float32))
        total += term
    tl.store(out_ptr + row * N + column, total.to(out_ptr.dtype.element_ty), mask=is_in)


def shape_for(num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device, *, is_exact: bool) -> Tile:
    """By the number of pairs that an expert has on average; in exact mode one shape serves all."""
    if dtype is torch.float32 and device.type == "cuda":
        return WIDE_NUMBERS
    if is_exact:
        return EXACT
    pairs = num_pairs / num_experts
    return next((shape for shape in (FEW_ROWS, EXACT) if pairs <= shape.rows), MANY_ROWS)


def columns_of(shape: Tile, *, is_gated: bool) -> int:
    """Outputs of a tile."""
    return shape.columns // 2 if is_gated else shape.columns


def expert_linear(
    x: torch.Tensor | ScaledRows,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    shape: Tile,
    dtype: torch.dtype,
    activation: str | None,
) -> torch.Tensor:
    """Outputs [pairs, out] of x [n, in], whose rows belong to equally many successive pairs. With an activation the
    weights are [gate | up], and the output is half as wide."""
    steps, scales = (x.steps, x.scales) if isinstance(x, ScaledRows) else (x, x)
    out_size, in_size = weights.steps.shape[1:]
    is_gated = activation is not None
    out_size = out_size // 2 if is_gated else out_size
    out = torch.empty(tiles.num_pairs, out_size, dtype=dtype, device=steps.device)
    is_scaled = weights.scales is not None
    is_grouped = weights.scales is not None and weights.scales.shape[1] > 1
    columns = columns_of(shape, is_gated=is_gated)
    depth = shape.depth
    if is_scaled:
        depth = depth_for(weights.group) if is_grouped else WIDEST_K
    expert_linear_kernel[(triton.cdiv(out_size, columns), len(tiles.experts))](
        steps, scales, weights.steps, weights.steps if weights.scales is None else weights.scales,
        weights.steps if weights.biases is None else weights.biases, out,
        tiles.pairs, tiles.experts, tiles.num_tiles, tiles.num_pairs, out_size, in_size,
        1 if weights.scales is None else weights.scales.shape[1],
        PAIRS_PER_ROW=tiles.num_pairs // len(steps), GATED=is_gated,
        KIND=0 if activation is None else GATED.index(activation), SCALED=is_scaled,
        GROUP=weights.group if is_grouped else 0, BIASED=weights.biases is not None,
        BLOCK_M=tiles.rows, BLOCK_N=columns, BLOCK_K=depth, num_warps=shape.num_warps,
        num_stages=shape.num_stages, **dependent(),
    )  # fmt: skip
    return out


def add_experts(
    terms: torch.Tensor, routes: Routes, shared: torch.Tensor | None, logits: torch.Tensor, *, is_gated: bool
) -> torch.Tensor:
    """The sum [n, dim] of the outputs of each token's experts, terms [n * top_k, dim], times their shares, and of
    the output of the shared expert [n, dim], times the sigmoid of the last logit if `is_gated`."""
    n, top_k = routes.experts.shape
    dim = terms.shape[1]
    out = terms.new_empty(n, dim)
    add_experts_kernel[(n, triton.cdiv(dim, COLUMNS))](
        terms, routes.shares, terms if shared is None else shared, logits, out, dim, logits.shape[1] - 1,
        TOP_K=top_k, SHARED=shared is not None, GATED=is_gated, BLOCK=COLUMNS, num_warps=4, **dependent(),
    )  # fmt: skip
    return out
