"""The entry point of the CPU engine. Runs steps: applies the changes of a batch, checks its rows, computes, samples."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from request_fields.checks import default_sampling
from step_protocol.columns import I64, U32
from step_protocol.messages import (
    EMPTY,
    NO_CANDIDATES,
    BadBatchError,
    RowErrorCode,
    StepBatch,
    StepOutput,
)
from worker_svc.engine.adapters.packed import rows_of_step
from worker_svc.engine.adapters.rows import RowAdapters
from worker_svc.engine.backend import ForwardBatch, GroupColumns, LayerBackend, SamplingColumns
from worker_svc.engine.checkpoint.model_folder import TensorSum, eos_token_ids, tensor_sums
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, StagedWeights
from worker_svc.engine.cpu.backends import make_backend
from worker_svc.engine.decoder.block_payload import MovableBlocks
from worker_svc.engine.decoder.model import DecoderModel
from worker_svc.engine.engine_info import make_engine_info, revision_of
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.memory import release
from worker_svc.engine.kernels.numerics import cpu_numerics
from worker_svc.engine.loading import (
    DTYPES,
    Loaded,
    Report,
    choose_dtype,
    load_decoder_weights,
    load_draft_model,
    load_model,
)
from worker_svc.engine.pooling.pooling import (
    NOT_FINITE,
    Pooler,
    PoolingTable,
    hidden_tokens,
    logit_tokens,
    token_types,
)
from worker_svc.engine.rows.embedder import InputEmbedder
from worker_svc.engine.rows.errors import RowErrors
from worker_svc.engine.rows.logprobs import PromptTargets
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.scoring import (
    LOGITS_AT_ONCE,
    RawLogits,
    ScoredPrompts,
    heads_with_prompts,
    score_prompts,
    score_sampled,
)
from worker_svc.engine.rows.step_checker import CheckedStep
from worker_svc.engine.sampling.beams import best_candidates, take_log_softmax
from worker_svc.engine.sampling.grammars import PendingMasks, compiled_grammars
from worker_svc.engine.sampling.masking import apply_masks
from worker_svc.engine.speculation.drafts import Proposer, SuffixProposer
from worker_svc.engine.speculation.head_drafts import HeadDrafts
from worker_svc.engine.speculation.heads import Head
from worker_svc.engine.step_runner import NOTHING_TO_SAMPLE, StepRunner

logger = logging.getLogger(__name__)

NO_KERNELS = "the CPU kernels could not be compiled; plain torch is used, about 8 times slower"


class ModelRunner(StepRunner):
    """Computes a step when it is called.

    Raises CheckpointError for a model folder that cannot be served, BackendUnavailableError for a backend that this
    build or machine cannot run, ValueError for settings that contradict the model. `progress` gets fractions up to 1.0
    while weights load. `layers` computes the layers of a model that is no decoder; the CPU backend samples then.
    `degradations`: why another runner would be faster.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[float], None] | None = None,
        layers: LayerBackend | None = None,
        degradations: tuple[str, ...] = (),
    ) -> None:
        self._config = config
        self._is_asleep = False
        self._threads = config.threads or available_cores()
        self._bound_thread: int | None = None
        self._bind_thread()
        checkpoint = Checkpoint(config.model_dir)
        eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)
        sampling = default_sampling(checkpoint.generation_config)
        name = config.backend if layers is None else "cpu"
        self._backend = make_backend(name, self._threads, config.determinism, config.quantize)
        self._layers = layers or self._backend
        dtype = choose_dtype(config, checkpoint)
        loaded = load_model(checkpoint, config, self._backend, DTYPES[dtype], Report(self._threads, progress), layers)
        self._pool, self._inputs = loaded.pool, loaded.inputs
        self._model: Any = loaded.model  # a Model; None while the weights sleep
        self._model.fuse(self._pool)
        self._pooler = Pooler(loaded.pooling)
        self.adapters, self.images = loaded.adapters, loaded.images
        for name, folder in config.adapters:
            self.adapters.load(name, folder)
        self._row_adapters = RowAdapters(config.max_num_seqs, self.adapters.find)
        rows = self._make_rows(config, loaded, eos_ids)
        of_host = cpu_numerics(self._backend.name, self._backend.arithmetic, formats=self._backend.formats)
        info = make_engine_info(
            config,
            checkpoint,
            dtype,
            self._backend.name if layers is None else layers.arithmetic.partition(",")[0],
            ", ".join((*(() if layers is None else (layers.arithmetic,)), of_host)),
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            num_blocks=loaded.num_blocks,
            max_num_batched_tokens=loaded.max_num_batched_tokens,
            eos_token_ids=eos_ids,
            default_sampling=sampling,
            images=loaded.image_shape,
            attention_window=loaded.attention_window,
            hidden_size=loaded.input_size if loaded.encoder is None else 0,
            encoder=loaded.encoder,
            pooling=loaded.pooling_info,
            is_encoder=loaded.is_encoder,
            num_snapshots=loaded.num_snapshots,
            snapshot_tokens=loaded.snapshot_tokens,
            groups=loaded.groups,
            degradations=(*degradations, NO_KERNELS) if name != self._backend.name else degradations,
        )
        self._serve(rows, info)
        self._heads: HeadDrafts | None = None
        self._speculate(config, self._proposer(config, loaded.head))
        if loaded.head is not None:
            loaded.head.fuse(self._pool)
        self._backend.end_load()

    def _make_rows(self, config: EngineConfig, loaded: Loaded, eos_ids: tuple[int, ...]) -> OpenRows:
        generates = loaded.pooling is None or loaded.pooling.generates
        grammars = compiled_grammars(config.model_dir, loaded.vocab_size, eos_ids) if generates else None
        return OpenRows(
            config.max_num_seqs, loaded.max_model_len, config.block_size, loaded.num_blocks, loaded.vocab_size,
            grammars, adapters=self._row_adapters,
            hidden_size=loaded.input_size,
            encoder=loaded.encoder,
            pooling=PoolingTable(loaded.pooling),
            images=loaded.image_shape,
            states=loaded.pool.states,
            groups=loaded.groups,
        )  # fmt: skip

    def _proposer(self, config: EngineConfig, head: Head | None) -> Callable[[OpenRows], Proposer]:
        """Makes what proposes drafts, if something does."""
        if config.proposer == "draft" and config.draft_dir is not None:
            return load_draft_model(config, config.draft_dir, self.info, self._threads)
        if head is None:
            return SuffixProposer
        dtype, max_len = DTYPES[self.info.dtype], self.info.max_model_len
        heads = HeadDrafts(str(config.proposer), head, self._backend, self._rows, dtype=dtype, max_len=max_len)
        self._heads = heads
        return lambda rows: heads

    # -- weights ------------------------------------------------------------------------------------------------------

    def check_update(self, files: Sequence[Path]) -> list[TensorSum]:
        """The tensors of the last file. Raises CheckpointError unless they fit. Any thread may call it."""
        Checkpoint(self._config.model_dir, files)
        return tensor_sums(files[-1])

    def stage(self, version: int, updates: Sequence[Path]) -> StagedWeights:
        """The weights of the folder with these updates, beside those in use. Another thread than that of steps may call
        it, while steps run. Raises CheckpointError for an update that does not fit, ValueError for a model whose
        weights cannot change.
        """
        config, info = self._config, self.info
        if info.is_encoder or info.encoder is not None:
            raise ValueError("the weights of encoders cannot be updated; restart the workers with another model")
        checkpoint = Checkpoint(config.model_dir, updates)
        backend = make_backend(config.backend, self._threads, config.determinism, config.quantize)
        report = Report(self._threads, None)
        weights = load_decoder_weights(checkpoint, config, backend, DTYPES[info.dtype], info.max_model_len, report)
        digest = checkpoint.weights_digest()
        revision = revision_of(config, checkpoint, info.dtype, info.numerics, digest, info.max_model_len)
        staged = replace(info, weight_version=version, weights_digest=digest, weights_revision=revision)
        return StagedWeights(staged, frozenset(checkpoint.used_updates()), (backend, weights))

    def activate(self, staged: StagedWeights) -> None:
        """Compute with these weights from the next step on. Open rows keep their keys and values, and no block stays
        committed: it was computed by other weights."""
        backend, weights = staged.weights
        self._backend, self._model, self.images = backend, weights.model, weights.images
        self._layers = backend
        self._model.fuse(self._pool)
        if self._heads is not None:
            self._heads.head = weights.head
            weights.head.fuse(self._pool)
        self._pooler = Pooler(weights.pooling)
        scale = weights.model.parts.config.given_embedding_scale
        self._inputs = InputEmbedder(self.info.hidden_size, DTYPES[self.info.dtype], weights.images, scale=scale)
        self._pool.uncommit(np.arange(self._pool.num_blocks))
        if self._rows.states is not None:
            self._rows.states.forget_snapshots()
        self.info, self._is_asleep = staged.info, False
        self._backend.end_load()

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the memory of the weights, until the next `activate`, or that of the KV pool, whose rows are closed."""
        if "weights" in tags:
            self._is_asleep = True
            self._model, self._pooler, self.images = None, Pooler(None), None
            if self._heads is not None:
                self._heads.head = None
            self._inputs = InputEmbedder(self.info.hidden_size, DTYPES[self.info.dtype])
        if "kv_cache" in tags:
            self._pool.uncommit(np.arange(self._pool.num_blocks))
            for tensor in self._pool.tensors:
                if tensor.is_cpu:
                    release(tensor)

    @property
    def num_encoder_runs(self) -> int:
        """Encoder inputs computed since the start."""
        return self._inputs.num_encoder_runs

    def execute(self, batch: StepBatch) -> StepOutput:
        self._bind_thread()
        with torch.inference_mode():
            return super().execute(batch)

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        return self._pool.committed_blocks()

    def movable_blocks(self) -> MovableBlocks | None:
        if self.info.is_encoder or self._layers is not self._backend:
            return None
        windows = [f"window {group.attention_window}" for group in self.info.groups]
        return self._pool.movable(windows, [] if self._rows.states is None else [self._rows.states.movable()])

    def _bind_thread(self) -> None:
        """torch keeps thread counts per calling thread, so they are set in the thread that runs steps."""
        if self._bound_thread != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._bound_thread = threading.get_ident()

    def _copy_blocks(self, sources: I64, targets: I64) -> None:
        self._pool.copy(self._layers, sources, targets)

    def _commit_blocks(self, blocks: I64, digests: list[bytes]) -> None:
        self._pool.commit(blocks, digests)

    def _run_step(self, batch: StepBatch, errors: RowErrors) -> StepOutput | None:
        if self._is_asleep and len(batch.rows):
            raise BadBatchError("the weights of this worker sleep; wake it first")
        self._advance_images(batch)
        plan = self._checker.check(batch, errors)
        return self._run(batch, plan, errors) if len(plan.rows) else None

    def _run(self, batch: StepBatch, plan: CheckedStep, errors: RowErrors) -> StepOutput:
        """Runs the forward pass, then samples and scores."""
        samplers, logits_index = plan.sampled_tokens, None
        if plan.has_forks:
            samplers, logits_index = np.unique(samplers, return_inverse=True)
        token_ids = self._rows.token_ids(plan.token_rows, plan.positions)
        self._pool.write_tokens(plan.slots, token_ids)
        groups = self._of_groups(plan, token_ids)
        spans = self._rows.inputs.spans(plan.rows, plan.context_lens, plan.ends, plan.starts)
        inputs = self._inputs.of_step(self._rows, plan, spans)
        if inputs.embedded is not None:
            token_ids[inputs.embedded.tokens] = 0  # in place of content ids, which the vocabulary does not have
        chunks = self._rows.pooling.chunks(plan.rows, plan.starts, plan.context_lens, plan.ends, self._rows.prompt_lens)
        pooled = hidden_tokens(chunks) if chunks else None
        forward = ForwardBatch(
            token_ids=token_ids,
            positions=self._rows.positions.shifted(plan.token_rows, plan.positions).astype(np.int32),
            slots=plan.slots,
            rows=plan.rows.astype(np.int32),
            query_starts=plan.starts.astype(np.int32),
            context_lens=plan.context_lens.astype(np.int32),
            tables=self._rows.tables,
            head_tokens=np.union1d(samplers, logit_tokens(chunks)) if chunks else samplers,
            embedded=inputs.embedded,
            encoders=inputs.encoders,
            hidden_tokens=np.arange(len(token_ids)) if self._reads_hidden else pooled,
            token_types=token_types(chunks, plan.positions),
            deep=inputs.deep,
            snapshots=None if self._rows.states is None else self._rows.states.begin(batch, plan),
            groups=groups,
        )
        on_axes = self._rows.positions.on_axes(plan.rows, plan.starts, plan.positions)
        if on_axes is not None and isinstance(self._model, DecoderModel):
            forward = self._model.at(forward, on_axes)
        forward = self._with_adapters(forward, plan.token_rows)
        masks = self._rows.start_masks(plan.sampling_rows, plan.sampled_positions)
        targets = self._rows.prompt_targets(plan.token_rows, plan.positions)
        prompts = None if targets is None else self._score_prompts(forward, plan.token_rows, targets, errors)
        logits = self._model.forward(forward, self._pool) if prompts is None else prompts.logits
        self._rows.mark_computed(plan.rows, plan.ends)
        if self._heads is not None:
            self._heads.see(plan, self._model)
        if self._rows.states is not None:
            self._rows.states.end(batch, plan, errors)
        output = StepOutput(batch.step_id, EMPTY, EMPTY)
        if chunks:
            hidden = self._model.hidden[pooled] if self._reads_hidden else self._model.hidden
            output.pooled, bad_rows = self._pooler.numbers(chunks, hidden, logits, forward.head_tokens)
            for row in bad_rows:
                errors.add(row, NOT_FINITE, RowErrorCode.NAN)
            logits = logits[torch.from_numpy(np.searchsorted(forward.head_tokens, samplers))]
        if len(plan.sampling_rows):
            if logits_index is not None:
                logits = logits[torch.from_numpy(logits_index)]
            self._sample(plan, logits, masks, errors, output)
        if prompts is not None:
            output.prompt_logprobs = prompts.prompt_logprobs
        return output

    @property
    def _reads_hidden(self) -> bool:
        """Whether something reads the states of all tokens of a step."""
        return self._heads is not None and self._heads.head.reads_hidden

    def _of_groups(self, plan: CheckedStep, token_ids: I64) -> GroupColumns | None:
        """The slots and tables of the cache groups after the first one, whose blocks get their tokens too."""
        if plan.group_slots is None:
            return None
        for slots in self._rows.groups.global_slots(plan.group_slots):
            self._pool.write_tokens(slots, token_ids)
        return GroupColumns(plan.group_slots, self._rows.groups.tables)

    def _with_adapters(self, forward: ForwardBatch, token_rows: I64) -> ForwardBatch:
        """The same batch with the adapters of its rows."""
        if not self._row_adapters.in_use:
            return forward
        numbers = self._row_adapters.numbers[token_rows]
        return replace(forward, adapters=rows_of_step(self._row_adapters.in_use, numbers, forward.merged_heads()[0]))

    def _score_prompts(
        self, forward: ForwardBatch, token_rows: I64, targets: PromptTargets, errors: RowErrors
    ) -> ScoredPrompts:
        """Runs the forward pass and scores the prompt tokens that follow computed tokens, for rows that ask."""
        heads = forward.head_tokens
        forward = replace(forward, head_tokens=heads_with_prompts(heads, targets))
        forward = self._with_adapters(forward, token_rows)
        slices = self._model.forward_in_slices(forward, self._pool, LOGITS_AT_ONCE)
        prompts = score_prompts(self._backend, slices, heads, targets, self._process_forced)
        for row in prompts.bad_rows.tolist():
            errors.add(row, NOTHING_TO_SAMPLE, RowErrorCode.NAN)
        return prompts

    def _process_forced(self, logits: torch.Tensor, rows: I64, positions: I64) -> SamplingColumns:
        """Processes float32 logits [n, vocab] in place, as if these rows sampled the tokens at these positions."""
        processed = self._rows.processed_rows(rows, positions)
        if processed is not None:
            self._backend.process_logits(logits, processed)
        for i in range(len(rows)):  # the matcher of a row consumes one token after the other
            masks = self._rows.start_masks(rows[i : i + 1], positions[i : i + 1])
            if masks is not None:
                has_rules = processed is not None
                apply_masks(logits[i : i + 1], masks.result(), self.info.eos_token_ids, has_rules=has_rules)
        return self._rows.sampling_columns(rows, positions)

    def _sample(
        self,
        plan: CheckedStep,
        logits: torch.Tensor,
        masks: PendingMasks | None,
        errors: RowErrors,
        output: StepOutput,
    ) -> None:
        """Sets the sampled tokens, and what belongs to them."""
        asked = self._rows.logprobs.asked(plan.sampling_rows)
        columns = self._rows.sampling_columns(plan.sampling_rows, plan.sampled_positions)
        processed = self._rows.processed_rows(plan.sampling_rows, plan.sampled_positions)
        beams = self._rows.beam_lines(plan.sampling_rows)
        rules = self._rows.encoders.rules(
            plan.sampling_rows, self._rows.output_positions(plan.sampling_rows, plan.sampled_positions)
        )
        is_changed = processed is not None or masks is not None or beams is not None or len(rules) > 0
        raw = None if asked is None else RawLogits.of(logits, asked, is_changed=is_changed)
        if beams is not None:
            logits = logits.float()
            take_log_softmax(logits, beams)
        if processed is not None:
            logits = logits.float()
            self._backend.process_logits(logits, processed)
        if masks is not None:
            found = masks.result()
            errors.add_all(found.errors(plan.sampling_rows))
            apply_masks(logits, found, self.info.eos_token_ids, has_rules=processed is not None)
        if rules:
            logits = logits.float()
        for line, output_rules, position in rules:
            output_rules.apply(logits[line], position)
        candidates = NO_CANDIDATES if beams is None else best_candidates(logits, beams)
        token_ids, is_bad = self._backend.sample(logits, columns)
        is_token = self._is_token(plan, token_ids, is_bad)
        if self._rows.states is not None and plan.num_after is not None:
            self._rows.states.settle_drafts(plan, is_token)
        rows, positions = plan.sampling_rows, plan.sampled_positions
        for row in rows[is_bad & is_token]:
            errors.add(int(row), NOTHING_TO_SAMPLE, RowErrorCode.NAN)
        is_good = is_token & ~is_bad
        if len(errors):
            is_good &= [int(row) not in errors for row in rows]
        if raw is not None:
            output.logprobs = score_sampled(self._backend, raw, logits, columns, token_ids, is_good)
        if len(errors):
            candidates = candidates.without(rows[~is_good])
        self._append_samples(plan, rows[is_good], positions[is_good], token_ids[is_good], output)
        output.candidates = candidates
