"""A scheduler's lease of this worker: its fence, its step numbers, and the answers kept for repetitions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from quire.internal.v1 import worker_pb2

from svc_common.errors import ServiceError, StaleEpochError

Answer = asyncio.Future[worker_pb2.StepOutput]

NUM_KEPT_ANSWERS = 64
FIRST_STEP_ID = 1
MAX_EPOCH_JUMP = 1 << 32  # so that one Lease cannot use up the epochs; far above the leases of any deployment


class StepOrderError(StaleEpochError):
    """The step is neither the next one nor a retry of a step whose answer is still kept."""


class Lease:
    """One scheduler's lease of this worker: its fence, step numbers and last answers."""

    def __init__(self, epoch: int, worker_epoch: int, scheduler_id: str) -> None:
        nonce = secrets.randbits(64)
        self.fence = worker_pb2.Fence(scheduler_epoch=epoch, worker_epoch=worker_epoch, nonce=nonce)
        self.scheduler_id = scheduler_id
        self.next_step_id = FIRST_STEP_ID  # next id to accept; owned by the event loop
        self.next_to_run = FIRST_STEP_ID  # next id to run; owned by the model thread
        self.is_pool_asleep = False  # the memory of the KV pool is free: nothing may be written to it
        self.end_error: ServiceError | None = None
        self._answers: dict[int, Answer] = {}
        self._on_end: set[Callable[[ServiceError], None]] = set()
        self._num_answered = FIRST_STEP_ID - 1  # id of the newest step that has run
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def epoch(self) -> int:
        return self.fence.scheduler_epoch

    def answer_of(self, step_id: int) -> Answer | None:
        """The kept (or pending) answer to a repeated step id; None for the next step id. StepOrderError otherwise."""
        if step_id == self.next_step_id:
            return None
        if step_id in self._answers:
            return self._answers[step_id]
        kept = f"; answers to steps {min(self._answers)} to {max(self._answers)} are kept" if self._answers else ""
        raise StepOrderError(f"expected step {self.next_step_id}, got {step_id}{kept}", field="batch.step_id")

    def accept(self, step_id: int, answer: Answer) -> None:
        """Step `step_id` is queued; its answer is kept for repetitions."""
        self.next_step_id = step_id + 1
        self._answers[step_id] = answer
        self._answers.pop(step_id - NUM_KEPT_ANSWERS, None)
        answer.add_done_callback(lambda done: self._undo_if_refused(step_id, done))

    def _undo_if_refused(self, step_id: int, answer: Answer) -> None:
        is_refused = not answer.cancelled() and answer.exception() is not None
        if not is_refused and not answer.cancelled():
            self._count_answered(step_id)
        if not is_refused or self._answers.get(step_id) is not answer:
            return
        self.next_step_id = step_id
        self._answers = {kept: value for kept, value in self._answers.items() if kept < step_id}

    def _count_answered(self, step_id: int) -> None:
        self._num_answered = step_id
        due = [ran for waited, ran in self._waiting if waited <= step_id]
        self._waiting = [(waited, ran) for waited, ran in self._waiting if waited > step_id]
        for ran in due:
            if not ran.done():
                ran.set_result(None)

    async def wait_for(self, step_id: int) -> None:
        """Wait until this step has run. Raises the error that ends the lease."""
        if self.end_error is not None:
            raise self.end_error
        if step_id <= self._num_answered:
            return
        ran: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((step_id, ran))
        await ran

    def watch(self, on_end: Callable[[ServiceError], None]) -> Callable[[], None]:
        """Call `on_end` once when this lease ends. Returns a function that stops watching."""
        if self.end_error is not None:
            on_end(self.end_error)
        self._on_end.add(on_end)
        return lambda: self._on_end.discard(on_end)

    def end(self, error: ServiceError) -> None:
        """End the lease; its streams end with `error`."""
        self.end_error = error
        for _, ran in self._waiting:
            if not ran.done():
                ran.set_exception(error)
        self._waiting.clear()
        for on_end in list(self._on_end):
            on_end(error)


def bad_epoch(epoch: int, last: int) -> StaleEpochError:
    """The error for a Lease with an epoch that is too low, or far too high."""
    what = "is stale" if epoch <= last else f"is more than {MAX_EPOCH_JUMP} above the last epoch"
    return StaleEpochError(
        f"scheduler_epoch {epoch} {what}: this worker was leased with {last}; use a higher epoch, or 0 for the next",
        field="scheduler_epoch",
    )


def superseded(older: Lease, newer: Lease) -> StaleEpochError:
    """The error that ends the streams of an older lease."""
    return StaleEpochError(
        f"the lease of scheduler_epoch {older.epoch} has ended: {newer.scheduler_id or 'another scheduler'} "
        f"leased this worker with {newer.epoch}",
        field="fence.scheduler_epoch",
    )
