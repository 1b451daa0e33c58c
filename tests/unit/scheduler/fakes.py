"""Fakes for the step loop: links that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from prefix_index.index import PrefixChanges, PrefixIndex
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.adapters import AdapterSwap
from scheduler_svc.core.messages import Deltas
from scheduler_svc.step_loop import ModelFacts, StepLoop
from step_protocol.messages import StepBatch, StepOutput
from svc_common.errors import ServiceError
from tests.builders import make_capacity


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Wait until `condition()` is true, while the event loop runs."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


async def settle() -> None:
    """Let all ready callbacks run."""
    for _ in range(10):
        await asyncio.sleep(0)


class FakeWorker:
    """A WorkerLink. `answer()` answers its oldest step: every sampling row gets `token`."""

    def __init__(self, loop: StepLoop, worker_id: str = "w0", worker_epoch: int = 1) -> None:
        self.worker_id = worker_id
        self.worker_epoch = worker_epoch
        self.address = "127.0.0.1:1"
        self.loop = loop
        self.sent: list[StepBatch] = []
        self.num_answered = 0
        self.closed: str | None = None
        self.swaps: list[AdapterSwap] = []

    def send(self, batch: StepBatch) -> None:
        self.sent.append(batch)

    def swap_adapter(self, swap: AdapterSwap) -> None:
        self.swaps.append(swap)

    def close(self, reason: str) -> None:
        self.closed = reason

    @property
    def unanswered(self) -> list[StepBatch]:
        return self.sent[self.num_answered :]

    def join(self, facts: ModelFacts | None = None, **capacity: int) -> None:
        self.loop.worker_joined(
            self,
            make_capacity(self.worker_id, worker_epoch=self.worker_epoch, **capacity),
            facts or ModelFacts(),
        )

    def answer(self, token: int = 7) -> None:
        batch = self.unanswered[0]
        self.num_answered += 1
        rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
        tokens = np.full(len(rows), token, dtype=np.uint32)
        self.loop.step_answered(self, StepOutput(batch.step_id, rows, tokens, worker_id=self.worker_id))

    async def answer_all(self, token: int = 7) -> None:
        """Answer steps until no more are sent."""
        await settle()
        while self.unanswered:
            self.answer(token)
            await settle()


class FakeGateway:
    """A GatewayLink."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, ServiceError | None]] = []
        self.delivered: list[Deltas] = []

    def reply(self, handle: int, error: ServiceError | None) -> None:
        self.replies.append((handle, error))

    def deliver(self, deltas: Deltas) -> None:
        self.delivered.append(deltas)

    def tokens(self, handle: int, sample_index: int = 0) -> list[int]:
        """The tokens delivered for one sample, checked for gaps and repetitions."""
        tokens: list[int] = []
        for deltas in self.delivered:
            mine = (deltas.handles == handle) & (deltas.sample_indices == sample_index)
            for offset, token in zip(deltas.offsets[mine].tolist(), deltas.token_ids[mine].tolist(), strict=True):
                assert offset == len(tokens)
                tokens.append(token)
        return tokens

    def reasons(self) -> dict[tuple[int, int], str]:
        return {(f.group.handle, f.sample_index): f.reason.value for deltas in self.delivered for f in deltas.finished}


class FakeIndex(PrefixIndex):
    """A PrefixIndex with a reader. Records what is published."""

    is_shared = True

    def __init__(self) -> None:
        self.published: list[PrefixChanges] = []

    def publish(self, changes: Sequence[PrefixChanges]) -> None:
        self.published += changes


@asynccontextmanager
async def running_loop(index: PrefixIndex | None = None, **config: object) -> AsyncIterator[StepLoop]:
    """A running step loop. An exception in it fails the test."""
    loop = StepLoop(SchedulerConfig(**config), index or PrefixIndex())  # type: ignore[arg-type]
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        loop.stop()
        await task
