"""The GPU runner, with several steps in flight: a step is launched while the previous one still runs.

    launch: apply changes -> plan -> upload -> graph or eager kernels -> copy of the tokens, event
    result: wait for the event -> StepOutput                                     (any thread)
    settle: tokens into the row history and block contents                       (at a later launch)

Sampled tokens stay on the device for the next step. The history on the host holds PENDING until the step settles.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from step_protocol.columns import I64, U32
from step_protocol.messages import StepBatch, StepOutput
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.pool.block_contents import BlockContents
from worker_svc.engine.engine_info import choose_max_model_len
from worker_svc.engine.gpu.attention.paged import DevicePool
from worker_svc.engine.gpu.check import StartCheck
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.device_blocks import DeviceBlocks
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.drafts import NO_TOKEN
from worker_svc.engine.gpu.kernels.record import apply_deltas
from worker_svc.engine.gpu.kernels.sampler import filters
from worker_svc.engine.gpu.loading import fill_memory, load_model
from worker_svc.engine.gpu.messages import (
    RECORD_USED,
    RESET_ROWS,
    STOP,
    MessageKind,
    adapter_piece,
    adapters_from_bytes,
    step_from_bytes,
    step_to_bytes,
)
from worker_svc.engine.gpu.parts import device_parts
from worker_svc.engine.gpu.start.memory import make_pool
from worker_svc.engine.gpu.start.setup import Degradations, Stages, find_device, usable_kernels
from worker_svc.engine.gpu.step.device_rows import changed_words
from worker_svc.engine.gpu.step.device_step import DevicePart, DeviceStep, StepResults
from worker_svc.engine.gpu.step.drafts import PENDING, DeviceDrafts, StepDrafts
from worker_svc.engine.gpu.step.pending_step import NO_IDS, PendingStep, Writes
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, PlacedInputs, Staging
from worker_svc.engine.row_part import having
from worker_svc.engine.rows.embedder import InputEmbedder
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.drafts import Proposer, RowDrafts
from worker_svc.engine.step import CheckedStep, RowErrors
from worker_svc.engine.step_runner import StepRunner


class DeviceRunner(StepRunner):
    """A model on one device. A step's `result` may be read in any thread.

    Raises CheckpointError for an unsupported model folder, BackendUnavailableError for settings or a machine that
    cannot serve it, ValueError for settings that contradict the model.
    """

    launches = works_when_idle = True

    def __init__(
        self, config: EngineConfig, progress: Callable[[float], None] | None = None, group: Group | None = None
    ) -> None:
        self._group = group or Group()
        self._device = find_device(config, self._group.local_rank)
        degradations = Degradations()
        config = replace(config, kernels=usable_kernels(config, self._device, degradations))
        stages = Stages(progress, has_graphs=self._device.type == "cuda" and config.cuda_graphs != "off")
        self._forms = forms.TORCH if config.kernels == "torch" else forms.TRITON
        with torch.inference_mode(), forms.using(self._forms):
            loaded = self._loaded = load_model(config, self._group, self._device, stages.weights, degradations)
        if loaded.setup.in_torch:
            self._forms = forms.Forms(loaded.setup.in_torch)
        self._compute, self._buffer, self._state = loaded.compute, loaded.buffer, loaded.state
        self._adapters = loaded.adapters
        self._attention = loaded.attention
        self.adapters = None if self._adapters is None else self._adapters.store
        self.images = loaded.images
        self._last_tokens = np.zeros(config.max_num_seqs, np.int64)
        self._in_flight: deque[PendingStep] = deque()
        self._device_drafts: DeviceDrafts | None = None  # `_drafts` of this runner
        if loaded.setup.is_compiled and config.kernels != "torch":
            self._choose_forms()
        with torch.inference_mode(), forms.using(self._forms):
            pool = fill_memory(loaded, stages)
            self._serve_pool(pool, choose_max_model_len(config, loaded.setup.whole, pool.num_blocks))
        self._speculate(config)
        if self.adapters is not None and self._group.rank == 0:  # the others receive them
            for name, folder in config.adapters:
                self.adapters.load(name, folder)

    def _make_drafts(self, config: EngineConfig, make_proposer: Callable[[OpenRows], Proposer]) -> RowDrafts:
        tables = self._compute.drafts
        if tables is None or self._group.size > 1:
            raise ValueError("speculate cannot be set together with tensor_parallel_size; leave --speculate out")
        most_tokens = self.info.max_num_batched_tokens
        states, max_samples = self._tables.states, self._buffer.max_samples
        most = max_samples if states is None else states.num_drafts
        drafts = DeviceDrafts(self._rows, config.max_drafts, most, max_samples, most_tokens, tables)
        self._device_drafts = drafts
        return drafts

    def _choose_forms(self) -> None:
        """Replaces kernels that fail the start-up check, which runs on a small pool."""
        setup = self._loaded.setup
        check = StartCheck(self._loaded, self._launch)
        with torch.inference_mode():
            size = setup.config.block_size
            pool = make_pool(check.num_blocks, size, setup.model, setup.cache_dtype, self._device)
            self._serve_pool(pool, check.max_model_len)
            self._forms, self._attention = check.choose()
            self._settle_all()
            self._buffer.clear()
        super().reset_rows()

    def _serve_pool(self, pool: DevicePool, max_model_len: int) -> None:
        """Opens rows on this pool."""
        num_blocks, loaded = pool.num_blocks, self._loaded
        self._pool = pool
        self._compute.use_cache(pool)
        self._contents = BlockContents(num_blocks, loaded.setup.config.block_size)
        self._serve(loaded.info(num_blocks, max_model_len, self._attention.name, self._forms), **loaded.features)
        self._rows.add_parts(self._compute.processing.serve(self._rows))
        self._parts = device_parts(self._compute, self._rows, self._tables, self._group, self._settle_all)
        self._before, self._launched = having(self._parts, DevicePart.before), having(self._parts, DevicePart.launched)
        whole, dtype = loaded.setup.whole, loaded.setup.dtype
        self._embedder = InputEmbedder(
            self._tables.inputs, whole.hidden_size, dtype, loaded.images, scale=whole.given_embedding_scale
        )

    def execute(self, batch: StepBatch) -> StepOutput:
        return self.launch(batch).result()

    def launch(self, batch: StepBatch) -> PendingStep:
        """Applies a step and launches it. Rows fail and errors are raised as in `execute`."""
        self._checker.check_columns(batch)
        if self._adapters is not None:
            self._adapters.find(batch.opens)
        if self._group.size > 1:
            for message in () if self._adapters is None else self._adapters.messages():
                self._group.send(message)
            self._group.send(step_to_bytes(batch))
        with forms.using(self._forms):
            return self._launch(batch)

    def _launch(self, batch: StepBatch) -> PendingStep:
        started = time.perf_counter()
        if self._device_drafts is not None and self._tables.states is not None:
            self._settle_all()  # the host chooses the state from which a row continues
        self._settle_finished()
        with torch.inference_mode():
            errors = RowErrors()
            copies = self._apply_changes(batch, errors)
            if self._device_drafts is not None and self.images is not None and (batch.query_lens > 1).any():
                self._settle_all()  # the positions of images, and those of rows beside them, are made on the host
            batch = self._with_drafts(batch, errors)
            plan = self._checker.check(batch, errors)
            staging = self._buffer.take_staging()
            writes = self._compute_or_fail(
                batch, errors, lambda: self._compute_step(batch, plan, staging, copies, errors),
                can_fail=self._group.size == 1,  # other ranks may have written to their pools
            ) or Writes(copies, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS)  # fmt: skip
            if staging.event is not None:
                staging.event.record()
        pending = PendingStep(batch.step_id, staging, writes, errors, started)
        self._in_flight.append(pending)
        return pending

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        self._settle_all()
        return self._contents.committed_blocks()

    def forget_prefixes(self) -> None:
        self._settle_all()
        self._contents.uncommit(np.arange(self._contents.num_blocks))

    def movable_blocks(self) -> DeviceBlocks | None:
        # Each rank has its heads of a block; a block of several layouts, or with a state, is not one piece
        if self._group.size > 1 or len(self._pool.tensors) > 1 or self._tables.states is not None:
            return None
        return DeviceBlocks(self._contents, self._pool.tensors[0], self._settle_finished)

    def reset_rows(self) -> None:
        self._group.send(RESET_ROWS)
        super().reset_rows()

    def work_when_idle(self) -> bool:
        """Records one CUDA graph of steps that are rare, which takes some 10 ms. False if there is none."""
        if not self._compute.has_used:
            return False
        self._group.send(RECORD_USED)
        with torch.inference_mode(), forms.using(self._forms):
            return self._compute.record_used()

    def running_since(self, now: float) -> float:
        """Launch time of the oldest unfinished step; `now` if there is none. Any thread may call it."""
        return min((step.started for step in list(self._in_flight) if not step.is_done()), default=now)

    def follow(self) -> None:
        """Runs the steps that rank 0 broadcasts until it sends STOP. Only for the other ranks."""
        while (message := self._group.receive()) != STOP:
            self._follow_one(message)

    def _follow_one(self, message: bytes) -> None:
        kind = message[0]
        if kind == MessageKind.RESET_ROWS:
            super().reset_rows()
        elif kind == MessageKind.RECORD_USED:
            with torch.inference_mode(), forms.using(self._forms):
                self._compute.record_used()
        elif kind == MessageKind.STEP:
            with forms.using(self._forms):
                self._launch(step_from_bytes(message))
        elif self._adapters is None:
            raise RuntimeError("rank 0 sent an adapter, but this rank has none: a bug in the engine")
        elif kind == MessageKind.ADAPTER_PIECE:
            self._adapters.receive_piece(*adapter_piece(message))
        else:
            self._adapters.receive_known(adapters_from_bytes(message))

    # A step

    def _apply_changes(self, batch: StepBatch, errors: RowErrors) -> tuple[I64, I64]:
        copies = super()._apply_changes(batch, errors)
        if batch.opens and self._adapters is not None:
            self._adapters.place()
        return copies

    def _copy_blocks(self, sources: I64, targets: I64) -> None:
        self._contents.uncommit(targets)
        self._pool.copy(sources.tolist(), targets.tolist())

    def _commit_blocks(self, blocks: I64, digests: list[bytes]) -> None:
        """Readers of committed blocks wait for no step: schedulers commit the blocks of answered ones."""
        size = self.info.block_size
        if self._contents.has_readers and any(step.writes.touch(blocks, size) for step in self._in_flight):
            self._settle_all()
        self._contents.commit(blocks, digests)

    def _compute_step(
        self, batch: StepBatch, plan: CheckedStep, staging: Staging, copies: tuple[I64, I64], errors: RowErrors
    ) -> Writes:
        """Launches a step whose changes are applied."""
        if batch.parts and self.images is not None:
            self.images.work(batch, self._tables.inputs)
        token_ids, rows = self._rows.token_ids(plan.token_rows, plan.positions), plan.sampling_rows
        generations = self._rows.generations(rows)
        drafts = None if self._device_drafts is None else self._device_drafts.begin_step(batch, plan)
        self._contents.uncommit(plan.slots // self.info.block_size)
        if drafts is not None:
            self._contents.uncommit(drafts.verified.slots.reshape(-1) // self.info.block_size)
        reads = self._start(batch, plan, token_ids, drafts, staging, errors)
        return Writes(
            copies, plan.slots, plan.token_rows, token_ids, rows, generations, plan.sampled_positions, reads, drafts
        )

    def _append(self, plan: CheckedStep, drafts: StepDrafts | None) -> None:
        """The history after a step, whose tokens are known when it settles."""
        positions = plan.sampled_positions
        self._rows.mark_computed(plan.rows, plan.ends)
        self._rows.append(plan.sampling_rows, positions, np.full(len(positions), PENDING, np.uint32))
        if drafts is not None and self._device_drafts is not None:
            self._device_drafts.reserve(drafts.verified)

    def _start(
        self,
        batch: StepBatch,
        plan: CheckedStep,
        token_ids: I64,
        drafts: StepDrafts | None,
        staging: Staging,
        errors: RowErrors,
    ) -> Sequence[Callable[[StepResults], None]]:
        columns = self._rows.sampling_columns(plan.sampling_rows, plan.sampled_positions)
        least = plan.sampled_positions if drafts is None else drafts.least_positions
        processed = self._rows.processed_rows(plan.sampling_rows, least)
        is_filtered = processed is not None or filters.is_needed(columns)
        step = DeviceStep(batch, plan, errors, self._parts)
        for part in self._before:
            if part.in_use:
                part.before(step)
        has_more = processed is not None and processed.has_more_than_early_bans
        ends_at_logits = step.ends_at_logits or len(step.states) > 0 or has_more
        slots = None if self._adapters is None else self._adapters.of_tokens(plan.token_rows)
        bucket = self._compute.bucket_of(
            plan, is_filtered=is_filtered, ends_at_logits=ends_at_logits, has_adapters=slots is not None
        )
        known, contexts = np.where(token_ids == PENDING, -1, token_ids), plan.context_lens
        if drafts is not None:
            contexts, known = drafts.on_device(plan, known)
        host = self._host_step(step, known, bucket)
        deltas = self._buffer.upload(
            staging,
            plan,
            contexts,
            known,
            columns.positions.astype(np.int64),
            bucket,
            changed_words(batch, self._rows, self._tables.positions, self._state.shape[1]),
        )
        if slots is not None:
            self._buffer.upload_adapters(staging, slots, bucket)
        if len(deltas):
            apply_deltas(self._state, deltas)
        self._append(plan, drafts)  # before what may settle earlier steps
        if len(plan.rows):
            self._compute.run(bucket, host, step, is_filtered=is_filtered)
            staging.down.copy_(self._compute.results.view(-1), non_blocking=True)
            for part in self._launched:
                part.launched(step)
        return step.reads

    def _host_step(self, step: DeviceStep, known: I64, bucket: Bucket) -> HostStep:
        """Replaces the content ids of inputs in `known`, which the vocabulary lacks."""
        plan = step.plan
        spans = self._tables.inputs.spans(plan.rows, plan.context_lens, plan.ends, plan.starts)
        embedded, deep = self._embedder.embed(spans)
        if embedded is not None:
            known[embedded.tokens] = 0
        inputs, deep_inputs = (PlacedInputs.of(given, self._device) for given in (embedded, deep))
        host = HostStep(
            plan.starts, plan.context_lens, inputs, deep_inputs, rows=plan.rows.tolist(), snapshots=step.snapshots
        )
        on_axes = self._tables.positions.on_axes(plan.rows, plan.starts, plan.positions)
        if on_axes is None:
            return host
        padded = np.pad(on_axes, ((0, 0), (0, bucket.tokens - on_axes.shape[1])))
        return replace(host, rotary=self._compute.rotary_at(padded))

    # After the step

    def _settle_all(self) -> None:
        while self._in_flight:
            self._settle(self._in_flight.popleft())

    def _settle_finished(self) -> None:
        while self._in_flight and self._in_flight[0].is_done():
            self._settle(self._in_flight.popleft())

    def _settle(self, pending: PendingStep) -> None:
        """Must be called in the order of steps, so that a PENDING token is the last one of its row."""
        pending.result()
        writes, tokens = pending.writes, pending.sampled()
        token_ids = np.where(writes.token_ids == PENDING, self._last_tokens[writes.token_rows], writes.token_ids)
        self._contents.copy_tokens(*writes.copies)
        if writes.drafts is not None:
            self._settle_drafts(pending, writes.drafts, token_ids)
        else:
            self._contents.fill_tokens(writes.slots, token_ids)
            self._last_tokens[writes.sampling_rows] = tokens
            self._rows.fill(writes.sampling_rows, writes.generations, writes.positions, tokens)
        self._buffer.give_back(pending.staging)

    def _settle_drafts(self, pending: PendingStep, of: StepDrafts, token_ids: I64) -> None:
        """The same for a step of a worker that computes drafts."""
        if self._device_drafts is None:
            return
        writes, tokens, rows = pending.writes, pending.sampled(), pending.writes.sampling_rows
        is_same = self._rows.generations(rows) == writes.generations
        found = self._device_drafts.settle(
            of, rows, is_same, tokens, pending.statuses(), (pending.started, pending.ended)
        )
        if self._tables.states is not None:
            with torch.inference_mode():
                self._tables.states.choose(of.plan, (pending.statuses() & NO_TOKEN) == 0)
        is_plain = ~np.isin(writes.token_rows, of.verified.rows)
        self._contents.fill_tokens(writes.slots[is_plain], token_ids[is_plain])
        self._contents.fill_tokens(found.slots, found.token_ids)
        positions = np.where(found.is_verified, found.positions, writes.positions)
        lines = np.flatnonzero(found.is_token)
        self._last_tokens[rows[lines]] = tokens[lines]  # of equal rows the last one counts
        self._rows.fill(rows[lines], writes.generations[lines], positions[lines], tokens[lines])
