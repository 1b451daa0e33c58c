"""The experts of each token, and the tiles of their products: pairs of token and expert, grouped by expert.

A pair is the index token * top_k + rank. Each expert's pairs fill tiles of `tile_rows` lines, padded at the end, so
that a tile multiplies by one expert's weight. Nothing depends on values that the host would have to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.backend import Routing
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

BLOCK = 1024  # pairs that a program reads at a time


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of n tokens in the order of `Routing`, without the shared one."""

    experts: torch.Tensor  # int32 [n, top_k]
    shares: torch.Tensor  # float32 [n, top_k]


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of pairs. Only the first `num_tiles` are set."""

    pairs: torch.Tensor  # int32 [tiles * rows of a tile]; padding holds the number of pairs
    experts: torch.Tensor  # int32 [tiles]
    num_tiles: torch.Tensor  # int32 [1]
    rows: int  # of a tile
    num_pairs: int


@triton.jit
def in_top_groups(
    keys, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, EXPERTS: tl.constexpr
):
    """keys, those outside of the best groups replaced by -inf. Groups have SIZE neighbours."""
    place = tl.arange(0, EXPERTS)  # there are no more groups
    sums = tl.full([EXPERTS], float("-inf"), tl.float32)
    for group in range(GROUPS):
        left = tl.where(expert // SIZE == group, keys, float("-inf"))
        total = tl.max(left, 0)
        for _ in range(BEST - 1):
            left = tl.where(expert == tl.argmax(left, 0), float("-inf"), left)
            total += tl.max(left, 0)
        sums = tl.where(place == group, total, sums)
    is_kept = expert < 0
    for _ in range(TOP):
        best = tl.argmax(sums, 0)
        is_kept = is_kept | (expert // SIZE == best)
        sums = tl.where(place == best, float("-inf"), sums)
    return tl.where(is_kept, keys, float("-inf"))


@triton.jit
def route_kernel(
    logits_ptr, correction_ptr, expert_ptr, share_ptr, E, NUM_LOGITS, scale,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    rank = tl.arange(0, RANKS)
    is_expert = expert < E
    logits = tl.load(logits_ptr + row * NUM_LOGITS + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    scores = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOID else tl.exp(logits - tl.max(logits, 0))
    scores = tl.where(scores == scores, scores, 0.0)  # a row with NaN chooses any experts; its result is NaN
    total = 1.0 if SIGMOID else tl.maximum(tl.sum(scores, 0), 1e-30)
    keys = scores
    if CORRECTED:
        keys = scores / total + tl.load(correction_ptr + expert, mask=is_expert, other=0.0)
    left = tl.where(is_expert, keys, float("-inf"))
    if GROUPS > 1:
        left = in_top_groups(left, expert, GROUP_SIZE, GROUPS, TOP_GROUPS, GROUP_BEST, EXPERTS)
    chosen = tl.zeros([RANKS], tl.int32)
    top = tl.zeros([RANKS], tl.float32)
    for turn in range(TOP_K):
        best = tl.argmax(left, 0)
        chosen = tl.where(rank == turn, best.to(tl.int32), chosen)
        top = tl.where(rank == turn, tl.sum(tl.where(expert == best, scores, 0.0), 0), top)
        left = tl.where(expert == best, float("-inf"), left)
    divisor = tl.maximum(tl.sum(top, 0), 1e-30) if NORMALIZED else total
    tl.store(expert_ptr + row * TOP_K + rank, chosen, mask=rank < TOP_K)
    tl.store(share_ptr + row * TOP_K + rank, top / divisor * scale, mask=rank < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(expert_ptr, count_ptr, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        total += (tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(
    expert_ptr, count_ptr, pair_ptr, tile_expert_ptr, num_tiles_ptr, num_pairs, E,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert. It writes the tiles behind those of all experts before it."""
    if PDL:
        after_predecessor()
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + expert, mask=expert < E, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(expert == mine, tiles, 0), 0)
    if mine == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for start in range(first_tile, end_tile, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(tile_expert_ptr + tile, tile * 0 + mine, mask=tile < end_tile)
    place = first_tile * ROWS
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = (tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1) == mine).to(tl.int32)
        tl.store(pair_ptr + place + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)
    rest = place + tl.arange(0, ROWS)
    tl.store(pair_ptr + rest, rest * 0 + num_pairs, mask=rest < end_tile * ROWS)


def route(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> Routes:
    """The experts of each token and their shares, of logits [n, num_logits]."""
    n, num_experts, top_k = len(logits), routing.num_experts, routing.top_k
    experts = torch.empty(n, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(n, top_k, dtype=torch.float32, device=logits.device)
    size = num_experts // routing.num_groups
    route_kernel[(n,)](
        logits, shares if correction is None else correction, experts, shares, num_experts, logits.shape[1],
        routing.scale, TOP_K=top_k, EXPERTS=triton.next_power_of_2(num_experts), RANKS=triton.next_power_of_2(top_k),
        NORMALIZED=routing.is_normalized, SIGMOID=routing.is_sigmoid, CORRECTED=correction is not None,
        GROUP_SIZE=size, GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
        GROUP_BEST=min(routing.group_best, size), num_warps=1, **dependent(),
    )  # fmt: skip
    return Routes(experts, shares)


def group(experts: torch.Tensor, num_experts: int, tile_rows: int) -> ExpertTiles:
    """The tiles of the pairs of `experts` [n, top_k]."""
    num_pairs, device = experts.numel(), experts.device
    most = num_pairs // tile_rows + min(num_experts, num_pairs)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(most * tile_rows, dtype=torch.int32, device=device)
    tile_experts = torch.empty(most, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    count_kernel[(num_experts,)](experts, counts, num_pairs, BLOCK=BLOCK, num_warps=4, **dependent())
    group_kernel[(num_experts,)](
        experts, counts, pairs, tile_experts, num_tiles, num_pairs, num_experts,
        ROWS=tile_rows, EXPERTS=triton.next_power_of_2(num_experts), BLOCK=BLOCK, num_warps=4, **dependent(),
    )  # fmt: skip
    return ExpertTiles(pairs, tile_experts, num_tiles, tile_rows, num_pairs)
