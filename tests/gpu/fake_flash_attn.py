"""The two functions of flash-attn 2 that the engine calls, with the same signatures and checks, in torch."""

from __future__ import annotations

import torch

PAGE = 256


def _check_pages(k_cache, v_cache, block_table):
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[1] % PAGE == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.dtype is torch.int32, "block_table must have dtype torch.int32"
    assert block_table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert k_cache.stride(-1) == 1, "Input tensor must have contiguous last dimension"


def _attend(q, k_cache, v_cache, table, num_keys, scale, window_size=(-1, -1), softcap=0.0):
    """q [n, heads, dim] are the last queries of num_keys keys. Keys before the window are not read."""
    positions = num_keys - len(q) + torch.arange(len(q))
    left = window_size[0] if window_size[0] >= 0 else num_keys
    keys = torch.arange(max(int(positions[0]) - left, 0), num_keys)
    blocks = table.long()[keys // k_cache.shape[1]]
    group = q.shape[1] // k_cache.shape[2]
    k, v = (pool[blocks, keys % pool.shape[1]].repeat_interleave(group, 1) for pool in (k_cache, v_cache))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    is_visible = (keys[None] <= positions[:, None]) & (keys[None] >= positions[:, None] - left)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    _check_pages(k, v, block_table)
    assert causal
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    q_lens, k_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(*q_lens, 1) == max_seqlen_q
    assert max(*k_lens, 1) == max_seqlen_k
    rows = zip(q[: sum(q_lens)].split(q_lens), block_table, k_lens, strict=True)
    rest = q.new_full((len(q) - sum(q_lens), *q.shape[1:]), torch.nan)  # uninitialized memory
    options = softmax_scale, window_size, softcap
    return torch.cat([_attend(part, k, v, table, n, *options) for part, table, n in rows if len(part)] + [rest])


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    _check_pages(k_cache, v_cache, block_table)
    assert cache_seqlens.dtype is torch.int32
    assert q.dim() == 4
    assert len(q) == len(cache_seqlens) == len(block_table)
    rows = zip(q, block_table.clamp_min(0), cache_seqlens.tolist(), strict=True)
    options = softmax_scale, window_size, softcap
    return torch.stack([_attend(part, k_cache, v_cache, table, n, *options) for part, table, n in rows])
