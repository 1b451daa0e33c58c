"""The entry point of the CPU engine: a step, from the columns of a batch to its tokens.

    execute    step_runner.py applies the changes of the batch to the open rows (rows/open_rows.py)
    check      rows that cannot compute fail; the others are a CheckedStep (rows/step_checker.py)
    forward    the model computes keys and values of T tokens, and logits of those that are sampled
    sample     each row gets its token

The rows and the forward pass know no features. Features are parts (row_part.py, step.py), which parts.py lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from step_protocol.columns import EMPTY, I64, U32
from step_protocol.messages import BadBatchError, StepBatch, StepOutput
from step_protocol.types import RowErrorCode
from worker_svc.engine.backend import ForwardBatch, LayerBackend
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.pool.block_payload import MovableBlocks
from worker_svc.engine.engine_info import choose_dtype, make_engine_info
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.numerics import cpu_numerics
from worker_svc.engine.loading import Loaded, ModelSource
from worker_svc.engine.parts import load_model, make_proposer, step_parts
from worker_svc.engine.row_part import having
from worker_svc.engine.step import NOTHING_TO_SAMPLE, CheckedStep, Logits, RowErrors, Sampled, Step, StepPart
from worker_svc.engine.step_runner import StepRunner
from worker_svc.engine.weight_updates import UpdatableWeights

LOGITS_AT_ONCE = 64  # rows of logits in memory when they are read in slices: 38 MB if vocab is 150,000
NO_KERNELS = "the CPU kernels could not be compiled; plain torch is used, about 8 times slower"


class ModelRunner(UpdatableWeights, StepRunner):
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
        self._config, self._is_asleep = config, False
        self._threads = config.threads or available_cores()
        self._bound_thread: int | None = None
        self._bind_thread()
        name = config.backend if layers is None else "cpu"
        self._backend = make_backend(name, self._threads, config.determinism, config.quantize)
        self._layers = layers or self._backend
        checkpoint = Checkpoint(config.model_dir)
        dtype = getattr(torch, choose_dtype(config, checkpoint))
        source = ModelSource(checkpoint, config, self._backend, self._layers, dtype, self._threads, progress)
        loaded = load_model(source)
        self._model: Any = loaded.model  # a Model; None while the weights sleep
        self._pool, self.adapters, self.images = loaded.pool, loaded.adapters, loaded.images
        self._model.fuse(self._pool)
        if name != self._backend.name:
            degradations = (*degradations, NO_KERNELS)
        self._serve_model(source, loaded, self._describe(source, loaded, degradations))
        self._backend.end_load()

    def _serve_model(self, source: ModelSource, loaded: Loaded, info: EngineInfo) -> None:
        """Makes the rows of a model, and the parts of its steps."""
        config = source.config
        self._serve(info, **loaded.features())
        rows = self._rows
        proposer, heads = make_proposer(source, loaded, info, rows)
        self._speculate(config, proposer)
        self._parts = step_parts(rows, self._tables, loaded, heads)
        self._before, self._computed = having(self._parts, StepPart.before), having(self._parts, StepPart.computed)
        self._process, self._sampled = having(self._parts, StepPart.process), having(self._parts, StepPart.sampled)

    def _describe(self, source: ModelSource, loaded: Loaded, degradations: tuple[str, ...]) -> EngineInfo:
        """The facts about the loaded model."""
        backend, config, dtype = self._backend, source.config, choose_dtype(source.config, source.checkpoint)
        name, numerics = backend.name, cpu_numerics(backend.name, backend.arithmetic, formats=backend.formats)
        if self._layers is not backend:
            name = self._layers.arithmetic.partition(",")[0]
            numerics = f"{self._layers.arithmetic}, {numerics}"
        return make_engine_info(
            config, source.checkpoint, dtype, name, numerics, degradations=degradations, **loaded.facts
        )

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
        return self._pool.movable(windows, [one for part in self._rows.block_parts for one in part.movable()])

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
        if batch.parts and self.images is not None:
            self.images.work(batch, self._tables.inputs)
        plan = self._checker.check(batch, errors)
        return self._run(batch, plan, errors) if len(plan.rows) else None

    def _run(self, batch: StepBatch, plan: CheckedStep, errors: RowErrors) -> StepOutput:
        """Runs the forward pass, then samples."""
        step = self._start(batch, plan, errors)
        for part in self._before:
            if part.in_use:
                part.before(step)
        logits = self._forward(step)
        self._rows.mark_computed(plan.rows, plan.ends)
        for part in self._computed:
            if part.in_use:
                part.computed(step, logits)
        if len(plan.sampling_rows):
            self._sample(step, logits)
        return step.output

    def _start(self, batch: StepBatch, plan: CheckedStep, errors: RowErrors) -> Step:
        token_ids = self._rows.token_ids(plan.token_rows, plan.positions)
        self._pool.write_tokens(plan.slots, token_ids)
        heads = np.unique(plan.sampled_tokens) if plan.has_forks else plan.sampled_tokens
        forward = ForwardBatch(
            token_ids=token_ids,
            positions=plan.positions.astype(np.int32),
            slots=plan.slots,
            rows=plan.rows.astype(np.int32),
            query_starts=plan.starts.astype(np.int32),
            context_lens=plan.context_lens.astype(np.int32),
            tables=self._rows.tables,
            head_tokens=heads,
        )
        output = StepOutput(batch.step_id, EMPTY, EMPTY)
        return Step(batch, plan, errors, output, forward, heads, self._model, self._backend, self._pool)

    def _forward(self, step: Step) -> torch.Tensor:
        """The logits of the step's `heads`."""
        if step.read_slices is not None:
            return step.read_slices(step, self._model.forward_in_slices(step.forward, self._pool, LOGITS_AT_ONCE))
        logits: torch.Tensor = self._model.forward(step.forward, self._pool)
        return logits

    def _sample(self, step: Step, head_logits: torch.Tensor) -> None:
        """Sets the sampled tokens, and what belongs to them."""
        plan, errors = step.plan, step.errors
        rows, positions = plan.sampling_rows, plan.sampled_positions
        if len(step.heads) > len(rows) or plan.has_forks:
            head_logits = head_logits[torch.from_numpy(np.searchsorted(step.heads, plan.sampled_tokens))]
        columns = self._rows.sampling_columns(rows, positions)
        logits = Logits(head_logits, rows, positions, columns.positions)
        for part in self._process:
            if part.in_use:
                part.process(step, logits)
        token_ids, is_bad = self._backend.sample(logits.values, columns)
        is_token = self._is_token(plan, token_ids, is_bad)
        for row in rows[is_bad & is_token]:
            errors.add(int(row), NOTHING_TO_SAMPLE, RowErrorCode.NAN)
        is_good = is_token & ~is_bad
        if len(errors):
            is_good &= [int(row) not in errors for row in rows]
        found = Sampled(columns, token_ids, is_token, is_good)
        for part in self._sampled:
            if part.in_use:
                part.sampled(step, logits, found)
        self._append_samples(plan, rows[is_good], positions[is_good], token_ids[is_good], step.output)
