"""The schedulers that a worker may register with: its order of preference, and when it moves to another one.

All schedulers of a model shall have equally many workers. A scheduler acknowledges each heartbeat with the number of
its workers, and how many of them came before this one. If another scheduler has at least two workers fewer, half of the
difference moves: the workers that came last. All workers of a scheduler compute the same number, so not more than that
move. Then the numbers differ by at most one, and no worker moves back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from svc_common.channels import OpenChannel
from svc_common.serve import open_channel

FIRST_PAUSE_S = 0.1
PROBE_TIMEOUT_S = 1.0


@dataclass(slots=True, eq=False)
class SchedulerCandidate:
    """One scheduler, and when to try it again. Times are the event loop's."""

    address: str
    next_try_at: float = 0.0
    next_return_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    logged: set[str] = field(default_factory=set)


def preference(worker_id: str, schedulers: Sequence[str]) -> list[str]:
    """The schedulers in this worker's order, which differs between workers. Adding one does not reorder the others."""
    return sorted(set(schedulers), key=lambda address: xxhash.xxh3_64_intdigest(f"{worker_id}\n{address}".encode()))


class SchedulerCandidates:
    """The schedulers in order. They may change while the worker runs."""

    def __init__(self, worker_id: str, schedulers: Sequence[str] = ()) -> None:
        self._worker_id = worker_id
        self._ordered: list[SchedulerCandidate] = []
        self._changed = asyncio.Event()
        self.update(schedulers)

    def __iter__(self) -> Iterator[SchedulerCandidate]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    def update(self, schedulers: Sequence[str]) -> None:
        """These are the schedulers now. What is known about those that stay is kept."""
        known = {candidate.address: candidate for candidate in self._ordered}
        ordered = preference(self._worker_id, schedulers)
        self._ordered = [known.get(address) or SchedulerCandidate(address) for address in ordered]
        self._changed.set()

    async def choose(self) -> SchedulerCandidate:
        """The next scheduler to try: the first one whose pause has passed. Waits if all must wait, or there is none."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            ready = next((c for c in self._ordered if c.next_try_at <= now), None)
            if ready is not None:
                return ready
            await self._wait(min((c.next_try_at - now for c in self._ordered), default=None))

    async def _wait(self, pause_s: float | None) -> None:
        """Wait for the end of a pause, or for a change of the schedulers."""
        try:
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        except TimeoutError:
            return


@dataclass(frozen=True, slots=True)
class Share:
    """The workers of the present scheduler. `num_workers` is 0 if the scheduler does not report it."""

    num_workers: int = 0
    num_earlier: int = 0  # workers that came before this one

    def should_move(self, num_there: int) -> bool:
        """Whether this worker should move to a scheduler that has `num_there` workers."""
        num_moving = (self.num_workers - num_there) // 2
        return num_moving > 0 and self.num_earlier >= self.num_workers - num_moving


async def count_workers(
    scheduler: str, open_channel: OpenChannel = open_channel
) -> scheduler_pb2.CountWorkersResponse | None:
    """The workers of a scheduler that accepts more; None if it is unreachable, frozen or draining."""
    async with open_channel(scheduler) as channel:
        try:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
            )
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return None
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await stub.CountWorkers(scheduler_pb2.CountWorkersRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
