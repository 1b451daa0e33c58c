"""The two wrappers of FlashInfer that the engine uses, with the same signatures and checks, in torch.

`run` reads lengths and blocks from the buffers of the wrapper, as kernels do, also when a graph is replayed.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
calls = {"plans": 0}


@torch.library.custom_op("quire_tests::flashinfer_run", mutates_args={"out"})
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_starts: torch.Tensor, page_starts: torch.Tensor,
    indices: torch.Tensor, last_page_len: torch.Tensor, sm_scale: float, window_left: int, soft_cap: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Causal attention of every row, whose queries are its last tokens."""
    page = k.shape[1]
    for row, last in enumerate(last_page_len.tolist()):
        first, end = query_starts[row : row + 2].tolist()
        begin, stop = page_starts[row : row + 2].tolist()
        assert stop > begin, "a row has no page"
        assert 1 <= last <= page
        num_keys = (stop - begin - 1) * page + last
        positions = num_keys - (end - first) + torch.arange(end - first)
        if end == first:
            continue
        left = num_keys if window_left < 0 else window_left
        keys = torch.arange(max(int(positions[0]) - left, 0), num_keys)
        blocks = indices[begin + keys // page].long()
        chosen_k, chosen_v = (_rows(pool, blocks, keys % page, q) for pool in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], chosen_k) * sm_scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        is_visible = (keys[None] <= positions[:, None]) & (keys[None] >= positions[:, None] - left)
        weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, chosen_v)


def _rows(pool, blocks, slots, q):
    found = pool.view(torch.uint8)[blocks, slots].view(FP8) if pool.dtype is FP8 else pool[blocks, slots]
    return found.to(q.dtype).repeat_interleave(q.shape[1] // pool.shape[2], 1)


def _check_indices(indptr, indices, last_page_len):
    """Lengths on the device would cost a synchronization."""
    assert indptr.device.type == last_page_len.device.type == "cpu"
    assert indptr.dtype is indices.dtype is last_page_len.dtype is torch.int32
    assert len(indptr) == len(last_page_len) + 1


class _Wrapper:
    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer.dtype is int_workspace_buffer.dtype is torch.uint8

    def _record_plan(self, num_qo_heads, num_kv_heads, head_dim, page_size, options):
        calls["plans"] += 1
        assert num_qo_heads % num_kv_heads == 0
        self._shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._options = options

    def _run(self, q, paged_kv_cache, query_starts, out):
        k, v = paged_kv_cache
        heads, kv_heads, dim, page = self._shape
        assert q.shape == out.shape == (q.shape[0], heads, dim)
        assert k.shape[1:] == v.shape[1:] == (page, kv_heads, dim), "NHD"
        assert q.dtype is out.dtype is self._options["q_data_type"]
        assert k.dtype is v.dtype is self._options["kv_data_type"]
        attend(
            q, k, v, query_starts, self._page_starts, self._indices, self._last_page_len, self._options["sm_scale"],
            self._options["window_left"], self._options["logits_soft_cap"] or 0.0, out,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        assert use_cuda_graph
        assert use_tensor_cores, "without tensor cores, few group sizes are compiled"
        assert backend == "fa2"
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._page_starts, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._last_page_len = paged_kv_last_page_len_buffer
        self._query_starts = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        q_len_per_req=1, is_causal=None,
    ):  # fmt: skip
        _check_indices(indptr, indices, last_page_len)
        assert len(last_page_len) == len(self._last_page_len), "The batch size should be fixed in cudagraph mode"
        assert len(indices) <= len(self._indices)
        self._page_starts.copy_(indptr)
        self._last_page_len.copy_(last_page_len)
        self._indices[: len(indices)].copy_(indices)
        self._record_plan(num_qo_heads, num_kv_heads, head_dim, page_size, {
            "q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale, "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        })  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        assert len(q) == len(self._last_page_len)
        self._run(q, paged_kv_cache, self._query_starts, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        assert not use_cuda_graph

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        _check_indices(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert qo_indptr.dtype is torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        assert causal
        self._query_starts, self._page_starts = qo_indptr.clone(), paged_kv_indptr.clone()
        self._indices, self._last_page_len = paged_kv_indices, paged_kv_last_page_len.clone()
        self._record_plan(num_qo_heads, num_kv_heads, head_dim_qk, page_size, {
            "q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale, "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        })  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        assert len(q) == int(self._query_starts[-1]), "q.shape[0] does not match qo_indptr[-1]"
        self._run(q, paged_kv_cache, self._query_starts, out)
