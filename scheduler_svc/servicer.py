"""The RPCs of SchedulerService: each decodes a request, calls one part, encodes the response."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1 import scheduler_pb2_grpc
from quire.v1 import rollouts_pb2, types_pb2

from prefix_index.index import PrefixIndex
from scheduler_svc.gateways.streams import Gateways
from scheduler_svc.history import add_totals, history_to_proto, request_to_proto
from scheduler_svc.other_schedulers import OtherSchedulers, lend
from scheduler_svc.status import PoolSnapshots, describe
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.leased_worker import Dialer
from scheduler_svc.workers.pool import WorkerPool
from svc_common.errors import NotFoundError
from svc_common.observe.inspection import Inspector
from svc_common.security.trust import Trust

if TYPE_CHECKING:
    from svc_common.observe.otlp import Tracer

SERVICE_NAME = "quire.internal.v1.SchedulerService"
CALLERS = {
    f"{SERVICE_NAME}/{method}": {role}
    for method, role in {
        "Attach": "gateway",
        "GetBundle": "gateway",
        "AbortRequests": "gateway",
        "GetSchedulerStatus": "gateway",
        "GetPools": "gateway",
        "GetHistory": "gateway",
        "AddAdapter": "gateway",
        "RemoveAdapter": "gateway",
        "GetAdapters": "gateway",
        "ControlRollouts": "gateway",
        "AddTensors": "gateway",
        "InspectScheduler": "gateway",
        "ReleaseWorker": "gateway",
        "Register": "worker",
        "CountWorkers": "worker",
        "LendBlocks": "scheduler",
    }.items()
}
BUNDLE_PIECE_BYTES = 1 << 20
MAX_REGISTER_BYTES = 256 << 10  # of one message of a worker, with the names and paths of its adapters

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The components of one scheduler."""

    step_loop: StepLoop
    index: PrefixIndex
    gateways: Gateways
    pool: WorkerPool
    dialer: Dialer
    tracer: Tracer | None = None
    others: OtherSchedulers | None = None


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Implements SchedulerService: decodes a request, calls one component, encodes the response."""

    def __init__(self, parts: SchedulerParts, trust: Trust, inspector: Inspector) -> None:
        self._parts = parts
        self._inspector = inspector
        self._snapshots = PoolSnapshots(parts.step_loop, time.monotonic)
        self._trust = trust
        self.address = ""
        self._unix_offset = time.time() - time.monotonic()

    def _to_unix(self, at: float) -> float:
        """The Unix time of a time of the event loop."""
        return at + self._unix_offset

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        async for response in self._parts.gateways.attach(request_iterator):
            yield response

    async def Register(
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: Context
    ) -> AsyncIterator[pb.RegisterResponse]:
        may_use_id = functools.partial(self._trust.check_worker_id, context)
        async for response in self._parts.pool.register(request_iterator, may_use_id):
            yield response

    async def CountWorkers(self, request: pb.CountWorkersRequest, context: Context) -> pb.CountWorkersResponse:
        pool = self._parts.pool
        served = pool.served or types_pb2.ModelInfo()
        return pb.CountWorkersResponse(num_workers=pool.num_members, model=served.model, revision=served.revision)

    async def GetBundle(self, request: pb.GetBundleRequest, context: Context) -> AsyncIterator[pb.GetBundleResponse]:
        data = self._parts.dialer.bundles.get(request.digest)
        if data is None:
            raise NotFoundError(
                f"no bundle has digest {request.digest.hex() or '(empty)'}; use the digest in Welcome.info",
                field="digest",
            )
        for start in range(0, len(data), BUNDLE_PIECE_BYTES):
            yield pb.GetBundleResponse(data=data[start : start + BUNDLE_PIECE_BYTES])

    async def LendBlocks(self, request: pb.LendBlocksRequest, context: Context) -> AsyncIterator[pb.LendBlocksResponse]:
        async for response in lend(self._parts.step_loop, request):
            yield response

    async def ReleaseWorker(self, request: pb.ReleaseWorkerRequest, context: Context) -> pb.ReleaseWorkerResponse:
        num_moved = await self._parts.pool.release(request.worker_id, request.timeout_s)
        return pb.ReleaseWorkerResponse(num_moved=num_moved)

    async def AddAdapter(self, request: pb.AddAdapterRequest, context: Context) -> pb.AddAdapterResponse:
        return pb.AddAdapterResponse(adapter=await self._parts.pool.adapters.add(request.name, request.path))

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: Context) -> pb.RemoveAdapterResponse:
        return pb.RemoveAdapterResponse(was_loaded=await self._parts.pool.adapters.remove(request.name))

    async def GetAdapters(self, request: pb.GetAdaptersRequest, context: Context) -> pb.GetAdaptersResponse:
        return pb.GetAdaptersResponse(adapters=self._parts.pool.adapters.describe())

    async def ControlRollouts(self, request: pb.ControlRolloutsRequest, context: Context) -> pb.ControlRolloutsResponse:
        return await self._parts.pool.rollouts.control(request)

    async def AddTensors(
        self, request_iterator: AsyncIterator[rollouts_pb2.PutTensorsRequest], context: Context
    ) -> rollouts_pb2.PutTensorsResponse:
        return await self._parts.pool.rollouts.add_tensors(request_iterator)

    async def AbortRequests(self, request: pb.AbortRequestsRequest, context: Context) -> pb.AbortRequestsResponse:
        aborted_ids = await self._parts.step_loop.abort(request.request_ids)
        return pb.AbortRequestsResponse(aborted_ids=aborted_ids)

    async def GetSchedulerStatus(
        self, request: pb.GetSchedulerStatusRequest, context: Context
    ) -> pb.GetSchedulerStatusResponse:
        parts = self._parts
        return pb.GetSchedulerStatusResponse(
            status=describe(parts.step_loop, parts.pool, parts.index, parts.gateways.num_attached, self.address)
        )

    async def GetPools(self, request: pb.GetPoolsRequest, context: Context) -> pb.GetPoolsResponse:
        return self._snapshots.newest(request.worker_ids)

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> pb.GetHistoryResponse:
        step_loop = self._parts.step_loop
        if not request.request_id:
            history = history_to_proto(step_loop.events, step_loop.timelines.ended, self._to_unix)
            add_totals(history, step_loop.times.refusals, step_loop.core.stats().costs.tenants)
            history.samples = step_loop.samples.to_bytes(time.monotonic())
            history.adapters.extend(self._parts.pool.adapters.describe())
            return history
        found = step_loop.timelines.find(request.request_id, step_loop.times.first_token_at, time.monotonic())
        return request_to_proto(found, self._to_unix)

    async def InspectScheduler(
        self, request: pb.InspectSchedulerRequest, context: Context
    ) -> pb.InspectSchedulerResponse:
        times = request.seconds, request.hz
        if request.worker_id:
            data = await self._parts.pool.inspect(request.worker_id, request.kind, *times)
        else:
            data = await self._inspector.inspect(request.kind, *times)
        return pb.InspectSchedulerResponse(data=data)
