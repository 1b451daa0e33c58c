"""WorkerService: decodes requests, calls the executor, encodes answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.v1 import types_pb2

from svc_common.errors import InvalidRequestError, QuireError, UnavailableError
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

    async def read(self, requests: AsyncIterator[worker_pb2.StepStreamRequest]) -> None:
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

    async def answers(self) -> AsyncIterator[worker_pb2.StepStreamResponse]:
        """Answers in the order of the steps. Raises the error that refused a step or ended the stream."""
        while (item := await self._answers.get()) is not None:
            if isinstance(item, Exception):
                raise item
            outputs, error = await _outcome(item)
            self._room.release()
            if outputs:
                yield worker_pb2.StepStreamResponse(output=outputs[0], then=outputs[1:])
            if error is not None:
                raise error


async def _outcome(answers: Sequence[Answer]) -> tuple[list[worker_pb2.StepOutput], Exception | None]:
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
        self._end_error: QuireError | None = None

    async def Lease(self, request: worker_pb2.LeaseRequest, context: Context) -> worker_pb2.LeaseResponse:
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
        return worker_pb2.LeaseResponse(fence=lease.fence, next_step_id=lease.next_step_id)

    async def StepStream(
        self, request_iterator: AsyncIterator[worker_pb2.StepStreamRequest], context: Context
    ) -> AsyncIterator[worker_pb2.StepStreamResponse]:
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

    async def StepBatch(self, request: worker_pb2.StepBatchRequest, context: Context) -> worker_pb2.StepBatchResponse:
        (answer,) = self._executor.submit((request.batch,))
        return worker_pb2.StepBatchResponse(output=await asyncio.shield(answer))

    async def ListBlocks(
        self, request: worker_pb2.ListBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ListBlocksResponse]:
        for response in await self._executor.list_blocks(request.fence):
            yield response

    async def FetchBlocks(
        self, request: worker_pb2.FetchBlocksRequest, context: Context
    ) -> worker_pb2.FetchBlocksResponse:
        return await self._blocks.fetch(request)

    async def WatchTier(
        self, request: worker_pb2.WatchTierRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchTierResponse]:
        async for response in self._blocks.watch(request):
            yield response

    async def ReadBlocks(self, request: worker_pb2.ReadBlocksRequest, context: Context) -> AsyncIterator[Any]:
        async for response in self._blocks.read(request):
            yield response

    async def LoadWorkerAdapter(
        self, request: worker_pb2.LoadWorkerAdapterRequest, context: Context
    ) -> worker_pb2.LoadWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        entry = await self._adapters.load(request.name, request.path)
        return worker_pb2.LoadWorkerAdapterResponse(adapter=adapters_to_proto([entry])[0])

    async def UnloadWorkerAdapter(
        self, request: worker_pb2.UnloadWorkerAdapterRequest, context: Context
    ) -> worker_pb2.UnloadWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        return worker_pb2.UnloadWorkerAdapterResponse(was_loaded=await self._adapters.unload(request.name))

    async def SwapWorkerAdapter(
        self, request: worker_pb2.SwapWorkerAdapterRequest, context: Context
    ) -> worker_pb2.SwapWorkerAdapterResponse:
        self._executor.check_fence(request.fence)
        await self._adapters.swap(request.digest, request.kept)
        return worker_pb2.SwapWorkerAdapterResponse()

    async def ChangeWeights(
        self, request: worker_pb2.ChangeWeightsRequest, context: Context
    ) -> worker_pb2.ChangeWeightsResponse:
        return await self._weights.change(request)

    async def WriteTensors(
        self, request_iterator: AsyncIterator[worker_pb2.WriteTensorsRequest], context: Context
    ) -> worker_pb2.WriteTensorsResponse:
        await self._weights.write(request_iterator)
        return worker_pb2.WriteTensorsResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidRequestError(f"timeout_s is {request.timeout_s}, expected 0 or more", field="timeout_s")
        return worker_pb2.DrainResponse(rows_left=await self._drain(request.timeout_s))

    async def GetWorkerBundle(
        self, request: worker_pb2.GetWorkerBundleRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetWorkerBundleResponse]:
        for data in pieces(self._bundle.data, BUNDLE_PIECE_BYTES):
            yield worker_pb2.GetWorkerBundleResponse(data=data)

    async def InspectWorker(
        self, request: worker_pb2.InspectWorkerRequest, context: Context
    ) -> worker_pb2.InspectWorkerResponse:
        data = await self._inspector.inspect(request.kind, request.seconds, request.hz)
        return worker_pb2.InspectWorkerResponse(data=data)

    def end_streams(self, error: QuireError) -> None:
        """End every open StepStream with `error` after the answers that it still owes; end later streams at once."""
        self._end_error = error
        for inbox in self._inboxes:
            inbox.fail(error)
