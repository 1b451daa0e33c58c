"""The step between QKV projection and attention: q/k norm, rotary positions, and the store of k and v into the pool.

One program per token computes all heads of its fused row [q | k | v]. It holds a head as pairs of numbers c and
HALF + c, which are rotated. If only the first 2 * TURNED numbers of a head are rotated, the pairs are c and TURNED + c
for c < TURNED, and otherwise TURNED + c and HALF + c. With neighbours, 2 c and 2 c + 1.
"""

from __future__ import annotations

import torch

from worker_svc.engine.backend import HeadShape, Norm, QkvPart, RotaryTable
from worker_svc.engine.cpu.torch_ops import split_heads
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.fp8 import reference as round_to_fp8
from worker_svc.engine.gpu.kernels.fp8 import round_e4m3
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.norm import normed

NORMS = {"rms": 1, "rms_offset": 2}  # 0: none


@triton.jit
def rope_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_out_ptr, k_pool_ptr, v_pool_ptr,
    kv_scale_ptr, q_scale_ptr, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr,
    TURNED: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr, SCALES_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALVES)[None, :]
    is_column = column < HALF
    left, right = column, HALF + column  # the numbers of a pair
    is_turned = is_column
    if TURNED < HALF:
        is_turned = column < TURNED
        left = tl.where(is_turned, column, TURNED + column)
        right = tl.where(is_turned, TURNED + column, HALF + column)
    if INTERLEAVED:
        left, right = 2 * column, 2 * column + 1
    is_q = (head < HQ) & is_column
    is_k = (head >= HQ) & (head < HQ + HKV) & is_column
    is_v = (head >= HQ + HKV) & (head < HQ + 2 * HKV) & is_column
    if NORM:
        q_weights, k_weights, has_q, has_k = q_norm_ptr, k_norm_ptr, is_column, is_column
        if WIDE:  # a weight of all heads
            q_weights, k_weights, has_q, has_k = q_norm_ptr + head * D, k_norm_ptr + (head - HQ) * D, is_q, is_k
        q_weight = tl.load(q_weights + left, mask=has_q, other=0.0)
        k_weight = tl.load(k_weights + left, mask=has_k, other=0.0)
        a_weight = tl.where(head < HQ, q_weight, k_weight).to(tl.float32)
        q_weight = tl.load(q_weights + right, mask=has_q, other=0.0)
        k_weight = tl.load(k_weights + right, mask=has_k, other=0.0)
        b_weight = tl.where(head < HQ, q_weight, k_weight).to(tl.float32)
    if PDL:
        after_predecessor()
    # All loads come first, so that their latencies overlap.
    position = tl.load(position_ptr + token).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)  # -1: padding, not stored
    source = qkv_ptr + (token * (HQ + 2 * HKV) + head) * D
    first = tl.load(source + left, mask=(head < HQ + 2 * HKV) & is_column, other=0.0)
    second = tl.load(source + right, mask=(head < HQ + 2 * HKV) & is_column, other=0.0)
    cos = tl.load(cos_ptr + position * TURNED + column, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + position * TURNED + column, mask=is_turned, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        square = (tl.sum(a * a, 1) + tl.sum(b * b, 1))[:, None] / D
        if WIDE:  # one mean of all query heads, and one of all key heads
            of_q = tl.sum(tl.where(head < HQ, square, 0.0)) / HQ
            of_k = tl.sum(tl.where((head >= HQ) & (head < HQ + HKV), square, 0.0)) / HKV
            square = tl.where(head < HQ, of_q, of_k)
        scale = tl.rsqrt(square + eps)
        if NORM == 1:  # rounded to the model's dtype before and after the multiplication, as in transformers
            a = (a * scale).to(first.dtype).to(tl.float32) * a_weight
            b = (b * scale).to(first.dtype).to(tl.float32) * b_weight
        else:
            a = a * scale * (1.0 + a_weight)
            b = b * scale * (1.0 + b_weight)
        a = a.to(first.dtype).to(tl.float32)
        b = b.to(first.dtype).to(tl.float32)
    turned_a = (a * cos - b * sin).to(first.dtype)
    turned_b = (b * cos + a * sin).to(first.dtype)
    if SCALES_Q:
        q_scale = tl.load(q_scale_ptr + position)
        turned_a = tl.where(head < HQ, (turned_a.to(tl.float32) * q_scale).to(first.dtype), turned_a)
        turned_b = tl.where(head < HQ, (turned_b.to(tl.float32) * q_scale).to(first.dtype), turned_b)
    target = q_out_ptr + (token * HQ + head) * D
    tl.store(target + left, turned_a, mask=is_q)
    tl.store(target + right, turned_b, mask=is_q)
    if SCALED:
        is_kv = (head >= HQ) & (head < HQ + 2 * HKV)
        scale = tl.load(kv_scale_ptr + head - HQ, mask=is_kv, other=1.0)  # key heads, then value heads
        pool_type = k_pool_ptr.dtype.element_ty
        turned_a = round_e4m3(turned_a.to(tl.float32) / scale).to(pool_type)
        turned_b = round_e4m3(turned_b.to(tl.float32) / scale).to(pool_type)
        first = round_e4m3(first.to(tl.float32) / scale).to(pool_type)
        second = round_e4m3(second.to(tl.float32) / scale).to(pool_type)
    if slot >= 0:
        keys = k_pool_ptr + (slot * HKV + head - HQ) * D
        tl.store(keys + left, turned_a, mask=is_k)
        tl.store(keys + right, turned_b, mask=is_k)
        values = v_pool_ptr + (slot * HKV + head - HQ - HKV) * D
        tl.store(values + left, first, mask=is_v)
        tl.store(values + right, second, mask=is_v)


def torch_rope_store(qkv, norms, rotary, positions, slots, cache, q_out, shape, scales=None):
    q, *stored = split_heads(qkv, QkvPart(shape, rotary, norms), positions, normed)
    q_out.copy_(q)
    if not shape.num_kv_heads:
        return
    if scales is not None:
        stored = [round_to_fp8(x, scale[:, None]) for x, scale in zip(stored, scales, strict=False)]
    is_stored = slots >= 0
    places = slots[is_stored].long()
    for pool, x in zip(cache, stored, strict=True):
        lines, values = pool.view(-1, *pool.shape[2:]), x[is_stored]
        if pool.itemsize == 1:  # torch cannot index float8
            lines, values = lines.view(torch.uint8), values.view(torch.uint8)
        lines[places] = values


@kernel("rope_store", torch_rope_store, writes="cache q_out")
def rope_store(
    qkv: torch.Tensor,
    norms: tuple[Norm, Norm] | None,
    rotary: RotaryTable | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    q_out: torch.Tensor,
    shape: HeadShape,
    scales: torch.Tensor | None = None,
) -> None:
    """Splits fused qkv [T, heads * dim], applies `norms` (of each head, or of all heads together) and rotary positions
    (if given) to q and k, and writes q to q_out [T, q_heads, dim], k and v to the slots [T] of the pools [num_blocks,
    block_size, kv_heads, dim].

    With `scales` [2 or more, kv_heads], k and v are divided by the first two and rounded to e4m3. Slot -1 is not
    stored.
    """
    q_norm, k_norm, eps, kind = qkv, qkv, 0.0, 0
    if norms is not None:
        q_norm, k_norm, eps, kind = norms[0].weight, norms[1].weight, norms[0].eps, NORMS[norms[0].kind]
    cos, sin, turned = (qkv, qkv, 0) if rotary is None else (rotary.cos, rotary.sin, rotary.cos.shape[1])
    q_scales = None if rotary is None else rotary.q_scales
    rope_store_kernel[(len(positions),)](
        qkv, q_norm, k_norm, cos, sin, positions, slots, q_out, *cache, qkv if scales is None else scales,
        qkv if q_scales is None else q_scales, eps,
        HQ=shape.num_q_heads, HKV=shape.num_kv_heads, D=shape.head_dim,
        HEADS=triton.next_power_of_2(shape.num_q_heads + 2 * shape.num_kv_heads),
        HALVES=triton.next_power_of_2(shape.head_dim // 2), TURNED=turned, NORM=kind,
        WIDE=norms is not None and len(norms[0].weight) > shape.head_dim, SCALED=scales is not None,
        INTERLEAVED=rotary is not None and rotary.is_interleaved, SCALES_Q=q_scales is not None,
        num_warps=4, **dependent(),
    )  # fmt: skip
