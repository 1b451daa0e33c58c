"""The model thread, and the order in which steps enter it.

    event loop                      model thread                          results thread (if `launches`)
    ----------                      ------------                          -------------------------------------
    submit: fence, step id, form
    accept: answer pending   -----> check turn, execute -> output
    settle: answer complete  <-----
                             -----> check turn, launch  ----------------> wait for the device -> output
                             <--------------------------------------------

Owners
    The runner, and with it the rows and the KV pool, belongs to the model thread: it is made, used and reset there. The
    lease belongs to the event loop; the model thread only reads which lease is current, and owns `next_to_run`. There
    is no lock. The event loop never computes, and the model thread never waits for the network while there is a step in
    its queue. The steps of one message are one job of the thread and wake the event loop once, because both threads
    share one interpreter.

Order
    A step is accepted only if its fence names the current lease and its id is the next one (lease.next_step_id). The
    thread's queue keeps the order of acceptance, and before a step runs, its id must be lease.next_to_run, which grows
    only when a step has run. So steps run once and in order, or not at all:

    - a step of a wrong form is refused when it arrives; nothing of it was queued;
    - a step that contradicts the pool (BadBatchError) is refused when it runs; the engine has changed nothing. The
      steps that were accepted behind it find that next_to_run did not grow, and are refused too (StepOrderError). A
      refusal takes back the acceptance (Lease.accept), so corrected steps may follow under the same ids;
    - a row that fails is an error in an ordinary output. The other rows are not affected;
    - any other exception leaves a pool that may be half written: `on_fatal` ends the process, and a restarted worker
      begins with an empty pool.

Two steps in flight
    A scheduler sends step n + 1 before it knows the tokens of step n: for decoding rows it needs only their number.
    The worker then has the next step when one ends, and the time of a round trip is hidden. A runner that
    `launches` starts step n + 1 on the device while step n still runs there, and the results thread reads the
    outputs in order; the runner carries the tokens from one step to the next on the device. Up to pipeline_depth
    messages may be unanswered (StepInbox reads no further), and a message is a step or a burst.

A repeated step
    A caller whose stream broke may repeat steps on a new stream of the same lease; our scheduler takes a new lease
    instead. An id that was accepted before gets its earlier answer, finished or not, and does not run again: the last
    64 answers are kept with the lease. An id that is neither kept nor the next one is refused. An answer is a future of
    the lease and not of the stream, so a caller that disconnects cancels nothing.

A new lease
    It takes effect at once on the event loop: steps of the old lease that are queued are refused when their turn comes,
    and the output of a running one goes to a stream that has ended. The model thread resets the rows behind the running
    step, before the first step of the new lease. Committed blocks stay, because the next scheduler may adopt them
    (ListBlocks), with the seals that say under which lease they were committed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quire.internal.v1 import worker_pb2

from step_protocol.messages import BadBatchError, StepBatch, StepOutput
from step_protocol.proto import output_to_proto
from svc_common.errors import InvalidRequestError, ServiceError, StaleEpochError, UnavailableError
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.decoder.pool.block_payload import Movable
from worker_svc.engine.runner import Runner
from worker_svc.engine.speculation.drafts import DraftCounts
from worker_svc.metrics import ImageCounts, StepMeter
from worker_svc.seals import Seals
from worker_svc.steps.lease import MAX_EPOCH_JUMP, Answer, Lease, StepOrderError, bad_epoch, superseded
from worker_svc.steps.row_traces import RowLog, RowTraces
from worker_svc.wire import blocks_to_proto, commit_tags, step_batch_from_proto

log = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = worker_pb2.StepOutput | Exception
OnStep = Callable[[StepBatch, int, bytes], None]  # a step that ran, scheduler_epoch, tags of the blocks that it commits

IDLE_S = 0.5  # without a step; then the runner's other work begins
EXIT_CORRUPT = 70  # EX_SOFTWARE: the pool may be corrupt


def end_process(error: BaseException) -> None:
    """Exit at once: the KV pool may be half written, and a restarted worker begins with an empty pool."""
    log.critical("the KV pool may be corrupt, so this worker exits (exit code %d)", EXIT_CORRUPT, exc_info=error)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_CORRUPT)


@dataclass(slots=True)
class QueuedStep:
    """An accepted step."""

    batch: StepBatch
    answer: Answer
    queued_at: float
    commit_tags: bytes = b""  # 16 per committed block, or empty
    queue_us: int = 0  # time that it waited for the model

    def begin(self) -> None:
        self.queue_us = int((time.monotonic() - self.queued_at) * 1e6)


class StepExecutor:
    """Owns the runner, the only thread that may use it, and the current lease.

    A step with a wrong fence, order or form is refused as a whole and changes nothing. It may be corrected and sent
    again under the same id. Any other exception of the runner goes to `on_fatal`, which is not expected to return.
    """

    def __init__(
        self,
        *,
        worker_epoch: int,
        on_fatal: Callable[[BaseException], None] = end_process,
        row_traces: RowTraces | None = None,
    ) -> None:
        self.worker_epoch = worker_epoch
        self.rows_used = 0
        self.num_orders = 0  # leases and steps so far
        self.num_leases = 0
        self.meter = StepMeter()
        self.on_step: OnStep | None = None  # called in the model thread
        self._row_log = RowLog()
        self._row_traces = row_traces
        self._failed_rows: set[int] = set()  # rows whose failure is logged; until they are opened again
        self._seals = Seals()
        self._on_fatal = on_fatal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="results")  # waits for pipelined steps, in order
        self._runner: Runner | None = None
        self._lease: Lease | None = None
        self._last_epoch = 0
        self._in_flight: set[Answer] = set()
        self._busy_since = self._idle_since = time.monotonic()
        self._idle_timer: asyncio.TimerHandle | None = None

    # -- the model -------------------------------------------------------------------------------------------------

    async def load(self, make_runner: Callable[[], Runner]) -> EngineInfo:
        """Make the runner in the model thread. Raises the errors of `make_runner`."""
        self._runner = await self._call(make_runner)
        return self._runner.info

    def close(self) -> None:
        """Drop queued work; a running step is not interrupted."""
        self._stop_awaiting_idleness()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._results.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise UnavailableError("the worker is still loading its weights; retry later", retry_after_s=1.0)
        return self._runner

    @property
    def runner(self) -> Runner:
        """The runner, for what another thread than the model's may call. Raises UnavailableError while it loads."""
        return self._loaded()

    @property
    def adapters(self) -> AdapterStore[Any, Any] | None:
        """The adapters of the model. None: it is not loaded yet, or its backend computes none."""
        return None if self._runner is None else self._runner.adapters

    # -- leases ----------------------------------------------------------------------------------------------------

    def lease(self, epoch: int, scheduler_id: str) -> Lease:
        """A scheduler leases this worker: the previous lease ends, all rows are closed, committed blocks stay.

        It does not wait for a running step, whose result is discarded. The model thread closes the rows before the
        first step of the new lease. `epoch` 0 means the last one + 1. Raises StaleEpochError unless it is higher
        than all previous epochs, by at most MAX_EPOCH_JUMP.
        """
        runner = self._loaded()
        last = self._last_epoch
        epoch = epoch or last + 1
        if not last < epoch <= last + MAX_EPOCH_JUMP:
            raise bad_epoch(epoch, last)
        lease = Lease(epoch, self.worker_epoch, scheduler_id)
        older, self._lease, self._last_epoch = self._lease, lease, epoch
        if older is not None:
            older.end(superseded(older, lease))
        self.num_orders += 1
        self.num_leases += 1
        self._row_log.reset()
        if self._row_traces is not None:
            self._row_traces.reset()
        self.rows_used = 0
        if runner.adapters is not None:
            runner.adapters.reset()
        self._thread.submit(self._reset_rows, runner)
        return lease

    def release(self, reason: str) -> None:
        """End the current lease, if there is one; its rows stay until the next lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end(UnavailableError(reason))

    def _reset_rows(self, runner: Runner) -> None:
        try:
            runner.reset_rows()
        except Exception as error:
            self._on_fatal(error)
            raise

    def current_lease(self) -> Lease:
        """The current lease; StaleEpochError if there is none."""
        if self._lease is None:
            raise StaleEpochError("this worker is not leased; call Lease first")
        return self._lease

    def check_fence(self, fence: worker_pb2.Fence) -> Lease:
        """The lease of `fence`. StaleEpochError unless it is the current lease."""
        if fence.worker_epoch != self.worker_epoch:
            raise StaleEpochError(
                f"worker_epoch {fence.worker_epoch:#x} does not match this process "
                f"({self.worker_epoch:#x}); call Lease again",
                field="fence.worker_epoch",
            )
        lease = self.current_lease()
        if fence.scheduler_epoch != lease.epoch:
            raise StaleEpochError(
                f"scheduler_epoch {fence.scheduler_epoch} does not hold the lease; {lease.epoch} does",
                field="fence.scheduler_epoch",
            )
        if fence.nonce != lease.fence.nonce:
            raise StaleEpochError("the nonce is not that of the lease; call Lease", field="fence.nonce")
        return lease

    def _check_current(self, lease: Lease) -> None:
        current = self._lease
        if current is None:
            raise StaleEpochError(
                f"the lease of scheduler_epoch {lease.epoch} has ended", field="fence.scheduler_epoch"
            )
        if current is not lease:
            raise superseded(lease, current)

    # -- steps -----------------------------------------------------------------------------------------------------

    def submit(self, messages: Sequence[worker_pb2.StepBatch]) -> list[Answer]:
        """Queue the steps of one message. Their answers complete together, after the last step has run. A repeated step
        id gets its earlier answer and does not run again.

        A refused step completes with StaleEpochError, StepOrderError or InvalidRequestError. If it is refused at once,
        the steps after it get no answer.
        """
        answers: list[Answer] = []
        queued: list[QueuedStep] = []
        try:
            runner = self._loaded()
            for message in messages:
                lease = self.check_fence(message.fence)
                answers.append(lease.answer_of(message.step_id) or self._accept(lease, message, queued))
        except ServiceError as error:
            answers.append(_refusal(error))
        if queued:
            self._start(runner, lease, queued).add_done_callback(partial(_settle, queued))
        return answers

    def _accept(self, lease: Lease, message: worker_pb2.StepBatch, queued: list[QueuedStep]) -> Answer:
        batch, tags = step_batch_from_proto(message), commit_tags(message)
        if log.isEnabledFor(logging.DEBUG):
            self._row_log.note(message, batch)
        if self._row_traces is not None:
            self._row_traces.note(message, batch)
        if len(batch.commit_blocks):
            self._seals.note(lease.epoch, batch.commit_blocks, tags)
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(self._record_answered)
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight.add(answer)
        self.num_orders += 1
        lease.accept(batch.step_id, answer)
        queued.append(QueuedStep(batch, answer, time.monotonic(), tags))
        return answer

    def _start(self, runner: Runner, lease: Lease, steps: Sequence[QueuedStep]) -> asyncio.Future[list[Outcome]]:
        loop = asyncio.get_running_loop()
        if not runner.launches:
            return loop.run_in_executor(self._thread, self._run_all, runner, lease, steps)
        done: Future[list[Outcome]] = Future()
        self._thread.submit(self._launch_all, runner, lease, steps, done)
        return asyncio.wrap_future(done, loop=loop)

    def _run_all(self, runner: Runner, lease: Lease, steps: Sequence[QueuedStep]) -> list[Outcome]:
        return [self._run(runner, lease, step) for step in steps]

    def _run(self, runner: Runner, lease: Lease, step: QueuedStep) -> Outcome:
        step.begin()
        try:
            self._check_turn(lease, step.batch)
            output = self._measured(step, lambda: runner.execute(step.batch))
            self._record_run(runner, lease)
            if self.on_step is not None:
                self.on_step(step.batch, lease.epoch, step.commit_tags)
        except Exception as error:
            return error
        return self._to_response(output, step)

    def _launch_all(
        self, runner: Runner, lease: Lease, steps: Sequence[QueuedStep], done: Future[list[Outcome]]
    ) -> None:
        """The model thread only starts the steps; the results thread waits for their output."""
        if not done.set_running_or_notify_cancel():
            return
        outcomes: list[Outcome] = []
        for step in steps:
            launched = self._launch(runner, lease, step)
            self._results.submit(self._read, step, launched, outcomes)
        self._results.submit(done.set_result, outcomes)

    def _launch(self, runner: Runner, lease: Lease, step: QueuedStep) -> Any:
        step.begin()
        try:
            self._check_turn(lease, step.batch)
            launched = self._guarded(step.batch, lambda: runner.launch(step.batch))
            self._record_run(runner, lease)
            if self.on_step is not None:
                self.on_step(step.batch, lease.epoch, step.commit_tags)
        except Exception as error:
            return error
        return launched

    def _read(self, step: QueuedStep, launched: Any, outcomes: list[Outcome]) -> None:
        try:
            if isinstance(launched, Exception):
                raise launched
            outcomes.append(self._to_response(self._measured(step, launched.result), step))
        except Exception as error:
            outcomes.append(error)

    def _to_response(self, output: StepOutput, step: QueuedStep) -> worker_pb2.StepOutput:
        """The answer to a step. The first failure of a row is logged too: retries may hide it."""
        if self._row_traces is not None and output.errors:
            self._row_traces.record_output(output)
        if self._failed_rows:
            self._failed_rows.difference_update((item.row for item in step.batch.opens), step.batch.fork_rows.tolist())
        new = [error for error in output.errors if error.row not in self._failed_rows]
        self._failed_rows.update(error.row for error in new)
        for error in new:
            log.error("step %d: row %d failed (%s): %s", output.step_id, error.row, error.code.name, error.message)
        return output_to_proto(output, worker_epoch=self.worker_epoch, queue_us=step.queue_us)

    def _check_turn(self, lease: Lease, batch: StepBatch) -> None:
        self._check_current(lease)
        if batch.step_id != lease.next_to_run:
            raise StepOrderError(f"step {batch.step_id} follows step {lease.next_to_run}, which was refused")

    def _record_run(self, runner: Runner, lease: Lease) -> None:
        lease.next_to_run += 1
        rows_used = runner.rows_used()
        if self._lease is lease:  # else the rows are about to be closed
            self.rows_used = rows_used

    def _measured(self, step: QueuedStep, compute: Callable[[], StepOutput]) -> StepOutput:
        is_done = False
        self.meter.begin(step.batch, step.queued_at)
        try:
            output = self._guarded(step.batch, compute)
            is_done = True
            return output
        finally:
            self.meter.end(step.batch, is_done=is_done)

    def _guarded(self, batch: StepBatch, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except BadBatchError as error:
            raise InvalidRequestError(f"step {batch.step_id}: {error}", field="batch") from error
        except Exception as error:
            self._on_fatal(error)
            raise

    def _record_answered(self, answer: Answer) -> None:
        self._in_flight.discard(answer)
        self._idle_since = time.monotonic()
        if not answer.cancelled():
            answer.exception()  # mark as retrieved: the caller may have disconnected
        if self._runner is not None and self._runner.works_when_idle and not self._in_flight:
            self._await_idleness(self._runner)

    def _await_idleness(self, runner: Runner) -> None:
        """When no step has come for IDLE_S, the runner does a part of its other work, then the next one."""
        self._stop_awaiting_idleness()
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._use_idleness, runner)

    def _stop_awaiting_idleness(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _use_idleness(self, runner: Runner) -> None:
        if self._in_flight:
            return
        work = asyncio.get_running_loop().run_in_executor(self._thread, runner.work_when_idle)
        work.add_done_callback(partial(self._end_idle_work, runner))

    def _end_idle_work(self, runner: Runner, work: asyncio.Future[bool]) -> None:
        if work.cancelled():
            return
        if (error := work.exception()) is not None:
            self._on_fatal(error)
        elif work.result() and not self._in_flight:
            self._await_idleness(runner)

    @property
    def num_in_flight(self) -> int:
        """Steps that are accepted and not yet answered."""
        return len(self._in_flight)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of host memory by use; empty if the runner does not know them."""
        return {} if self._runner is None else self._runner.memory

    @property
    def images(self) -> ImageCounts | None:
        """Counts of images; None if the model takes none."""
        return None if self._runner is None else self._runner.images

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of drafts; None if no row speculates."""
        return None if self._runner is None else self._runner.draft_counts

    @property
    def is_leased(self) -> bool:
        """Whether a scheduler leases this worker."""
        return self._lease is not None

    @property
    def idle_s(self) -> float:
        """Seconds since the last step ended; 0 while one is queued or runs."""
        return 0.0 if self._in_flight else time.monotonic() - self._idle_since

    @property
    def stalled_s(self) -> float:
        """Seconds for which steps were in flight and none has ended: large if the engine hangs, not if it is busy."""
        if not self._in_flight:
            return 0.0
        return time.monotonic() - max(self._busy_since, self._idle_since)

    @property
    def is_stuck(self) -> bool:
        """Whether the running step hangs. Read it once per heartbeat."""
        return self.meter.stuck.look(time.monotonic())

    # -- blocks ----------------------------------------------------------------------------------------------------

    async def list_blocks(self, fence: worker_pb2.Fence) -> list[worker_pb2.ListBlocksResponse]:
        """All committed blocks, read between two steps."""
        runner = self._loaded()
        lease = self.check_fence(fence)
        blocks = await self._call(lambda: list(_blocks(runner, self._seals)))
        self._check_current(lease)
        return blocks

    def movable_blocks(self) -> Movable | None:
        """The blocks of the pool as bytes; None if the model's blocks cannot leave it."""
        return self._loaded().movable_blocks()

    async def write_blocks(self, lease: Lease, after_step_id: int, write: Callable[[], None]) -> None:
        """Call `write` between two steps, when this step has run. It writes to blocks that no later step uses before
        the scheduler knows. Raises StaleEpochError if the lease has ended, because the blocks may have other owners,
        and while the pool sleeps.
        """
        await lease.wait_for(after_step_id)
        await self._call(partial(self._write_blocks, lease, write))

    async def between_steps(self, lease: Lease, change: Callable[[], None]) -> None:
        """Call `change`, which changes the weights, between two steps of the lease. Raises StaleEpochError."""
        await self._call(partial(self._change, lease, change))

    def _write_blocks(self, lease: Lease, write: Callable[[], None]) -> None:
        if lease.is_pool_asleep:
            raise StaleEpochError("the KV pool of this worker sleeps; wake it first")
        self._change(lease, write)

    def _change(self, lease: Lease, change: Callable[[], None]) -> None:
        self._check_current(lease)
        change()


def _refusal(error: ServiceError) -> Answer:
    """An answer that is already known."""
    answer: Answer = asyncio.get_running_loop().create_future()
    answer.set_exception(error)
    answer.exception()  # mark as retrieved, even if no caller awaits it
    return answer


def _settle(steps: Sequence[QueuedStep], done: asyncio.Future[list[Outcome]]) -> None:
    """Set the answers of the steps of one job."""
    outcomes: Sequence[Outcome | None] = [None] * len(steps) if done.cancelled() else done.result()
    for step, outcome in zip(steps, outcomes, strict=True):
        if outcome is None:
            step.answer.cancel()
        elif isinstance(outcome, Exception):
            step.answer.set_exception(outcome)
        else:
            step.answer.set_result(outcome)


def _blocks(runner: Runner, seals: Seals) -> Iterator[worker_pb2.ListBlocksResponse]:
    return (blocks_to_proto(*columns, seals) for columns in runner.committed_blocks())
