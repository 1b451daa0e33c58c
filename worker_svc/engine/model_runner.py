"""Runs steps: applies a batch's changes, checks its rows, computes, samples. The engine's way in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from worker_svc.engine.architectures import ModelConfig, parse_config
from worker_svc.engine.backend import I64, ForwardBatch, make_backend
from worker_svc.engine.batch import U32, BadBatchError, Bools, RowErrorCode, SamplingParams, StepBatch, StepOutput
from worker_svc.engine.checkpoint import Checkpoint, CheckpointError
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.kv_cache import DEFAULT_MEMORY, HASH_BYTES, KVCachePool
from worker_svc.engine.machine import available_cores, available_memory, has_bfloat16
from worker_svc.engine.model import DecoderModel, WeightLoader
from worker_svc.engine.rows import RowErrors, RowTable

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """A loaded model with its KV pool and rows. One thread at a time may call it.

    Raises CheckpointError for a model folder that cannot be served, BackendUnavailableError for a backend that this
    build or machine cannot run, ValueError for settings that contradict the model. `progress` gets fractions up to 1.0
    while weights load.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[float], None] | None = None) -> None:
        self._threads = config.threads or available_cores()
        self._bound_thread: int | None = None
        self._bind_thread()
        checkpoint = Checkpoint(config.model_dir)
        model = parse_config(checkpoint.config)
        self._backend = make_backend(config.backend, self._threads, config.determinism)
        dtype = _choose_dtype(config, checkpoint)
        num_blocks = config.num_blocks or _fitting_blocks(config, model, DTYPES[dtype])
        max_model_len = _choose_max_model_len(config, model, num_blocks)
        loader = WeightLoader(checkpoint, model, self._backend, DTYPES[dtype])
        loader.check()
        self._model = DecoderModel(loader, model, self._backend, max_model_len, progress)
        self._pool = KVCachePool(
            model.num_layers,
            num_blocks,
            config.block_size,
            model.heads.num_kv_heads,
            model.heads.head_dim,
            DTYPES[dtype],
        )
        self._rows = RowTable(config.max_num_seqs, max_model_len, config.block_size, num_blocks, model.vocab_size)
        self._slot_owner = np.zeros(num_blocks * config.block_size, np.int64)
        self.info = EngineInfo(
            model=config.model_name or config.model_dir.resolve().name,
            revision=checkpoint.revision(DTYPES[dtype]),
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=_eos_token_ids(checkpoint),
            default_sampling=_default_sampling(checkpoint),
            dtype=dtype,
            determinism=config.determinism,
            backend=self._backend.name,
        )

    def execute(self, batch: StepBatch) -> StepOutput:
        """Applies and runs one step. A bad row becomes a RowError and harms no other.

        Raises BadBatchError, with nothing applied, for columns that contradict each other or the pool.
        """
        started = time.perf_counter()
        self._check_columns(batch)
        self._bind_thread()
        with torch.inference_mode():
            errors = RowErrors()
            self._apply_changes(batch, errors)
            plan = self._plan(batch, errors)
            rows, token_ids = self._run(plan, errors) if len(plan.forward.rows) else (plan.rows, plan.rows)
        elapsed_us = int((time.perf_counter() - started) * 1e6)
        return StepOutput(
            batch.step_id, rows.astype(np.uint32), token_ids.astype(np.uint32), errors.to_list(), elapsed_us
        )

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        """Block ids [N], their hashes and their tokens [N, block_size] of all committed blocks, in pieces."""
        return self._pool.committed_blocks()

    def reset_rows(self) -> None:
        """Closes all rows, for a new lease. Committed blocks stay."""
        self._rows.reset()

    def rows_used(self) -> int:
        """Open rows."""
        return self._rows.rows_used()

    def _bind_thread(self) -> None:
        """Thread counts belong to the calling thread, so they are set in whichever thread runs steps."""
        if self._bound_thread != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._bound_thread = threading.get_ident()

    def _check_columns(self, batch: StepBatch) -> None:
        num_rows, info = len(batch.rows), self.info
        columns = {"query_lens": batch.query_lens, "context_lens": batch.context_lens, "sample_mask": batch.sample_mask}
        for name, column in columns.items():
            _check_length(name, len(column), "rows", num_rows)
        num_tokens = int(batch.query_lens.sum(dtype=np.int64))
        _check_length("slot_mapping", len(batch.slot_mapping), "sum of query_lens", num_tokens)
        if num_tokens > info.max_num_batched_tokens:
            raise BadBatchError(f"{num_tokens} tokens are above max_num_batched_tokens {info.max_num_batched_tokens}")
        _check_length("table_indices", len(batch.table_indices), "table_rows", len(batch.table_rows))
        _check_length("table_blocks", len(batch.table_blocks), "table_rows", len(batch.table_rows))
        _check_length("copy_dst", len(batch.copy_dst), "copy_src", len(batch.copy_src))
        _check_length("commit_hashes", len(batch.commit_hashes), "commit_blocks", len(batch.commit_blocks))
        _check_length("fork_parents", len(batch.fork_parents), "fork_rows", len(batch.fork_rows))
        if any(len(digest) != HASH_BYTES for digest in batch.commit_hashes):
            raise BadBatchError(f"commit_hashes must have {HASH_BYTES} bytes each")
        for name in ("copy_src", "copy_dst", "commit_blocks"):
            block = int(getattr(batch, name).max(initial=0))
            if block >= info.num_blocks:
                raise BadBatchError(f"{name} names block {block}, the pool has {info.num_blocks}")

    def _apply_changes(self, batch: StepBatch, errors: RowErrors) -> None:
        self._rows.close(batch.close_rows)
        self._rows.open(batch.opens, errors)
        self._rows.change_tables(batch.table_rows, batch.table_indices, batch.table_blocks, errors)
        if len(batch.copy_src):
            self._pool.copy(self._backend, batch.copy_src.astype(np.int64), batch.copy_dst.astype(np.int64))
        if len(batch.commit_blocks):
            self._pool.commit(batch.commit_blocks.astype(np.int64), batch.commit_hashes)

    def _plan(self, batch: StepBatch, errors: RowErrors) -> _Plan:
        """What remains of the batch once bad rows are out."""
        is_bad = self._rows.find_bad(batch, errors)
        is_bad |= self._find_bad_slots(batch, is_bad, errors)
        keep = np.flatnonzero(~is_bad)
        tokens = _Tokens(batch, keep)
        forks = self._plan_forks(batch, keep, errors)
        samplers = np.flatnonzero(batch.sample_mask[keep])
        sources = np.concatenate((samplers, forks.parents))  # index among kept rows whose logits are sampled
        heads, logits_index = np.unique(sources, return_inverse=True)
        forward = ForwardBatch(
            token_ids=self._rows.token_ids(tokens.rows, tokens.positions),
            positions=tokens.positions.astype(np.int32),
            slots=tokens.slots,
            rows=tokens.batch_rows.astype(np.int32),
            query_starts=tokens.starts.astype(np.int32),
            context_lens=batch.context_lens[keep].astype(np.int32),
            tables=self._rows.tables,
            head_tokens=tokens.starts[heads + 1] - 1,
        )
        return _Plan(
            forward=forward,
            ends=tokens.ends,
            rows=np.concatenate((tokens.batch_rows[samplers], forks.rows)),
            positions=tokens.ends[sources],
            logits_index=logits_index,
        )

    def _find_bad_slots(self, batch: StepBatch, is_bad: Bools, errors: RowErrors) -> Bools:
        """Rows whose slots disagree with their table, or that write where another row of the batch writes."""
        keep = np.flatnonzero(~is_bad)
        tokens = _Tokens(batch, keep)
        expected = self._rows.expected_slots(tokens.rows, tokens.positions)
        found = np.zeros(len(batch.rows), np.bool_)
        for i in np.flatnonzero(expected != tokens.slots):
            errors.add(
                int(tokens.rows[i]),
                f"slot_mapping has slot {tokens.slots[i]} for position {tokens.positions[i]}, "
                f"the row's table has {expected[i]}",
            )
            found[tokens.batch_indices[i]] = True
        is_same = expected == tokens.slots
        slots, writers = expected[is_same], tokens.batch_indices[is_same]
        self._slot_owner[slots] = writers
        for i in np.flatnonzero(self._slot_owner[slots] != writers):
            errors.add(int(batch.rows[writers[i]]), f"slot {slots[i]} is written by another row of this step too")
            found[writers[i]] = True
        return found

    def _plan_forks(self, batch: StepBatch, keep: I64, errors: RowErrors) -> _Forks:
        """Forks whose parent runs in this step, by the parent's index among kept rows."""
        if not len(batch.fork_rows):
            return _Forks(np.empty(0, np.int64), np.empty(0, np.int64))
        index_of = {int(row): i for i, row in enumerate(batch.rows[keep])}
        ends = (batch.context_lens.astype(np.int64) + batch.query_lens)[keep]
        rows, parents = [], []
        for row, parent in zip(batch.fork_rows.tolist(), batch.fork_parents.tolist(), strict=True):
            message = self._fork_refusal(row, parent, index_of, ends)
            if message is not None:
                errors.add(row, message)
                continue
            rows.append(row)
            parents.append(index_of[parent])
        return _Forks(np.array(rows, np.int64), np.array(parents, np.int64))

    def _fork_refusal(self, row: int, parent: int, index_of: dict[int, int], ends: I64) -> str | None:
        if row >= self.info.max_num_seqs or not self._rows.is_open[row]:
            return "fork row is not open"
        if row in index_of:
            return "fork row computes in the step in which it is forked"
        if parent not in index_of:
            return f"fork parent {parent} does not compute in this step"
        end, known = int(ends[index_of[parent]]), int(self._rows.num_tokens(np.array([row]))[0])
        if end != known:
            return f"fork parent {parent} ends at {end} tokens, this row knows {known}"
        return None

    def _run(self, plan: _Plan, errors: RowErrors) -> tuple[I64, U32]:
        forward = plan.forward
        self._pool.write_tokens(forward.slots, forward.token_ids)
        logits = self._model.forward(forward, self._pool)
        self._rows.mark_computed(forward.rows.astype(np.int64), plan.ends)
        if not len(plan.rows):
            return plan.rows, np.empty(0, np.uint32)
        if len(plan.logits_index) != len(logits) or (plan.logits_index[1:] < plan.logits_index[:-1]).any():
            logits = logits[torch.from_numpy(plan.logits_index)]
        columns = self._rows.sampling_columns(plan.rows, plan.positions)
        token_ids, is_bad = self._backend.sample(logits, columns)
        for row in plan.rows[is_bad]:
            errors.add(int(row), "the logits hold NaN, infinity or no finite number", RowErrorCode.NAN)
        rows, positions, token_ids = plan.rows[~is_bad], plan.positions[~is_bad], token_ids[~is_bad]
        self._rows.append(rows, positions, token_ids)
        return rows, token_ids


class _Tokens:
    """The kept rows of a batch, spread over their tokens."""

    def __init__(self, batch: StepBatch, keep: I64) -> None:
        query_lens = batch.query_lens.astype(np.int64)
        all_starts = np.cumsum(query_lens) - query_lens
        lens = query_lens[keep]
        context_lens = batch.context_lens[keep].astype(np.int64)
        self.batch_rows = batch.rows[keep].astype(np.int64)  # [B]
        self.ends = context_lens + lens  # [B] sequence position after the last token
        self.starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lens)))  # [B + 1]
        within = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], lens)
        self.batch_indices = np.repeat(keep, lens)  # [T] index into the whole batch
        self.rows = np.repeat(self.batch_rows, lens)
        self.positions = np.repeat(context_lens, lens) + within
        self.slots = batch.slot_mapping[np.repeat(all_starts[keep], lens) + within].astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Forks:
    rows: I64
    parents: I64  # index among kept rows


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's computation: the forward pass, and who samples from which of its logits."""

    forward: ForwardBatch
    ends: I64  # [B] sequence positions that keys and values reach up to
    rows: I64  # [S] rows that sample
    positions: I64  # [S] sequence positions of the sampled tokens
    logits_index: I64  # [S] which logits each takes


def _check_length(name: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise BadBatchError(f"{name} has {length} entries, {of} has {expected}")


def _choose_dtype(config: EngineConfig, checkpoint: Checkpoint) -> Literal["float32", "bfloat16"]:
    if config.dtype == "bfloat16" and not has_bfloat16():
        logger.warning("this processor has no bfloat16 instructions; float32 is faster on it")
    if config.dtype != "auto":
        return config.dtype
    stored = checkpoint.stored_dtype()
    if stored is torch.float32:
        return "float32"
    if not has_bfloat16():
        logger.info("this processor has no bfloat16 instructions; weights are widened to float32")
        return "float32"
    return "bfloat16"


def _fitting_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    memory = config.kv_cache_memory or min(DEFAULT_MEMORY, available_memory() // 2)
    heads = model.heads
    per_block = KVCachePool.bytes_per_block(
        model.num_layers, config.block_size, heads.num_kv_heads, heads.head_dim, dtype
    )
    if memory < per_block:
        raise ValueError(f"kv_cache_memory of {memory} bytes holds no block; one takes {per_block} bytes")
    return memory // per_block


def _choose_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} is above the model's {limit}")
    chosen = config.max_model_len or limit
    if model.sliding_window is not None and model.sliding_window < chosen:
        logger.warning("max_model_len is capped to the model's sliding window of %d tokens", model.sliding_window)
        chosen = model.sliding_window
    capacity = num_blocks * config.block_size
    if capacity >= chosen or config.max_model_len is not None:
        return chosen  # a length that was asked for stays: workers of one model agree in it, not in their pools
    logger.warning("max_model_len is capped to the %d tokens that %d KV blocks hold", capacity, num_blocks)
    return capacity


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    ids = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    if ids is None:
        return ()
    found = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, found {ids!r}")
    return tuple(found)


def _default_sampling(checkpoint: Checkpoint) -> SamplingParams:
    given = checkpoint.generation_config
    temperature = 0.0 if given.get("do_sample") is False else given.get("temperature", 1.0)
    return SamplingParams(
        temperature=_or(temperature, 1.0),
        top_k=int(_or(given.get("top_k"), 0)),
        top_p=_or(given.get("top_p"), 1.0),
        min_p=_or(given.get("min_p"), 0.0),
        seed=0,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
