"""WorkerService: decodes requests, calls the executor, encodes answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from quire.internal.v1 import worker_pb2 as pb
from quire.internal.v1 import worker_pb2_grpc
from quire.v1 import types_pb2

from svc_common.errors import InvalidRequestError, ServiceError, UnavailableError
from svc_common.observe.inspection import Inspector
from svc_common.serve import open_channel
from svc_common.tasks import cancel
from worker_svc.adapters import WorkerAdapters
from worker_svc.blocks import MovementSettings, WorkerBlocks
from worker_svc.bundle import Bundle
from worker_svc.engine.config import EngineInfo
from worker_svc.lifecycle import Lifecycle
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.lease import Answer
from worker_svc.weights import WorkerWeights
from worker_svc.wire import adapters_to_proto, model_info_to_proto, pieces

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
BUNDLE_PIECE_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class StepInbox:
    """The answers that one StepStream still owes, in order; a burst is answered together.

    Reads at most `depth` messages ahead of the answers.
    """

    def __init__(self, executor: StepExecutor, depth: int) -> None:
        self._executor = executor
        self._room = asyncio.Semaphore(depth)
        self._answers: asyncio.Queue[list[Answer] | Exception | None] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[pb.StepStreamRequest]) -> None:
        """Submit incoming steps until the caller ends the stream or a step is refused."""
        try:
            await self._room.acquire()
            async for request in requests:
                self._answers.put_nowait(self._executor.submit((request.batch, *request.then)))
                await self._room.acquire()
            self._answers.put_nowait(None)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the answers that are owed."""
        self._answers.put_nowait(error)

    async def answers(self) -> AsyncIterator[pb.StepStreamResponse]:
        """Answers in the order of the steps. Raises the error that refused a step or ended the stream."""
        while (item := await self._answers.get()) is not None:
            if isinstance(item, Exception):
                raise item
            outputs, error = await _outcome(item)
            self._room.release()
            if outputs:
                yield pb.StepStreamResponse(output=outputs[0], then=outputs[1:])
            if error is not None:
                raise error


async def _outcome(answers: Sequence[Answer]) -> tuple[list[pb.StepOutput], Exception | None]:
    """Answers to the steps of a message, up to a refused step if there is one."""
    outputs = []
    for answer in answers:
        try:
            # Shielded: a caller that disconnects must not cancel a step whose answer another stream may request.
            outputs.append(answer.result() if answer.done() else await asyncio.shield(answer))
        except Exception as error:
            return outputs, error
    return outputs, None


async def _unchanged(info: EngineInfo) -> types_pb2.ModelInfo:
    return model_info_to_proto(info, b"")


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The gRPC service of one worker. `drain(timeout_s)` shuts it down and returns the rows that were still open."""

    def __init__(
        self,
        *,
        executor: StepExecutor,
        lifecycle: Lifecycle,
        bundle: Bundle,
        drain: Callable[[float], Awaitable[int]],
        inspector: Inspector,
        pipeline_depth: int = 2,
        adapters: WorkerAdapters | None = None,
        blocks: WorkerBlocks | None = None,
        weights: WorkerWeights | None = None,
    ) -> None:
        self._executor = executor
        self._blocks = blocks or WorkerBlocks(
            executor, MovementSettings(), lambda address, worker_id: open_channel(address)
        )
        self._weights = weights or WorkerWeights(executor, lifecycle, None, _unchanged, self._blocks.clear_tiers)
        self._adapters = adapters or WorkerAdapters(lambda: executor.adapters, lifecycle, None)
        self._lifecycle = lifecycle
        self._bundle = bundle
        self._drain = drain
        self._inspector = inspector
        self._pipeline_depth = pipeline_depth
        self._inboxes: set[StepInbox] = set()
        self._end_error: ServiceError | None = None

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        if request.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequestError(
                f"protocol_version is {request.protocol_version}, but this worker supports {PROTOCOL_VERSION}; "
                "run scheduler and workers of the same release",
                field="protocol_version",
            )
        if self._lifecycle.is_draining:
            raise UnavailableError("the worker is draining; lease another worker")
        lease = self._executor.lease(request.scheduler_epoch, request.scheduler_id)
        log.info("leased by scheduler %s, scheduler_epoch %d", lease.scheduler_id or context.peer(), lease.epoch)
        return pb.LeaseResponse(fence=lease.fence, next_step_id=lease.next_step_id)

    async def StepStream(
        self, request_iterator: AsyncIterator[pb.StepStreamRequest], context: Context
    ) -> AsyncIterator[pb.StepStreamResponse]:
        if self._end_error is not None:
            raise self._end_error
        inbox = StepInbox(self._executor, self._pipeline_depth)
        unwatch = self._executor.current_lease().watch(inbox.fail)
        self._inboxes.add(inbox)
        reader = asyncio.ensure_future(inbox.read(request_iterator))
        try:
            async for response in inbox.answers():
                yield response
        finally:
            unwatch()
            self._inboxes.discard(inbox)
            await cancel(reader)

    async def StepBatch(self, request: pb.StepBatchRequest, context: Context) -> pb.StepBatchResponse:
        (answer,) = self._executor.submit((request.batch,))
        return pb.StepBatchResponse(output=await asyncio.shield(answer))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> AsyncIterator[pb.ListBlocksResponse]:
        for response in await self._executor.list_blocks(request.fence):
            yield response

    async def FetchBlocks(self, request: pb.FetchBlocksRequest, context: Context) -> pb.FetchBlocksResponse:
        return await self._blocks.fetch(request)

    async def WatchTier(self, request: pb.WatchTierRequest, context: Context) -> AsyncIterator[pb.WatchTierResponse]:
        async for response in self._blocks.watch(request):
            yield response

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> AsyncIterator[Any]:
        async for response in self._blocks.read(request):
            yield response

    async def LoadWorkerAdapter(
        self, request: pb.LoadWorkerAdapterRequest, context: Context
    ) -> pb.LoadWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        entry = await self._adapters.load(request.name, request.path)
        return pb.LoadWorkerAdapterResponse(adapter=adapters_to_proto([entry])[0])

    async def UnloadWorkerAdapter(
        self, request: pb.UnloadWorkerAdapterRequest, context: Context
    ) -> pb.UnloadWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        return pb.UnloadWorkerAdapterResponse(was_loaded=await self._adapters.unload(request.name))

    async def SwapWorkerAdapter(
        self, request: pb.SwapWorkerAdapterRequest, context: Context
    ) -> pb.SwapWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        await self._adapters.swap(request.digest, request.kept)
        return pb.SwapWorkerAdapterResponse()

    async def ChangeWeights(self, request: pb.ChangeWeightsRequest, context: Context) -> pb.ChangeWeightsResponse:
        return await self._weights.change(request)

    async def WriteTensors(
        self, request_iterator: AsyncIterator[pb.WriteTensorsRequest], context: Context
    ) -> pb.WriteTensorsResponse:
        await self._weights.write(request_iterator)
        return pb.WriteTensorsResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidRequestError(f"timeout_s is {request.timeout_s}, expected 0 or more", field="timeout_s")
        return pb.DrainResponse(rows_left=await self._drain(request.timeout_s))

    async def GetWorkerBundle(
        self, request: pb.GetWorkerBundleRequest, context: Context
    ) -> AsyncIterator[pb.GetWorkerBundleResponse]:
        for data in pieces(self._bundle.data, BUNDLE_PIECE_BYTES):
            yield pb.GetWorkerBundleResponse(data=data)

    async def InspectWorker(self, request: pb.InspectWorkerRequest, context: Context) -> pb.InspectWorkerResponse:
        data = await self._inspector.inspect(request.kind, request.seconds, request.hz)
        return pb.InspectWorkerResponse(data=data)

    def end_streams(self, error: ServiceError) -> None:
        """End every open StepStream with `error` after the answers that it still owes; end later streams at once."""
        self._end_error = error
        for inbox in self._inboxes:
            inbox.fail(error)
