"""Drafts from a second, smaller model with the same vocabulary, sampled with the noise of the row itself.

A token has the largest sum of logit and noise, and the noise is a function of (seed, sample, position). So a draft that
is sampled with the noise of its position is what the row samples there if both models nearly agree. If the large model
is surer than the draft model, the most likely token is right more often. Which of them is proposed follows from the
first drafts of all rows (sampler.py).

The keys and values of the draft model lie beside those of the row: its pool has the blocks of the row's pool, and it
reads the row's block table. Each slot has a mark of the tokens up to it:

    marks of a row's slots   a a a a | a a b b | b ...      a: of these tokens. b: of others
    to compute                           ^ from here to the newest token

So blocks that were cached, moved, copied, freed or never computed need no message: what has no mark of the row's tokens
is computed again, in pieces of `max_tokens`. Rows of one prefix share the blocks of both models.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from step_protocol.columns import I64, U32, Bools
from worker_svc.engine.backend import Backend
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.model import DecoderModel
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.encoder.families import encoder_of
from worker_svc.engine.encoder_decoder.config import is_encoder_decoder
from worker_svc.engine.engine_info import choose_dtype
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.sampler import NO_TOKENS, DraftSampler, Sampled, mean_draft_s

U64 = npt.NDArray[np.uint64]

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that a product loses no bits


class DraftModel:
    """Proposes what a smaller model samples. Called by the model thread, after a step."""

    name = "draft"

    def __init__(
        self,
        model: DecoderModel,
        pool: KVCachePool,
        backend: Backend,
        rows: OpenRows,
        *,
        max_tokens: int,
        max_len: int,
    ) -> None:
        """`max_tokens` of one pass; `max_len` of a row, with drafts."""
        self._model, self._pool, self._rows = model, pool, rows
        self._max_tokens, self._max_len, self._sampler = max_tokens, max_len, DraftSampler(backend, rows)
        self._marks: U64 = np.zeros(pool.num_blocks * pool.block_size, np.uint64)
        num_rows = len(rows.is_open)
        self._chains: U64 = np.zeros((num_rows, max_len), np.uint64)
        self._num_chained: I64 = np.zeros(num_rows, np.int64)
        self._num_computed: I64 = np.zeros(num_rows, np.int64)
        self._factors: U64 = np.cumprod(np.full(max_len, FACTOR), dtype=np.uint64)
        self.draft_s = 0.0

    def close(self, row: int) -> None:
        self._num_chained[row] = self._num_computed[row] = 0
        self._sampler.kind.forget(row)

    def propose(self, rows: I64, counts: I64) -> list[list[int]]:
        self._sampler.learn(rows)
        counts = self._possible(rows, counts)
        lines, first = self._catch_up(rows, np.flatnonzero(counts))
        drafts = self._sampler.extend(rows[lines], counts[lines], first, self._compute_drafts)
        return [drafts.get(row, []) for row in rows.tolist()]

    def _possible(self, rows: I64, counts: I64) -> I64:
        """How many drafts the model can compute: it reads the tokens up to the one before the last draft."""
        ends = self._rows.num_tokens[rows]
        room = np.minimum(self._rows.table_lens[rows] * self._pool.block_size, self._max_len) - ends + 1
        return np.where(self._extend_chains(rows, ends), np.clip(room, 0, counts), 0)

    # What is computed

    def _extend_chains(self, rows: I64, ends: I64) -> Bools:
        """Which rows the model can read: it knows neither images nor ids that only the other model has."""
        return np.array(
            [self._extend_chain(*pair) for pair in zip(rows.tolist(), ends.tolist(), strict=True)], np.bool_
        )

    def _extend_chain(self, row: int, end: int) -> bool:
        if end > self._max_len:
            return False
        start = int(self._num_chained[row])
        token_ids = self._rows.tokens_of(row)[start:end]
        if len(token_ids) and int(token_ids.max()) >= self._model.vocab_size:
            return False
        self._chains[row, start:end] = self._chained(row, start, token_ids)
        self._num_chained[row] = end
        return True

    def _chained(self, row: int, start: int, token_ids: U32) -> U64:
        """The marks of tokens from position `start` on."""
        end = start + len(token_ids)
        before = self._chains[row, start - 1] if start else np.uint64(1)
        chained: U64 = before + np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * self._factors[start:end])
        return chained

    def _start_of(self, row: int) -> int:
        """The first position of a row that must be computed; at most that of its newest token."""
        last = int(self._rows.num_tokens[row]) - 1
        start = max(
            0, min(int(self._num_computed[row]), last) - 2 * self._pool.block_size
        )  # its last block may be a copy
        positions = np.arange(start, last)
        is_same = self._marks[self._rows.expected_slots(np.full(len(positions), row), positions)]
        differs = np.flatnonzero(is_same != self._chains[row, start:last])
        return start + int(differs[0]) if len(differs) else last

    def _catch_up(self, rows: I64, lines: I64) -> tuple[I64, Sampled]:
        """Compute what is missing of these rows, up to their newest token. Returns those with their first draft."""
        starts, lens, left = [], [], self._max_tokens
        for row in rows[lines].tolist():
            start = self._start_of(row)
            count = min(int(self._rows.num_tokens[row]) - start, left)
            starts.append(start)
            lens.append(count)
            left -= count
        first, query_lens = np.array(starts, np.int64), np.array(lens, np.int64)
        is_computed = query_lens > 0
        lines, first, query_lens = lines[is_computed], first[is_computed], query_lens[is_computed]
        is_done = first + query_lens == self._rows.num_tokens[rows[lines]]
        return lines[is_done], self._compute(rows[lines], first, query_lens, is_done)

    def _compute_drafts(self, rows: I64, nth: int) -> Sampled:
        """The draft after the `nth` one of these rows."""
        ones = np.ones_like(rows)
        return self._compute(rows, self._rows.num_tokens[rows] + nth - 1, ones, ones > 0)

    # A pass

    def _compute(self, rows: I64, context_lens: I64, query_lens: I64, is_done: Bools) -> Sampled:
        """Compute tokens of rows, and sample what follows those of the rows that are done."""
        if not len(rows):
            return NO_TOKENS
        started, forward = time.perf_counter(), self._sampler.batch(rows, context_lens, query_lens, is_done)
        self._mark(rows, context_lens, query_lens, forward.slots, forward.token_ids.astype(np.uint32))
        logits = self._model.forward(forward, self._pool)
        self._num_computed[rows] = context_lens + query_lens
        sampled = self._sampler.sample(logits, rows[is_done], (context_lens + query_lens)[is_done])
        if len(forward.token_ids) <= 2 * len(rows):
            self.draft_s = mean_draft_s(self.draft_s, started, len(rows))
        return sampled

    def _mark(self, rows: I64, context_lens: I64, query_lens: I64, slots: I64, token_ids: U32) -> None:
        """Mark the slots, and add drafts to the chains."""
        end = 0
        for row, start, count in zip(rows.tolist(), context_lens.tolist(), query_lens.tolist(), strict=True):
            end += count
            if start + count > self._num_chained[row]:  # a draft
                self._chains[row, start : start + count] = self._chained(row, start, token_ids[end - count : end])
            self._marks[slots[end - count : end]] = self._chains[row, start : start + count]


def draft_config(checkpoint: Checkpoint, folder: Path) -> ModelConfig:
    """The decoder of a folder that can propose drafts. Raises ValueError."""
    if is_encoder_decoder(checkpoint.config) or encoder_of(checkpoint.config) is not None:
        raise ValueError(f"speculate: the model of {folder} is not a decoder, so it cannot propose drafts")
    model = parse_config(checkpoint.config)
    if model.is_recurrent:
        raise ValueError(f"speculate: the model of {folder} has recurrent layers, so it cannot propose drafts")
    return model


def draft_block_bytes(config: EngineConfig) -> int:
    """Bytes that each block of the pool takes in the pool of the draft model; 0 if the settings name none."""
    if config.proposer != "draft" or config.draft_dir is None:
        return 0
    checkpoint = Checkpoint(config.draft_dir)
    model, dtype = draft_config(checkpoint, config.draft_dir), getattr(torch, choose_dtype(config, checkpoint))
    return KVCachePool.bytes_per_block(model.kv_layouts(), config.block_size, dtype)
