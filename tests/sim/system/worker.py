"""A worker process: the real servicer, executor and registration around a symbolic KV cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from request_fields.fields import SamplingParams
from scheduler_svc.core import messages
from scheduler_svc.core.sequence import SequenceGroup
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from step_protocol.types import RowErrorCode
from tests.sim.symbolic_worker import SymbolicWorker, Violation
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.runner import Runner


class ModelThread:
    """The executor's one thread on virtual time: calls run one after the other, each for the time that it sets."""

    def __init__(self, process: Any) -> None:
        self.busy_s = 0.0  # duration of the running call, set by the call
        self._process = process
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = deque()
        self._is_busy = False

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        self._calls.append((lambda: function(*args), None))
        self._go_on()

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self._process.loop.create_future()
        self._calls.append((lambda: function(*args), future))
        self._go_on()
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._calls.clear()

    def _go_on(self) -> None:
        if self._is_busy or not self._calls or self._process.is_dead:
            return
        self._is_busy, self.busy_s = True, 0.0
        function, future = self._calls.popleft()
        try:
            result, error = function(), None
        except Exception as raised:
            result, error = None, raised
        if isinstance(error, Violation):
            self._process.loop.fail(error)
        self._process.call_later(self.busy_s, self._end, future, result, error)

    def _end(self, future: asyncio.Future[Any] | None, result: Any, error: Exception | None) -> None:
        self._is_busy = False
        if future is not None and not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._go_on()


class SymbolicRunner(Runner):
    """Computes with a SymbolicWorker, which checks every slot, commit and row.

    `group_of(seed)` gives the request of a row, `acked(step_id)` the answer that the scheduler had when it sent a step,
    and `step_s(query_lens)` the duration of a step.
    """

    def __init__(
        self,
        symbolic: SymbolicWorker,
        thread: ModelThread,
        info: EngineInfo,
        *,
        group_of: Callable[[int], SequenceGroup],
        acked: Callable[[int], int],
        step_s: Callable[[np.ndarray], float],
    ) -> None:
        self.symbolic = symbolic
        self.info = info
        self.num_steps = 0
        self._thread = thread
        self._group_of, self._acked, self._step_s = group_of, acked, step_s

    def execute(self, batch: StepBatch) -> StepOutput:
        self.num_steps += 1
        self._thread.busy_s += self._step_s(batch.query_lens)
        opens = [self._assignment(opened) for opened in batch.opens]
        batch = replace(batch, opens=opens, worker_id=self.symbolic.capacity.worker_id)
        output = self.symbolic.execute(batch, self._acked(batch.step_id))
        errors = [replace(error, code=RowErrorCode.NAN) for error in output.errors]
        return StepOutput(batch.step_id, output.rows, output.token_ids, errors, 1)

    def _assignment(self, opened: RowOpen) -> messages.RowAssignment:
        return messages.RowAssignment(
            row=opened.row,
            group=self._group_of(opened.sampling.seed),
            sample_index=opened.sample_index,
            token_ids=opened.token_ids,
            prompt_len=opened.prompt_len,
            block_table=opened.block_table,
            num_computed_tokens=opened.num_computed_tokens,
            fork_of_row=opened.fork_of_row,
        )

    def committed_blocks(self) -> Iterator[tuple[np.ndarray, list[bytes], np.ndarray]]:
        blocks = self.symbolic.list_blocks()
        if blocks:
            ids = np.array([block.block_id for block in blocks], dtype=np.uint32)
            yield ids, [block.digest for block in blocks], np.stack([block.token_ids for block in blocks])

    def forget_prefixes(self) -> None:
        self.symbolic.forget_prefixes()

    def reset_rows(self) -> None:
        """A new lease, whose steps count from 1."""
        worker = self.symbolic
        worker.lease()
        worker.fill_step[:] = 0
        worker.num_acked, worker._next_step = 0, 1

    def rows_used(self) -> int:
        return int(self.symbolic.is_open.sum())


def engine_info(capacity: messages.WorkerCapacity, vocab_size: int, eos_token_ids: frozenset[int]) -> EngineInfo:
    """The description of such a worker."""
    return EngineInfo(
        model="symbolic",
        revision="1",
        max_model_len=capacity.max_model_len,
        vocab_size=vocab_size,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        default_sampling=SamplingParams(1.0, 0, 1.0, 0.0, 0),
        dtype="float32",
        determinism="exact",
        backend="symbolic",
        numerics="symbolic",
        build="symbolic",
        attention_window=capacity.attention_window,
    )
