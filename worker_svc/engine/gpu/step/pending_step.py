"""A launched step of the GPU engine: its changes to slots and rows, and its results in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from step_protocol.columns import EMPTY, I64, U32, Bools
from step_protocol.messages import StepOutput
from step_protocol.types import RowErrorCode
from worker_svc.engine.gpu.kernels.drafts import BAD, NO_TOKEN
from worker_svc.engine.gpu.step.device_step import StepResults
from worker_svc.engine.gpu.step.drafts import StepDrafts
from worker_svc.engine.gpu.step.step_buffer import Staging
from worker_svc.engine.step import NOTHING_TO_SAMPLE, RowErrors
from worker_svc.engine.step_runner import rows_with_lens


@dataclass(frozen=True, slots=True)
class Writes:
    """Changes of a step to slots and rows, kept until its tokens are known."""

    copies: tuple[I64, I64]  # blocks: source, target
    slots: I64  # [T]
    token_rows: I64  # [T]
    token_ids: I64  # [T], PENDING for a token that the previous step sampled
    sampling_rows: I64  # [S]
    generations: I64  # [S]
    positions: I64  # [S] of the sampled tokens
    reads: Sequence[Callable[[StepResults], None]] = ()  # of what the step computes besides tokens
    drafts: StepDrafts | None = None  # None: the worker computes no drafts

    def touch(self, blocks: I64, block_size: int) -> bool:
        """Whether the step writes to one of these blocks."""
        slots = self.slots if self.drafts is None else np.append(self.slots, self.drafts.verified.slots)
        written = np.append(self.copies[1], slots // block_size)
        return bool(np.isin(blocks, written).any())


NO_IDS: I64 = np.empty(0, np.int64)


class PendingStep:
    """A launched step. `result` waits for the step. Any thread may call `result`, also repeatedly."""

    def __init__(self, step_id: int, staging: Staging, writes: Writes, errors: RowErrors, started: float) -> None:
        self.staging = staging
        self.writes = writes
        self._step_id = step_id
        self._errors = errors
        self.started = started
        self._reading = threading.Lock()
        self._output: StepOutput | None = None
        self.ended = started

    def is_done(self) -> bool:
        return self.staging.event is None or bool(self.staging.event.query())

    def result(self) -> StepOutput:
        """Waits for the outputs of the step. Raises the device's errors."""
        # Settling a step gives its staging memory to another step, so it must wait until no thread reads it.
        with self._reading:
            if self._output is None:
                if self.staging.event is not None:
                    self.staging.event.synchronize()
                self.ended = time.perf_counter()
                self._output = self._read()
            return self._output

    def sampled(self) -> U32:
        """Tokens [S] of all sampling rows, including failed ones."""
        return self.staging.down.numpy()[: len(self.writes.sampling_rows)].astype(np.uint32)

    def statuses(self) -> I64:
        """Of all samples [S], as in kernels/drafts.py."""
        down = self.staging.down.numpy()
        half = len(down) // 2
        return down[half : half + len(self.writes.sampling_rows)].astype(np.int64)

    def _read(self) -> StepOutput:
        rows, statuses = self.writes.sampling_rows, self.statuses()
        is_token = (statuses & NO_TOKEN) == 0
        is_bad = ((statuses & BAD) != 0) & is_token
        output = StepOutput(self._step_id, EMPTY, EMPTY)
        results = StepResults(rows, is_token, is_bad, output, self._errors)
        for read in self.writes.reads:
            read(results)
        for row in rows[results.is_bad].tolist():
            self._errors.add(row, NOTHING_TO_SAMPLE, RowErrorCode.NAN)
        is_good = results.is_good
        output.rows, output.token_ids = rows[is_good].astype(np.uint32), self.sampled()[is_good]
        output.errors = list(self._errors.values())
        output.forward_us = int((time.perf_counter() - self.started) * 1e6)
        if self.writes.drafts is not None:
            self._add_drafts(output, self.writes.drafts, is_good)
        return output

    def _add_drafts(self, output: StepOutput, drafts: StepDrafts, is_good: Bools) -> None:
        """Tokens by row, and what the rows want next."""
        if drafts.has_more.any():
            output.rows, output.token_lens = rows_with_lens(output.rows)
        wanted = drafts.wanted[is_good & (drafts.nth == 0)]
        output.draft_lens = wanted if wanted.any() else None
