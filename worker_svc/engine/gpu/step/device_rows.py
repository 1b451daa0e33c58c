"""Records of the open rows on the device: int32 words in the layout of `kernels/record.py`, updated by deltas."""

from __future__ import annotations

import numpy as np
import torch

from request_fields.fields import MAX_BANNED_IDS, SAMPLER_FIELDS, Kind, SamplingParams
from step_protocol.columns import I32, I64
from step_protocol.messages import StepBatch
from worker_svc.engine.gpu.kernels.record import TABLE, WORDS
from worker_svc.engine.gpu.kernels.sampler.filters import STORED_AS
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.positions import RowPositions

HEAD_WORDS = TABLE
MAX_INT32 = 2**31 - 1
NO_DELTAS: I32 = np.empty((0, 2), np.int32)


def make_state(max_num_seqs: int, max_blocks: int, device: torch.device) -> torch.Tensor:
    """Records of all rows, int32 [max_num_seqs, HEAD_WORDS + max_blocks + MAX_BANNED_IDS]."""
    return torch.zeros(max_num_seqs, HEAD_WORDS + max_blocks + MAX_BANNED_IDS, dtype=torch.int32, device=device)


def sampling_words(params: SamplingParams, sample_index: int) -> I32:
    """The words of a record before its block table; its last token is 0."""
    words = np.zeros(HEAD_WORDS, np.int32)
    for name, field in SAMPLER_FIELDS.items():
        words[WORDS[name] :][: 1 + (field.kind is Kind.UINT64)] = _to_words(name, field.kind, getattr(params, name))
    words.view(np.uint32)[WORDS["sample_index"]] = sample_index
    return words


def _to_words(name: str, kind: Kind, value: float) -> I32:
    if name in STORED_AS:
        value = float(STORED_AS[name](value))
    if kind is Kind.FLOAT:
        return np.array([value], np.float32).view(np.int32)
    if kind is Kind.UINT64:
        return np.array([value], "<u8").view(np.int32)
    return np.array([min(int(value), MAX_INT32)], np.int32)  # kernels compare signed words


def changed_words(batch: StepBatch, rows: OpenRows, positions: RowPositions, stride: int) -> I32:
    """(word, value) [N, 2] of every change by the batch to rows that are open now. No word occurs twice.

    `stride` is the length of a record on the device.
    """
    if not batch.opens and not len(batch.table_rows):
        return NO_DELTAS
    words, values = _opened_words(batch, rows, positions, stride)
    is_known = (batch.table_rows < len(rows.tables)) & (batch.table_indices < rows.tables.shape[1])
    changed, indices = batch.table_rows[is_known].astype(np.int64), batch.table_indices[is_known].astype(np.int64)
    words.append(changed * stride + HEAD_WORDS + indices)
    values.append(rows.tables[changed, indices])
    found, first = np.unique(np.concatenate(words), return_index=True)
    return np.stack((found, np.concatenate(values)[first]), axis=1).astype(np.int32)


def _opened_words(
    batch: StepBatch, rows: OpenRows, positions: RowPositions, stride: int
) -> tuple[list[I64], list[I32]]:
    words, values = [], []
    for item in batch.opens:
        if item.row >= len(rows.is_open) or not rows.is_open[item.row]:
            continue
        table = rows.tables[item.row, : rows.table_lens[item.row]]
        head = sampling_words(item.sampling, item.sample_index)
        head[WORDS["num_banned"]] = len(item.banned_ids)
        head[WORDS["banned_before"]] = min(item.banned_before, MAX_INT32)
        head[WORDS["num_tokens"]], head[WORDS["prompt_len"]] = rows.num_tokens[item.row], rows.prompt_lens[item.row]
        head[WORDS["is_processed"]] = rows.is_always_processed(item.row)
        head[WORDS["position_delta"]] = positions.delta(item.row)
        record = np.concatenate((head, table))
        words.append(item.row * stride + np.arange(len(record), dtype=np.int64))
        values.append(record.astype(np.int32))
        words.append((item.row + 1) * stride - MAX_BANNED_IDS + np.arange(len(item.banned_ids), dtype=np.int64))
        values.append(item.banned_ids.astype(np.int32))
    return words, values
