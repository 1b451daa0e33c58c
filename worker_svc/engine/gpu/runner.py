"""The GPU runner, with several steps in flight: a step is launched while the previous one still runs.

    launch: apply changes -> plan -> upload -> graph or eager kernels -> copy of the tokens, event
    result: wait for the event -> StepOutput                                     (any thread)
    settle: tokens into the row history and block contents                       (at a later launch)

Sampled tokens stay on the device for the next step. The history on the host holds PENDING until the step settles.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from prefix_index.content_ids import FIRST_CONTENT_ID
from request_fields.checks import default_sampling
from step_protocol.columns import I64, U32
from step_protocol.messages import PoolingKind, RowErrorCode, StepBatch, StepOutput
from worker_svc.engine.adapters.adapter import Adapter
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.families import Names
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import eos_token_ids
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.block_contents import BlockContents
from worker_svc.engine.decoder.config import parse_config
from worker_svc.engine.engine_info import choose_max_model_len, make_engine_info
from worker_svc.engine.gpu.adapters import DeviceAdapters
from worker_svc.engine.gpu.attention.paged import Attention
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.kernels.deltas import apply_deltas
from worker_svc.engine.gpu.kernels.sampler import filters
from worker_svc.engine.gpu.layers.adapter_shapes import DeviceAdapter
from worker_svc.engine.gpu.layers.linears import DeviceLinears
from worker_svc.engine.gpu.layers.weights import ShardLoader, formats_of, shard_config
from worker_svc.engine.gpu.messages import (
    RESET_ROWS,
    STOP,
    MessageKind,
    adapter_piece,
    adapters_from_bytes,
    step_from_bytes,
    step_to_bytes,
)
from worker_svc.engine.gpu.model import DeviceDecoder
from worker_svc.engine.gpu.start.checks.case import Setup
from worker_svc.engine.gpu.start.memory import Shares, divide_memory, fitting, make_pool
from worker_svc.engine.gpu.start.start_up import DTYPES, Stages, check_heads, choose_checked, choose_dtype, find_device
from worker_svc.engine.gpu.step.device_rows import changed_words, make_state
from worker_svc.engine.gpu.step.extras import StepExtras, Wanted
from worker_svc.engine.gpu.step.graphs import GraphError, make_recorder
from worker_svc.engine.gpu.step.pending_step import NO_IDS, PendingStep, Writes
from worker_svc.engine.gpu.step.pooling import load_device_pooling
from worker_svc.engine.gpu.step.step_buffer import HostStep, PlacedInputs, Staging, StepBuffer
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.numerics import device_numerics
from worker_svc.engine.model_runner import MAX_OUT_OF_MEMORY_STEPS, is_out_of_memory
from worker_svc.engine.pooling.config import read_pooling
from worker_svc.engine.pooling.pooling import PoolingTable
from worker_svc.engine.pooling.weights import PoolingWeights, pooling_info
from worker_svc.engine.rows.embedder import InputEmbedder
from worker_svc.engine.rows.errors import RowErrors
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.step_checker import CheckedStep, StepChecker
from worker_svc.engine.sampling.grammars import compiled_grammars
from worker_svc.engine.sampling.masking import apply_masks

logger = logging.getLogger(__name__)

PENDING = FIRST_CONTENT_ID - 1  # in the history: a sampled token that the host does not know yet


class DeviceRunner:
    """A loaded model with its KV pool and rows on one device. Only one thread at a time may call it, except `result`.

    Raises CheckpointError for an unsupported model folder, BackendUnavailableError for settings or a machine that
    cannot serve it, ValueError for settings that contradict the model.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[float], None] | None = None, group: Group | None = None
    ) -> None:
        self._group = group or Group()
        self._device = find_device(self._group.local_rank)
        checkpoint = Checkpoint(config.model_dir)
        whole = parse_config(checkpoint.config).named_in(checkpoint.has)
        whole = whole.within(config.max_model_len or whole.max_position_embeddings)
        eos_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)
        sampling = default_sampling(checkpoint.generation_config)
        needed = whole.features() | ({"adapters"} if config.max_adapters else set())
        check_features(needed, "cuda")
        model = shard_config(whole, self._group)
        check_heads(model)
        dtype = choose_dtype(config, checkpoint, self._device)
        loader = ShardLoader(
            checkpoint, whole, DeviceLinears(config.determinism, DTYPES[dtype]), DTYPES[dtype], self._device,
            self._group, config.quantize,
        )  # fmt: skip
        loader.check()
        settings = read_pooling(checkpoint.folder, checkpoint.config, PoolingKind.LAST)
        if self._group.local_rank == 0:  # hosts compare their digests; for the other ranks it stays empty
            checkpoint.start_digest(available_cores())
        setup = Setup(
            model, whole.vocab_size, DTYPES[dtype], config.block_size,
            config.max_model_len or whole.max_position_embeddings, self._device, self._group, config.determinism,
            has_scaled_cache=config.kv_cache_dtype == "fp8",
            formats=formats_of(whole, config.quantize, DTYPES[dtype], self._device),
            max_adapter_rank=config.max_adapter_rank if config.max_adapters else 0,
        )  # fmt: skip
        with torch.inference_mode():
            attention = choose_checked(config, setup)
            pooling = load_device_pooling(checkpoint, settings, whole, config.determinism, self._device)
            num_blocks = self._load(config, setup, loader, whole.names, attention, pooling, progress)
        logger.info("%d CUDA graphs, %d blocks, attention %s", self._compute.num_graphs, num_blocks, attention.name)
        max_model_len = choose_max_model_len(config, whole, num_blocks)
        self._contents = BlockContents(num_blocks, config.block_size)
        grammars = compiled_grammars(config.model_dir, whole.vocab_size, eos_ids) if pooling.generates else None
        self._rows = OpenRows(
            config.max_num_seqs,
            max_model_len,
            config.block_size,
            num_blocks,
            whole.vocab_size,
            grammars,
            hidden_size=whole.hidden_size,
            pooling=PoolingTable(pooling),
            adapters=None if self._adapters is None else self._adapters.rows,
        )
        self.adapters = self._load_adapters(config)
        self._embedder = InputEmbedder(whole.hidden_size, DTYPES[dtype])
        self._last_tokens = np.zeros(config.max_num_seqs, np.int64)
        self._in_flight: deque[PendingStep] = deque()
        self._num_out_of_memory = 0  # consecutive steps
        backend = f"cuda/{attention.name}"
        self.info = make_engine_info(
            config,
            checkpoint,
            dtype,
            backend,
            device_numerics(backend, self._device, self._group.size, loader.formats),
            max_model_len=max_model_len,
            vocab_size=whole.vocab_size,
            num_blocks=num_blocks,
            eos_token_ids=eos_ids,
            default_sampling=sampling,
            attention_window=whole.within(max_model_len).attention_window,
            hidden_size=whole.hidden_size,
            pooling=pooling_info(settings, pooling, max_model_len),
        )
        self._checker = StepChecker(self._rows, self.info)

    def _load(
        self,
        config: EngineConfig,
        setup: Setup,
        loader: ShardLoader,
        names: Names,
        attention: Attention,
        pooling: PoolingWeights,
        progress: Callable[[float], None] | None,
    ) -> int:
        """Loads the weights, divides the memory that is left, and records graphs. Returns the number of blocks.

        `names` are those of the model's tensors."""
        stages = Stages(progress, has_graphs=self._device.type == "cuda" and config.cuda_graphs != "off")
        with fitting("the weights", "raise tensor_parallel_size, or use a smaller dtype or model"):
            decoder = DeviceDecoder(
                loader, setup.model, self._group, setup.max_model_len, self._device, stages.weights,
                has_scaled_cache=setup.has_scaled_cache,
            )  # fmt: skip
        with fitting("the slots of adapters", "lower max_adapters or max_adapter_rank"):
            self._adapters = DeviceAdapters(config, loader, names, self._device) if config.max_adapters else None
        self._state = make_state(config.max_num_seqs, -(-setup.max_model_len // config.block_size), self._device)
        max_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        self._buffer = StepBuffer(config.max_num_seqs, max_tokens, self._state, self._device)
        with fitting("the tables of all rows", "lower max_num_seqs"):
            self._compute = StepCompute(
                decoder, attention, self._buffer, self._state, config.block_size,
                self._group.vocab_part(setup.vocab_size), self._group, min(config.cuda_graph_tokens, max_tokens),
                pooling,
                None if self._adapters is None else self._adapters.slots,
            )  # fmt: skip
        kv_dtype = setup.cache_dtype
        shares = divide_memory(config, setup.model, kv_dtype, self._compute, self._device, self._group)
        num_blocks = self._group.all_reduce_min(shares.num_blocks)
        with fitting(f"{num_blocks} blocks", "lower num_blocks or kv_cache_memory"):
            self._pool = make_pool(num_blocks, config.block_size, setup.model, kv_dtype, self._device)
        self._compute.use_cache(self._pool)
        self._record_graphs(config, shares, stages)
        return num_blocks

    def _record_graphs(self, config: EngineConfig, shares: Shares, stages: Stages) -> None:
        recorder = make_recorder(self._device) if config.cuda_graphs != "off" else None
        if recorder is not None:
            is_lazy = config.cuda_graphs == "lazy"
            try:
                self._compute.record(recorder, shares.graph_bytes, stages.graphs, is_lazy=is_lazy)
            except GraphError as error:
                raise BackendUnavailableError(f"{error}; use --cuda-graphs off") from error
        stages.end()

    def _load_adapters(self, config: EngineConfig) -> AdapterStore[Adapter, DeviceAdapter] | None:
        """The worker's adapters, with those of its start. None: it was started without any. Only rank 0 reads them."""
        if self._adapters is None:
            return None
        for name, folder in config.adapters if self._group.rank == 0 else ():
            self._adapters.store.load(name, folder)
        return self._adapters.store

    def execute(self, batch: StepBatch) -> StepOutput:
        """Launches a step and waits for it."""
        return self.launch(batch).result()

    def launch(self, batch: StepBatch) -> PendingStep:
        """Applies a step and launches it. A bad row becomes a RowError and does not affect other rows.

        Raises BadBatchError, with nothing applied, for columns that contradict each other or the pool. If a step runs
        out of memory, its rows fail; the third consecutive such step raises.
        """
        self._checker.check_columns(batch)
        if self._adapters is not None:
            self._adapters.find(batch.opens)
        if self._group.size > 1:
            for message in () if self._adapters is None else self._adapters.messages():
                self._group.send(message)
            self._group.send(step_to_bytes(batch))
        return self._launch(batch)

    def _launch(self, batch: StepBatch) -> PendingStep:
        started = time.perf_counter()
        self._settle_finished()
        with torch.inference_mode():
            errors = RowErrors()
            copies = self._apply_changes(batch, errors)
            plan = self._checker.check(batch, errors)
            staging = self._buffer.take_staging()
            writes = self._compute_or_fail(batch, plan, staging, copies, errors)
            if staging.event is not None:
                staging.event.record()
        pending = PendingStep(batch.step_id, staging, writes, errors.to_list(), started)
        self._in_flight.append(pending)
        return pending

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        """Block ids [N], their digests and their tokens [N, block_size] of all committed blocks, in pieces."""
        while self._in_flight:
            self._settle(self._in_flight.popleft())
        return self._contents.committed_blocks()

    def reset_rows(self) -> None:
        """Closes all rows, for a new lease. Committed blocks stay."""
        self._group.send(RESET_ROWS)
        self._rows.reset()

    def rows_used(self) -> int:
        """Open rows."""
        return self._rows.rows_used()

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
            self._rows.reset()
        elif kind == MessageKind.STEP:
            self._launch(step_from_bytes(message))
        elif self._adapters is None:
            raise RuntimeError("rank 0 sent an adapter, but this rank has none: a bug in the engine")
        elif kind == MessageKind.ADAPTER_PIECE:
            self._adapters.receive_piece(*adapter_piece(message))
        else:
            self._adapters.receive_known(adapters_from_bytes(message))

    # A step

    def _apply_changes(self, batch: StepBatch, errors: RowErrors) -> tuple[I64, I64]:
        """Returns the block copies."""
        self._rows.close(batch.close_rows)
        self._rows.open(batch.opens, errors)
        if self._adapters is not None:
            self._adapters.place()
        self._compute.processing.open(batch.opens, self._rows)
        self._rows.change_tables(batch.table_rows, batch.table_indices, batch.table_blocks, errors)
        copies = batch.copy_src.astype(np.int64), batch.copy_dst.astype(np.int64)
        for source, target in zip(*(blocks.tolist() for blocks in copies), strict=True):
            self._pool[:, :, target].copy_(self._pool[:, :, source])
        self._contents.uncommit(copies[1])
        if len(batch.commit_blocks):
            self._contents.commit(batch.commit_blocks.astype(np.int64), batch.commit_digests)
        beams = self._rows.move_beams(batch.beam_rows, batch.beam_parents, batch.beam_tokens, errors)
        self._compute.processing.move(beams, self._rows)
        return copies

    def _compute_or_fail(
        self, batch: StepBatch, plan: CheckedStep, staging: Staging, copies: tuple[I64, I64], errors: RowErrors
    ) -> Writes:
        """Launches the step. If it runs out of memory its rows fail: it writes only to slots of its own rows."""
        token_ids = self._rows.token_ids(plan.token_rows, plan.positions)
        try:
            extras = self._start(batch, plan, token_ids, staging, errors)
        except (MemoryError, RuntimeError) as error:
            self._num_out_of_memory += 1
            is_alone = self._group.size == 1  # other ranks may have written to their pools
            if not (is_alone and is_out_of_memory(error)) or self._num_out_of_memory >= MAX_OUT_OF_MEMORY_STEPS:
                raise
            logger.error("step %d ran out of memory and its rows fail: %s", batch.step_id, error)
            for row in np.concatenate((batch.rows, batch.fork_rows)).tolist():
                errors.add(row, "the worker ran out of memory in this step", RowErrorCode.INTERNAL)
            return Writes(copies, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS)
        self._num_out_of_memory = 0
        self._contents.uncommit(plan.slots // self.info.block_size)
        self._rows.mark_computed(plan.rows, plan.ends)
        sampling_rows, positions = plan.sampling_rows, plan.sampled_positions
        self._rows.append(sampling_rows, positions, np.full(len(positions), PENDING, np.uint32))
        generations = self._rows.generations(sampling_rows)
        return Writes(copies, plan.slots, plan.token_rows, token_ids, sampling_rows, generations, positions, extras)

    def _start(
        self, batch: StepBatch, plan: CheckedStep, token_ids: I64, staging: Staging, errors: RowErrors
    ) -> StepExtras | None:
        columns = self._rows.sampling_columns(plan.sampling_rows, plan.sampled_positions)
        processed = self._rows.processed_rows(plan.sampling_rows, plan.sampled_positions)
        is_filtered = processed is not None or filters.is_needed(columns)
        mask = partial(self._mask, plan, errors) if self._rows.has_grammars(plan.sampling_rows) else None
        wanted = Wanted.of(plan, self._rows)
        has_more = processed is not None and processed.has_more_than_early_bans
        ends_at_logits = mask is not None or wanted is not None or has_more
        slots = None if self._adapters is None else self._adapters.of_tokens(plan.token_rows)
        bucket = self._compute.bucket_of(
            plan, is_filtered=is_filtered, ends_at_logits=ends_at_logits, has_adapters=slots is not None
        )
        known = np.where(token_ids == PENDING, -1, token_ids)
        host = HostStep(plan.starts, plan.context_lens, self._inputs(plan, known))
        deltas = self._buffer.upload(
            staging,
            plan,
            known,
            columns.positions.astype(np.int64),
            bucket,
            changed_words(batch, self._rows, self._state.shape[1]),
        )
        if slots is not None:
            self._buffer.upload_adapters(staging, slots, bucket)
        if len(deltas):
            apply_deltas(self._state, deltas)
        if not len(plan.rows):
            return None
        extras = self._compute.run(bucket, host, is_filtered=is_filtered, mask=mask, wanted=wanted)
        staging.down.copy_(self._compute.results.view(-1), non_blocking=True)
        return extras

    def _inputs(self, plan: CheckedStep, known: I64) -> PlacedInputs | None:
        """The embeddings of the step's inputs. Replaces their content ids in `known`, which the vocabulary lacks."""
        spans = self._rows.inputs.spans(plan.rows, plan.context_lens, plan.ends, plan.starts)
        embedded, _ = self._embedder.embed(spans)
        if embedded is None:
            return None
        known[embedded.tokens] = 0
        return PlacedInputs.of(embedded, self._device)

    def _mask(self, plan: CheckedStep, errors: RowErrors, logits: torch.Tensor) -> None:
        """Applies grammars while the device computes the forward pass. It needs the tokens of all earlier steps."""
        while self._in_flight:
            self._settle(self._in_flight.popleft())
        pending = self._rows.start_masks(plan.sampling_rows, plan.sampled_positions)
        if pending is None:
            return
        masks = pending.result()
        errors.add_all(masks.errors(plan.sampling_rows))
        vocab = self._group.vocab_part(self.info.vocab_size)
        apply_masks(
            logits, masks, self.info.eos_token_ids, has_rules=True, first_id=vocab.start,
            max_over_ranks=self._group.all_reduce_max,
        )  # fmt: skip

    # After the step

    def _settle_finished(self) -> None:
        while self._in_flight and self._in_flight[0].is_done():
            self._settle(self._in_flight.popleft())

    def _settle(self, pending: PendingStep) -> None:
        """Must be called in the order of steps, so that a PENDING token is the last one of its row."""
        pending.result()
        writes, tokens = pending.writes, pending.sampled()
        token_ids = np.where(writes.token_ids == PENDING, self._last_tokens[writes.token_rows], writes.token_ids)
        self._contents.copy_tokens(*writes.copies)
        self._contents.fill_tokens(writes.slots, token_ids)
        self._last_tokens[writes.sampling_rows] = tokens
        self._rows.fill(writes.sampling_rows, writes.generations, writes.positions, tokens)
        self._buffer.give_back(pending.staging)
