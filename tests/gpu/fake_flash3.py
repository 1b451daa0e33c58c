"""The two functions of flash-attn 3 that the engine calls, with the same signatures and checks, in torch.

`flash_attn_with_kvcache` fails if a plan is missing or was made for other arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
OFFSET = 256.0  # the largest softmax weight before it is rounded to fp8


@dataclass(frozen=True)
class Plan:
    """The inputs of a plan."""

    batch_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    heads: tuple[int, int, int]
    lens: tuple[int, ...]
    dtype: torch.dtype
    starts: tuple[int, ...]
    page_size: int
    causal: bool
    window_size: tuple[int, int]
    has_softcap: bool


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return Plan(
        batch_size, max_seqlen_q, max_seqlen_k, (num_heads_q, num_heads_kv, headdim), tuple(cache_seqlens.tolist()),
        qkv_dtype, tuple(cu_seqlens_q.tolist()), page_size, causal, window_size, has_softcap,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    rows, page_size = len(page_table), k_cache.shape[1]
    assert q.dtype is k_cache.dtype is v_cache.dtype, "query and key must have the same dtype"
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert page_table.dtype is cu_seqlens_q.dtype is cache_seqlens.dtype is torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cache_seqlens.is_contiguous()
    assert cu_seqlens_q.shape == (rows + 1,)
    assert cache_seqlens.shape == (rows,)
    assert isinstance(max_seqlen_q, int)
    assert q.shape[-1] % (16 if q.dtype is FP8 else 8) == 0, "head_size should be a multiple of 8, in fp8 of 16"
    heads = q.shape[1], k_cache.shape[2], q.shape[2]
    assert scheduler_metadata is None or scheduler_metadata == Plan(
        rows, max_seqlen_q, page_table.shape[1] * page_size, heads, tuple(cache_seqlens.tolist()), q.dtype,
        tuple(cu_seqlens_q.tolist()), page_size, causal, window_size, softcap > 0,
    )  # fmt: skip
    is_fp8 = q.dtype is FP8
    descales = [q_descale, k_descale, v_descale] if is_fp8 else [q.new_ones(rows, heads[1], dtype=torch.float32)] * 3
    for scale in descales:
        assert scale.dtype is torch.float32
        assert scale.shape == (rows, heads[1])
    out = torch.empty(q.shape, dtype=torch.bfloat16 if is_fp8 else q.dtype)
    attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, torch.stack(descales), max_seqlen_q,
        softmax_scale, window_size[0], softcap, out,
    )  # fmt: skip
    return out


@torch.library.custom_op("quire_tests::flash3_run", mutates_args={"out"})
def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor,
    page_table: torch.Tensor, descales: torch.Tensor, max_seqlen_q: int, softmax_scale: float, left: int,
    softcap: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """The kernel: it reads lengths when it runs, also in the replay of a graph."""
    out.fill_(torch.nan)  # uninitialized memory
    for row, (count, length) in enumerate(zip(starts.diff().tolist(), lens.tolist(), strict=True)):
        assert count <= max_seqlen_q
        first = int(starts[row])
        if count:
            out[first : first + count] = _attend(
                q[first : first + count], k_cache, v_cache, page_table[row], length, descales[:, row], softmax_scale,
                left, softcap,
            )  # fmt: skip


def _attend(q, k_cache, v_cache, table, num_keys, scales, softmax_scale, left, softcap):
    """q [n, heads, dim] are the last queries of num_keys keys. Keys before the window are not read."""
    positions = num_keys - len(q) + torch.arange(len(q))
    left = left if left >= 0 else num_keys
    keys = torch.arange(max(int(positions[0]) - left, 0), num_keys)
    blocks, group = table.long()[keys // k_cache.shape[1]], q.shape[1] // k_cache.shape[2]
    k, v = (
        pool.view(torch.uint8)[blocks, keys % pool.shape[1]].view(FP8).float()
        if pool.dtype is FP8
        else pool[blocks, keys % pool.shape[1]]
        for pool in (k_cache, v_cache)
    )
    is_fp8 = q.dtype is FP8
    q = q.float() if is_fp8 else q
    if is_fp8:
        q = q * scales[0].repeat_interleave(group)[:, None]
        k, v = k * scales[1][:, None], v * scales[2][:, None]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    is_visible = (keys[None] <= positions[:, None]) & (keys[None] >= positions[:, None] - left)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~is_visible, 0.0)
    total = weights.sum(-1, keepdim=True)
    if is_fp8:
        weights = (weights * OFFSET).to(FP8).float() / OFFSET
    return torch.einsum("hqk,khd->qhd", weights / total, v)
