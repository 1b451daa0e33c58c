"""Whether a worker should move to another scheduler of its model, so that all schedulers have equally many workers.

A scheduler acknowledges each heartbeat with the number of its workers, and how many of them came before this one. If
another scheduler has at least two workers fewer, half of the difference moves: the workers that came last. All workers
of a scheduler compute the same number, so not more than that move. Then the numbers differ by at most one, and no
worker moves back.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from svc_common.channels import OpenChannel
from svc_common.serve import open_channel

PROBE_TIMEOUT_S = 1.0


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
