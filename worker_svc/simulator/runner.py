"""A runner without a model, for load tests, failure tests and capacity studies.

Every slot of its KV pool holds a 64-bit digest of the token prefix that produced it. Each step of a row first compares
the slots of its table that the model would read with the row's history: a wrong block, a stale block or a bad prefix
hit is a RowError that names the first wrong position. The next token is a function of that digest (`tokens`), so any
other error shows in the output. Time is simulated too: a step sleeps for its configured duration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prefix_index.hashing import content_ids, input_digest
from step_protocol.columns import EMPTY, F32, I64, U32, Bools
from step_protocol.features import BeamCandidates, LogprobColumns, PromptLogprobs
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from step_protocol.types import CarriedInput, RowErrorCode, TensorChecksum
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.backend import TopLogprobs
from worker_svc.engine.checkpoint.model_folder import open_regular, tensor_sums
from worker_svc.engine.config import EngineConfig, StagedWeights
from worker_svc.engine.decoder.pool.block_payload import MovableBlocks
from worker_svc.engine.row_part import RowPart
from worker_svc.engine.rows.beams import BeamLines
from worker_svc.engine.rows.logprobs import LogprobRows, PromptTargets, spread, to_columns
from worker_svc.engine.sampling.grammars import RowMasks, compiled_grammars
from worker_svc.engine.sampling.processors import ProcessedRows
from worker_svc.engine.step import CheckedStep, RowErrors
from worker_svc.engine.step_runner import StepRunner
from worker_svc.simulator.model import SimAdapter, SimConfig, read_info, read_sim_adapter
from worker_svc.simulator.pool import U64, Histories, SimPool, mix
from worker_svc.simulator.tokens import GOLDEN, GREEDY_BELOW, read_vocabulary, start_digest

log = logging.getLogger(__name__)

POISON = np.uint64(GOLDEN)  # written by rows with a wrong context: matches no prefix


class _RowHistories(RowPart):
    """Starts the history of each row that opens, or continues another one."""

    def __init__(self, start: Callable[[int, Sequence[CarriedInput]], None]) -> None:
        self._start = start

    def open(self, item: RowOpen) -> None:
        self._start(item.row, item.inputs)

    def move(self, sources: I64, targets: I64) -> None:
        for row in targets.tolist():
            self._start(row, ())


class SimRunner(StepRunner):
    """A step is computed when it is called. It reads config.json and the tokenizer of the model folder, never weights.

    num_blocks None: 4096. max_model_len may be above the model's own. ValueError for an unusable folder.
    """

    has_new_weights = True

    def __init__(self, config: EngineConfig, sim: SimConfig) -> None:
        self._sim = sim
        self._start = 0  # of all contexts; a function of the weights
        self._vocabulary = read_vocabulary(config.model_dir, eos_probability=sim.eos_probability)
        self._printable = np.array(self._vocabulary.printable_ids, np.uint32)
        info = read_info(config)
        grammars = compiled_grammars(config.model_dir, info.vocab_size, info.eos_token_ids)
        self.adapters: AdapterStore[SimAdapter, SimAdapter] = AdapterStore(
            read_sim_adapter,
            lambda adapter: adapter,
            max_resident=config.max_adapters,
            max_loaded=config.max_loaded_adapters if config.max_adapters else 0,
        )
        for name, folder in config.adapters:
            self.adapters.load(name, folder)
        self._row_adapters = RowAdapters(info.max_num_seqs, self.adapters.find)
        adapters = self._row_adapters
        self._serve(info, grammars=grammars, hidden_size=info.hidden_size, adapters=adapters, images=info.images)
        self._rows.add_parts(_RowHistories(self._start_history))
        if config.proposer not in (None, "suffix"):
            raise ValueError(f"speculate={config.speculate} needs a model that computes; a simulated worker has suffix")
        self._speculate(config)
        self._pool = SimPool(info.num_blocks, info.block_size)
        self._histories = Histories(info.max_num_seqs, info.max_model_len, info.block_size)

    def execute(self, batch: StepBatch) -> StepOutput:
        started = time.perf_counter()
        output = super().execute(batch)
        left_s = self._sim.step_s(batch.query_lens) - (time.perf_counter() - started)
        if left_s > 0:  # a sleep of 0 also gives the processor away
            time.sleep(left_s)
        output.forward_us = int((time.perf_counter() - started) * 1e6)
        return output

    def check_update(self, files: Sequence[Path]) -> list[TensorChecksum]:
        """The tensors of the last file. They are compared with no model. Raises CheckpointError."""
        return tensor_sums(files[-1])

    def stage(self, version: int, updates: Sequence[Path]) -> StagedWeights:
        """Weights whose digest follows from the files."""
        content = xxhash.xxh3_128()
        for path in updates:
            with open_regular(path) as file:
                content.update(file.read())
        digest = content.hexdigest() if updates else ""
        revision = f"{self.info.revision}-{digest}" if updates else ""
        info = replace(self.info, weight_version=version, weights_digest=digest, weights_revision=revision)
        return StagedWeights(info, frozenset(updates), int(digest[:16] or "0", 16))

    def activate(self, staged: StagedWeights) -> None:
        """Rows that open from now on have contexts that begin with the digest of the weights."""
        self.info, self._start = staged.info, staged.weights
        self.forget_prefixes()

    def sleep(self, tags: Sequence[str]) -> None:
        """There is no memory to free."""
        if "kv_cache" in tags:
            self.forget_prefixes()

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        return self._pool.committed_blocks()

    def forget_prefixes(self) -> None:
        self._pool.uncommit(np.arange(self.info.num_blocks))

    def movable_blocks(self) -> MovableBlocks:
        return MovableBlocks(self._pool, self._pool.block_parts())

    def _copy_blocks(self, sources: I64, targets: I64) -> None:
        self._pool.copy(sources, targets)

    def _commit_blocks(self, blocks: I64, digests: list[bytes]) -> None:
        self._pool.commit(blocks, digests)

    def _start_history(self, row: int, inputs: Sequence[CarriedInput]) -> None:
        """Sets the history of a row to its tokens. The positions of inputs follow from the data of the inputs, so that
        KV of another input with the same ids differs.
        """
        num_tokens = int(self._rows.num_tokens[row])
        token_ids = self._rows.token_ids(np.full(num_tokens, row), np.arange(num_tokens))
        for item in inputs:
            found = content_ids(input_digest(item.kind, item.dtype, item.shape, item.data), item.length)
            token_ids[item.start : item.start + item.length] = np.frombuffer(found, "<u4")
        adapter = self._row_adapters.in_use.get(int(self._row_adapters.numbers[row]))
        start = self._start ^ (0 if adapter is None else start_digest(adapter.digest))
        self._histories.set(row, self._places(row, num_tokens), token_ids, start)

    def _places(self, row: int, num_tokens: int) -> I64:
        """For each token of a row, a number that identifies its position on all axes: its index, if there are no
        images before it."""
        rows, indices = np.array([row]), np.arange(num_tokens)
        positions = self._tables.positions
        axes = positions.on_axes(rows, np.array([0, num_tokens]), indices)
        if axes is None:
            return positions.shifted(np.full(num_tokens, row), indices)
        time, height, width = axes
        places: I64 = time ^ ((height - time) << 16) ^ ((width - time) << 24)
        return places

    def _run_step(self, batch: StepBatch, errors: RowErrors) -> StepOutput:
        plan = self._checker.check(batch, errors)
        if plan.num_after is not None:
            self._add_drafts(plan, plan.num_after)
        tokens = self._rows.token_ids(plan.token_rows, plan.positions)
        digests = self._histories.digests[plan.token_rows, plan.positions + 1]
        self._pool.write(plan.slots, tokens, digests)
        self._rows.mark_computed(plan.rows, plan.ends)
        is_wrong = self._find_wrong(plan, digests, errors)
        is_good = ~is_wrong[plan.sources]
        for row in plan.sampling_rows[~is_good]:
            errors.add(int(row), "the parent row of this fork has failed", RowErrorCode.INTERNAL)
        rows, positions = plan.sampling_rows, plan.sampled_positions
        grammars = self._tables.grammars
        pending = None if grammars is None else grammars.start(rows, positions)
        masks = None if pending is None else pending.result()
        if masks is not None:
            errors.add_all(masks.errors(rows))
            is_good[list(masks.failures)] = False
        token_ids = self._sample(rows, positions, masks)
        is_good &= self._is_token(plan, token_ids, ~is_good)
        rows, positions, token_ids = rows[is_good], positions[is_good], token_ids[is_good]
        beams = self._tables.beams.lines(rows)
        output = StepOutput(batch.step_id, EMPTY, EMPTY, logprobs=self._logprobs(rows, positions, token_ids))
        output.add(self._prompt_logprobs(plan, plan.rows[is_wrong]))
        output.add(None if beams is None else self._candidates(beams, rows, positions))
        self._append_samples(plan, rows, positions, token_ids, output)
        self._histories.append(rows, positions, self._tables.positions.shifted(rows, positions), token_ids)
        return output

    def _add_drafts(self, plan: CheckedStep, num_after: I64) -> None:
        """Adds the drafts of a step to the histories of their rows."""
        for nth in range(int(num_after.max(initial=0)), 0, -1):
            lines = num_after == nth
            rows, positions = plan.sampling_rows[lines], plan.sampled_positions[lines]
            places = self._tables.positions.shifted(rows, positions)
            token_ids = self._rows.token_ids(rows, positions).astype(np.uint32)
            self._histories.append(rows, positions, places, token_ids)

    def _logprobs(self, rows: I64, positions: I64, token_ids: U32) -> LogprobColumns | None:
        asked = self._tables.logprobs.asked(rows)
        if asked is None:
            return None
        draws = mix(self._histories.digests[rows, positions])
        return sampled_columns(draws, token_ids, asked, self.info.vocab_size)

    def _prompt_logprobs(self, plan: CheckedStep, bad_rows: I64) -> PromptLogprobs | None:
        targets = self._tables.logprobs.prompt_targets(plan.token_rows, plan.positions)
        if targets is None:
            return None
        draws = mix(self._histories.digests[targets.rows, targets.positions])
        return prompt_columns(draws, targets, bad_rows, self.info.vocab_size)

    def _candidates(self, beams: BeamLines, rows: I64, positions: I64) -> BeamCandidates:
        """Candidates as a function of the row's digest. Penalties and token id rules have no effect."""
        found = []
        for line, count in zip(beams.lines.tolist(), beams.counts.tolist(), strict=True):
            digest = self._histories.digests[rows[line], positions[line]]
            draws = mix(digest ^ np.arange(self.info.vocab_size, dtype=np.uint64))
            values = -(draws >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)
            ids = np.argsort(-values, kind="stable")[:count]
            found.append((ids.astype(np.uint32), values[ids]))
        repeated = np.repeat(beams.rows, beams.counts).astype(np.uint32)
        return BeamCandidates(repeated, *(np.concatenate(column) for column in zip(*found, strict=True)))

    def _find_wrong(self, plan: CheckedStep, digests: U64, errors: RowErrors) -> Bools:
        """Rows whose tables differ from their history, and rows that read blocks written by such rows in this step."""
        is_wrong = np.zeros(len(plan.rows), np.bool_)
        token_index = np.repeat(np.arange(len(plan.rows)), np.diff(plan.starts))
        while True:
            found = ~is_wrong & self._differs(plan)
            if not found.any():
                return is_wrong
            for i in np.flatnonzero(found):
                message = self._describe(int(plan.rows[i]), int(plan.context_lens[i]), int(plan.ends[i]))
                log.error("row %d: %s", plan.rows[i], message)  # a retry on another worker may hide it
                errors.add(int(plan.rows[i]), message, RowErrorCode.INTERNAL)
            is_wrong |= found
            spoilt = found[token_index]
            tokens = self._rows.token_ids(plan.token_rows[spoilt], plan.positions[spoilt])
            self._pool.write(plan.slots[spoilt], tokens, digests[spoilt] ^ POISON)

    def _differs(self, plan: CheckedStep) -> Bools:
        """[B] Whether a row's table differs from its history up to its last computed token. Full blocks are compared by
        their sums, the last block slot by slot."""
        size = self.info.block_size
        num_full = plan.ends // size
        width = int(num_full.max(initial=0))
        tables = self._rows.tables[plan.rows]
        is_full = np.arange(width) < num_full[:, None]
        if self.info.attention_window is not None:
            is_full &= np.arange(width) >= self._first_read(plan.context_lens)[:, None] // size
        blocks = np.where(is_full, tables[:, :width], 0)
        is_other = self._pool.sums[blocks] != self._histories.sums[plan.rows, :width]
        differs: Bools = (is_other & is_full).any(axis=1)
        rest = np.flatnonzero(plan.ends % size)
        if not len(rest):
            return differs
        rows, last = plan.rows[rest], num_full[rest]
        is_used = np.arange(size) < (plan.ends[rest] % size)[:, None]
        positions = np.where(is_used, last[:, None] * size + np.arange(size), 0)
        found = self._pool.digests.reshape(-1, size)[tables[rest, last]]
        differs[rest] |= ((found != self._histories.digests[rows[:, None], positions + 1]) & is_used).any(axis=1)
        return differs

    def _first_read(self, context_lens: I64) -> I64:
        """[B] The first position that the next token of each row attends to."""
        window = self.info.attention_window
        return np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window + 1, 0)

    def _describe(self, row: int, start: int, end: int) -> str:
        first = int(self._first_read(np.array([start]))[0]) // self.info.block_size * self.info.block_size
        positions = np.arange(first, end)
        slots = self._rows.expected_slots(np.full(len(positions), row), positions)
        wrong = np.flatnonzero(self._pool.digests[slots] != self._histories.digests[row, first + 1 : end + 1])
        position, slot = int(positions[wrong[0]]), int(slots[wrong[0]])
        block, offset = divmod(slot, self.info.block_size)
        return (
            f"block {block} differs from this row's prefix at position {position} (offset {offset}): "
            f"{len(wrong)} of {len(positions)} positions are wrong"
        )

    def _sample(self, rows: I64, positions: I64, masks: RowMasks | None) -> U32:
        columns = self._rows.sampling_columns(rows, positions)
        is_greedy = columns["temperature"] < GREEDY_BELOW
        seeds, sample_indices = (np.where(is_greedy, 0, columns[name]) for name in ("seed", "sample_index"))
        keys = mix((columns.positions.astype(np.uint64) << np.uint64(32)) | sample_indices.astype(np.uint64))
        draws = mix(self._histories.digests[rows, positions] ^ mix(seeds.astype(np.uint64) ^ keys))
        token_ids: U32 = self._printable[draws % np.uint64(len(self._printable))]
        eos = self._vocabulary.eos_token_id
        ends = mix(draws) < np.uint64(self._vocabulary.eos_below)
        selected = self._rows.processed_rows(rows, positions)
        for line, logits in self._processed(selected, masks):
            token_ids[line] = self._draw_highest(int(draws[line]), logits)
            ends[line] &= eos is not None and logits[eos] > -np.inf
        if eos is not None:
            token_ids[ends] = eos
        for line, token_id in {} if masks is None else masks.forced.items():
            token_ids[line] = token_id
        return token_ids

    def _processed(self, selected: ProcessedRows | None, masks: RowMasks | None) -> Iterator[tuple[int, F32]]:
        """For each row that requests processing: its index and its logits. All logits are 1 before processing."""
        processed = [] if selected is None else selected.lines.tolist()
        masked = [] if masks is None else masks.lines.tolist()
        for line in sorted({*processed, *masked}):
            logits = np.ones(self.info.vocab_size, np.float32)
            if selected is not None and line in processed:
                selected.process_one(logits, processed.index(line))
            if masks is not None and line in masked:
                self._apply_mask(logits, masks.is_banned[masked.index(line)])
            yield line, logits

    def _apply_mask(self, logits: F32, is_banned: Bools) -> None:
        logits[is_banned] = -np.inf
        if logits.max() == -np.inf:  # as in ModelRunner, the output then ends
            logits[[id_ for id_ in self.info.eos_token_ids if not is_banned[id_]]] = 0.0

    def _draw_highest(self, draw: int, logits: F32) -> int:
        """One of the printable tokens with the highest logit; if all of them are banned, one of all tokens."""
        among = self._printable
        if logits[among].max() == -np.inf:
            among = np.arange(len(logits), dtype=np.uint32)
        highest = among[logits[among] == logits[among].max()]
        return int(highest[draw % len(highest)])


def top_logprobs(draws: U64, chosen: U32, num_top: int, vocab_size: int) -> TopLogprobs:
    """As `tokens.sim_logprobs`, for each of n tokens. `draws` [n]: the mixed digests of their contexts."""
    shifts = (draws % np.uint64(vocab_size)).astype(np.int64)[:, None]
    top = (shifts + np.arange(num_top)) % vocab_size
    ids = np.concatenate((chosen[:, None].astype(np.int64), top), axis=1)
    ranks = (ids - shifts) % vocab_size + 1
    values = (ranks / -8).astype(np.float32)
    return TopLogprobs(values, ids.astype(np.uint32), ranks[:, 0].astype(np.uint32), np.zeros(len(ids), np.bool_))


def sampled_columns(draws: U64, token_ids: U32, asked: LogprobRows, vocab_size: int) -> LogprobColumns:
    """Columns of the sampled tokens; `draws` [S] and `token_ids` [S] are of all rows that sampled."""
    lines = asked.lines
    found = top_logprobs(draws[lines], token_ids[lines], int(asked.num_top.max()), vocab_size)
    extras = _extras(found, draws[lines], asked.is_processed, asked.has_digest, vocab_size)
    return spread(to_columns(found, asked.num_top, extras), lines, len(token_ids))


def _extras(
    found: TopLogprobs, draws: U64, is_processed: Bools, has_digest: Bools, vocab_size: int
) -> dict[str, npt.NDArray[Any]]:
    """The extra columns that rows ask for. Processed values are the raw ones, and the digest of logits is `draws`."""
    extras: dict[str, npt.NDArray[Any]] = {}
    if is_processed.any():
        extras["raw_logprobs"] = found.values[:, 0]
        extras["num_kept"] = np.where(is_processed, np.uint32(vocab_size), np.uint32(0))
    if has_digest.any():
        extras["logits_digests"] = np.where(has_digest, draws, np.uint64(0))
    return extras


def prompt_columns(draws: U64, targets: PromptTargets, bad_rows: I64, vocab_size: int) -> PromptLogprobs:
    """Columns of prompt tokens, without those of bad rows. `draws` [n] are of the contexts of the targets."""
    found = top_logprobs(draws, targets.token_ids, int(targets.num_top.max()), vocab_size)
    is_kept = ~np.isin(targets.rows, bad_rows)
    extras = _extras(found, draws, targets.is_processed, targets.has_digest, vocab_size)
    columns = to_columns(found, targets.num_top, extras).select(is_kept)
    return PromptLogprobs(
        targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32), columns
    )
