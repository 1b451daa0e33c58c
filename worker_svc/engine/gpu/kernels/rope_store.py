"""The step between QKV projection and attention: q/k norm, rotary positions, and the store of k and v into the pool.

One program per token computes all heads of its fused row [q | k | v].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.engine.backend import HeadShape, RotaryTable
from worker_svc.engine.gpu.kernels.fp8 import round_e4m3
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent


@triton.jit
def rope_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_out_ptr, k_pool_ptr, v_pool_ptr,
    kv_scale_ptr, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALVES)[None, :]
    is_column = column < HALF
    is_q = (head < HQ) & is_column
    is_k = (head >= HQ) & (head < HQ + HKV) & is_column
    is_v = (head >= HQ + HKV) & (head < HQ + 2 * HKV) & is_column
    if NORM:
        q_weight = tl.load(q_norm_ptr + column, mask=is_column, other=0.0)
        k_weight = tl.load(k_norm_ptr + column, mask=is_column, other=0.0)
        a_weight = tl.where(head < HQ, q_weight, k_weight).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + HALF + column, mask=is_column, other=0.0)
        k_weight = tl.load(k_norm_ptr + HALF + column, mask=is_column, other=0.0)
        b_weight = tl.where(head < HQ, q_weight, k_weight).to(tl.float32)
    if PDL:
        after_predecessor()
    # All loads come first, so that their latencies overlap.
    position = tl.load(position_ptr + token).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)  # -1: padding, not stored
    source = qkv_ptr + (token * (HQ + 2 * HKV) + head) * D + column
    first = tl.load(source, mask=(head < HQ + 2 * HKV) & is_column, other=0.0)
    second = tl.load(source + HALF, mask=(head < HQ + 2 * HKV) & is_column, other=0.0)
    cos = tl.load(cos_ptr + position * HALF + column, mask=is_column, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + column, mask=is_column, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        square = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D
        scale = tl.rsqrt(square + eps)[:, None]
        # Rounded to the model's dtype before and after the multiplication by the weight, as in transformers.
        a = ((a * scale).to(first.dtype).to(tl.float32) * a_weight).to(first.dtype).to(tl.float32)
        b = ((b * scale).to(first.dtype).to(tl.float32) * b_weight).to(first.dtype).to(tl.float32)
    turned_a = (a * cos - b * sin).to(first.dtype)
    turned_b = (b * cos + a * sin).to(first.dtype)
    target = q_out_ptr + (token * HQ + head) * D + column
    tl.store(target, turned_a, mask=is_q)
    tl.store(target + HALF, turned_b, mask=is_q)
    if SCALED:
        is_kv = (head >= HQ) & (head < HQ + 2 * HKV)
        scale = tl.load(kv_scale_ptr + head - HQ, mask=is_kv, other=1.0)  # key heads, then value heads
        pool_type = k_pool_ptr.dtype.element_ty
        turned_a = round_e4m3(turned_a.to(tl.float32) / scale).to(pool_type)
        turned_b = round_e4m3(turned_b.to(tl.float32) / scale).to(pool_type)
        first = round_e4m3(first.to(tl.float32) / scale).to(pool_type)
        second = round_e4m3(second.to(tl.float32) / scale).to(pool_type)
    if slot >= 0:
        keys = k_pool_ptr + (slot * HKV + head - HQ) * D + column
        tl.store(keys, turned_a, mask=is_k)
        tl.store(keys + HALF, turned_b, mask=is_k)
        values = v_pool_ptr + (slot * HKV + head - HQ - HKV) * D + column
        tl.store(values, first, mask=is_v)
        tl.store(values + HALF, second, mask=is_v)


def rope_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: RotaryTable,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    q_out: torch.Tensor,
    shape: HeadShape,
    eps: float,
    scales: torch.Tensor | None = None,
) -> None:
    """Splits fused qkv [T, heads * dim], applies `norms` (if given) and rotary positions to q and k, and writes q to
    q_out [T, q_heads, dim], k and v to the slots [T] of the pools [num_blocks, block_size, kv_heads, dim].

    With `scales` [2, kv_heads], k and v are divided by them and rounded to e4m3. Slot -1 is not stored.
    """
    q_norm, k_norm = norms or (qkv, qkv)
    rope_store_kernel[(len(positions),)](
        qkv, q_norm, k_norm, rotary.cos, rotary.sin, positions, slots, q_out, *cache,
        qkv if scales is None else scales, eps,
        HQ=shape.num_q_heads, HKV=shape.num_kv_heads, D=shape.head_dim,
        HEADS=triton.next_power_of_2(shape.num_q_heads + 2 * shape.num_kv_heads),
        HALVES=triton.next_power_of_2(shape.head_dim // 2), NORM=norms is not None, SCALED=scales is not None,
        num_warps=4, **dependent(),
    )  # fmt: skip


def reference(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: RotaryTable,
    positions: torch.Tensor,
    shape: HeadShape,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [T, heads, dim] as attention reads them."""
    heads = [shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(positions), -1, shape.head_dim), heads, dim=1)
    if norms is not None:
        q, k = _rms_norm(q, norms[0], eps), _rms_norm(k, norms[1], eps)
    cos, sin = rotary.cos[positions.long()][:, None], rotary.sin[positions.long()][:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
