"""The operations in plain torch and numpy: the reference for tests of the kernels, and the backend without a compiler.

Much slower than the kernels, and equal to them up to rounding. In exact mode every operation is element-wise or from
exact_ops.py: the result of a row depends neither on other rows nor on threads or the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from request_fields.fields import SAMPLER_FIELDS, sampling_params
from step_protocol.columns import I32, I64, U32
from worker_svc.engine.adapters.packed import low_ranks
from worker_svc.engine.backend import (
    Adapter,
    AttentionShape,
    Cache,
    ExpertLinears,
    ForwardBatch,
    HeadShape,
    LatentAttention,
    LatentShape,
    LatentTokens,
    Linear,
    Norm,
    PackedAdapter,
    QkvPart,
    RecurrentWeights,
    SamplingColumns,
    TopLogprobs,
)
from worker_svc.engine.config import Determinism, Quantization
from worker_svc.engine.cpu import recurrent, torch_ops
from worker_svc.engine.kernels import exact_ops
from worker_svc.engine.kernels.torch_linear import FixedPointLinear, Int8Linear, Int8Rows, PackedLinear
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.sampling.noise import filtered, sample_token
from worker_svc.engine.sampling.processors import ProcessedRows

KEY_TILE = 128
TOKEN_TILE = 16


class ReferenceBackend:
    """Plain torch operations; see `Backend` for the contracts."""

    name = "reference"
    copies_weights = False
    device = torch.device("cpu")
    is_batched = True
    arithmetic = "fixed point"
    num_weight_bytes = 0
    _normed = staticmethod(torch_ops.normed)

    def __init__(self, determinism: Determinism, quantize: Quantization | None = None) -> None:
        self.formats: set[str] = set()
        self._quantize = quantize
        self._linear_class = FixedPointLinear if determinism == "exact" else PackedLinear

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self._quantize == "int8":
            return Int8Linear(weight, bias)
        return self._linear_class(weight, bias)

    def make_int8_linear(self, rows: Int8Rows, bias: torch.Tensor | None) -> Linear:
        return Int8Linear(rows, bias)

    def end_load(self) -> None: ...

    def pack_adapter(self, adapter: Adapter, num_layers: int) -> PackedAdapter:
        return PackedAdapter(low_ranks(adapter, num_layers, lambda weight: FixedPointLinear(weight, None)))

    def add_adapters(
        self, layer: int, site: int, rows: Sequence[tuple[PackedAdapter, I32]], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        for adapter, indices in rows:
            low_rank, at = adapter.at(layer, site), torch.from_numpy(indices).long()
            if low_rank is None or not len(at):
                continue
            shrunk = low_rank.shrink(x[at])
            for part in low_rank.expansions:
                ranks = slice(part.first_rank, part.first_rank + part.rank)
                outputs = slice(part.first_output, part.first_output + part.num_outputs)
                added = FixedPointLinear.wide(part.linear, shrunk[:, ranks])  # type: ignore[arg-type]
                y[at, outputs] = (y[at, outputs].float() + added).to(y.dtype)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
        if residual is not None:
            x += residual
        out.copy_(self._normed(x, norm))

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, part: QkvPart, batch: ForwardBatch, cache: Cache, q_out: torch.Tensor
    ) -> None:
        q, k, v = torch_ops.split_heads(qkv, part, torch.from_numpy(batch.positions).to(self.device), self._normed)
        q_out.copy_(q)
        slots, block_size = torch.from_numpy(batch.slots), cache[0].shape[-1]
        blocks, offsets = slots // block_size, slots % block_size
        cache[0][blocks, :, :, offsets] = k
        cache[1][blocks, :, offsets] = v

    def paged_attention(
        self, q: torch.Tensor, cache: Cache, batch: ForwardBatch, out: torch.Tensor, shape: AttentionShape
    ) -> None:
        row_of_token = np.repeat(np.arange(len(batch.rows)), np.diff(batch.query_starts))
        tables = torch.from_numpy(batch.tables[batch.rows]).long()[torch.from_numpy(row_of_token)]
        in_row = np.arange(len(row_of_token)) - batch.query_starts[row_of_token]
        positions = torch.from_numpy(batch.context_lens[row_of_token] + in_row).long()
        key_lens = None if shape.is_causal else torch.from_numpy(_key_lens(batch)[row_of_token]).long()
        for start in range(0, len(positions), TOKEN_TILE):
            end = start + TOKEN_TILE
            lens = None if key_lens is None else key_lens[start:end]
            out[start:end] = _attend(q[start:end], cache, tables[start:end], positions[start:end], lens, shape)

    def gate_outputs(self, out: torch.Tensor, gate: torch.Tensor) -> None:
        torch_ops.gate_outputs(out, gate)

    def recurrent(
        self, weights: RecurrentWeights, states: StatePool, index: int, batch: ForwardBatch, projected: torch.Tensor
    ) -> torch.Tensor:
        rows = batch.rows.tolist(), batch.query_starts, batch.context_lens
        return recurrent.advance(
            states.spec(index), weights, states.layer(index), rows, recurrent.taken(batch), projected
        )

    def latent_rope_store(
        self, tokens: LatentTokens, part: LatentAttention, batch: ForwardBatch, cache: torch.Tensor, q_out: torch.Tensor
    ) -> None:
        positions, slots = torch.from_numpy(batch.positions).long(), torch.from_numpy(batch.slots)
        torch_ops.latent_rope_store(tokens, part, positions, slots, cache, q_out)

    def latent_attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, shape: LatentShape, scale: float
    ) -> torch.Tensor:
        whole, rows = torch.empty_like(q), cache[:, None]
        one_head = AttentionShape(HeadShape(shape.num_heads, 1, shape.width), scale)
        self.paged_attention(q, (rows.transpose(2, 3), rows), batch, whole, one_head)
        return whole[..., : shape.rank]

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(torch_ops.gated(gate, up, activation))

    def activation(self, x: torch.Tensor, activation: str) -> None:
        x.copy_(torch_ops.activate(x.float(), activation))

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, experts: ExpertLinears, activation: str, out: torch.Tensor
    ) -> None:
        torch_ops.experts(x, router_logits, experts, self, activation, out)

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        x.copy_(torch_ops.soft_cap(x.float(), cap))

    def copy_blocks(self, pool: torch.Tensor, src: I64, dst: I64) -> None:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            pool[:, target] = pool[:, source]

    def process_logits(self, logits: torch.Tensor, selected: ProcessedRows) -> None:
        for index, line in enumerate(selected.lines.tolist()):
            selected.process_one(logits[line].numpy(), index)

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> tuple[U32, npt.NDArray[np.bool_]]:
        tokens, is_bad = np.zeros(len(logits), np.uint32), np.zeros(len(logits), np.bool_)
        given = {name: columns[name].tolist() for name in (*SAMPLER_FIELDS, "sample_index")}
        for i, row in enumerate(logits.float().numpy()):
            params = sampling_params({name: column[i] for name, column in given.items()})
            token = sample_token(row, params, given["sample_index"][i], int(columns.positions[i]))
            tokens[i], is_bad[i] = token or 0, token is None
        return tokens, is_bad

    def logprobs(self, logits: torch.Tensor, lines: I64, token_ids: U32, num_top: int) -> TopLogprobs:
        n = len(lines)
        values, ids = np.full((n, 1 + num_top), np.nan, np.float32), np.zeros((n, 1 + num_top), np.uint32)
        ranks, is_bad = np.zeros(n, np.uint32), np.zeros(n, np.bool_)
        for i, row in enumerate(logits[torch.from_numpy(lines)].float()):
            is_bad[i] = bool(row.isnan().any()) or not bool(row.max().isfinite())
            if not is_bad[i]:
                values[i], ids[i], ranks[i] = exact_ops.top_logprobs(row, int(token_ids[i]), num_top)
        return TopLogprobs(values, ids, ranks, is_bad)

    def filter_logits(self, logits: torch.Tensor, lines: I64, columns: SamplingColumns) -> tuple[torch.Tensor, U32]:
        given = {name: columns[name].tolist() for name in SAMPLER_FIELDS}
        rows = logits[torch.from_numpy(lines)].float().numpy()
        found = np.empty_like(rows)
        for i, row in enumerate(rows):
            found[i] = filtered(row, sampling_params({name: column[i] for name, column in given.items()}))
        return torch.from_numpy(found), (found > -np.inf).sum(axis=1, dtype=np.uint32)


def _key_lens(batch: ForwardBatch) -> npt.NDArray[np.int32]:
    """Number of keys that each row sees if attention is not causal."""
    return batch.context_lens + np.diff(batch.query_starts) if batch.key_lens is None else batch.key_lens


def _attend(
    q: torch.Tensor,
    cache: Cache,
    tables: torch.Tensor,
    positions: torch.Tensor,
    key_lens: torch.Tensor | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """Attention of up to TOKEN_TILE tokens, each with its own table, by online softmax over tiles of keys."""
    count, missing = len(q), TOKEN_TILE - len(q)
    q, tables = F.pad(q, (0, 0, 0, 0, 0, missing)), F.pad(tables, (0, 0, 0, missing))
    first, ends = _sights(positions, key_lens, shape.window)
    if shape.chunk is not None:
        first = torch.maximum(first, positions // shape.chunk * shape.chunk)
    first, ends, positions = (F.pad(column, (0, missing)) for column in (first, ends, positions))
    heads = shape.heads
    group, dim = heads.num_q_heads // heads.num_kv_heads, heads.head_dim
    grouped = q.float().view(TOKEN_TILE, heads.num_kv_heads, group, dim) * shape.scale
    best = torch.full((TOKEN_TILE, heads.num_kv_heads, group, 1), -torch.inf)
    total, acc = torch.zeros_like(best), torch.zeros_like(grouped)
    if shape.sinks is not None:
        best, total = shape.sinks.view(heads.num_kv_heads, group, 1).expand_as(best), torch.ones_like(best)
    for start in range(0, int(ends.max()), KEY_TILE):
        keys = torch.arange(start, start + KEY_TILE)
        is_visible = (keys >= first[:, None]) & (keys < ends[:, None])  # [TOKEN_TILE, KEY_TILE]
        k, v = _gather(cache, tables, keys, is_visible)
        scores = exact_ops.matmul(grouped, k)
        if shape.soft_cap is not None:
            scores = torch_ops.soft_cap(scores, shape.soft_cap)
        if shape.bias is not None:
            values = shape.bias.values
            distances = (shape.bias.zero + keys - positions[:, None]).clamp(0, values.shape[1] - 1)
            scores += values[:, distances].transpose(0, 1).reshape(scores.shape)
        scores = scores.masked_fill(~is_visible[:, None, None], -torch.inf)
        top = torch.maximum(best, scores.amax(-1, keepdim=True))
        safe = top.masked_fill(top == -torch.inf, 0.0)
        weights, shrink = exact_ops.exp(scores - safe), exact_ops.exp(best - safe)
        total = total * shrink + exact_ops.ordered_sum(weights)
        acc = acc * shrink + exact_ops.matmul(weights, v)
        best = top
    return (acc / total)[:count].reshape(count, heads.num_q_heads, dim).to(q.dtype)


def _sights(
    positions: torch.Tensor, key_lens: torch.Tensor | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that each token sees, and one past the last."""
    ends = positions + 1 if key_lens is None else key_lens
    if window is None:
        return torch.zeros_like(ends), ends
    if key_lens is None:
        return (ends - window).clamp_min(0), ends
    reach = window // 2
    return (positions - reach).clamp_min(0), torch.minimum(positions + reach + 1, key_lens)


def _gather(
    cache: Cache, tables: torch.Tensor, keys: torch.Tensor, is_visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [tokens, kv_heads, dim, KEY_TILE] and values [tokens, kv_heads, KEY_TILE, dim], 0 if not visible."""
    block_size = cache[0].shape[-1]
    index = (keys // block_size).clamp_max(tables.shape[1] - 1)
    blocks = torch.where(is_visible, tables[:, index], 0)
    offsets = (keys % block_size).expand_as(blocks)
    mask = is_visible[:, :, None, None]
    k = cache[0][blocks, :, :, offsets].float().where(mask, 0.0)  # [tokens, KEY_TILE, kv_heads, dim]
    v = cache[1][blocks, :, offsets].float().where(mask, 0.0)
    return k.permute(0, 2, 3, 1), v.transpose(1, 2)
