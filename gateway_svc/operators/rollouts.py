"""RolloutService: forwards the calls of trainers to all schedulers of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import rollouts_pb2 as pb
from quire.v1.rollouts_pb2_grpc import RolloutServiceServicer

from gateway_svc.callers.caller import record_target
from gateway_svc.operators.admin import ask
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from svc_common.calls import first_of
from svc_common.errors import InvalidRequestError, ServiceError, error_of_call

Context = grpc.aio.ServicerContext[Any, Any]
Response = internal.ControlRolloutsResponse

CALL_TIMEOUT_S = 3600.0  # deadline of calls that wait for requests to end
MAX_PIECE_BYTES = 1 << 19


def _forwarded(call: str, answer: Callable[[Response], Any]) -> Any:
    """A method that forwards its request. `answer`: its response, from the first scheduler's."""

    async def forward(self: RolloutServicer, request: Any, context: Context | None = None) -> Any:
        record_target(getattr(request, "update_id", ""))
        return answer((await self._call(request.model, internal.ControlRolloutsRequest(**{call: request})))[0])

    return forward


class RolloutServicer(RolloutServiceServicer):
    """The service. HTTP calls it too, without a context. All methods raise ServiceError."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory

    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: Context | None = None
    ) -> pb.BeginUpdateResponse:
        """Begin an update at all schedulers, or at none."""
        record_target(request.update_id)
        clients = self._directory.schedulers_of(request.model)
        begun = list[SchedulerClient]()
        for client in clients:
            try:
                response = await self._ask(client, internal.ControlRolloutsRequest(begin=request))
            except ServiceError:
                await self._end_at(begun, request.update_id)
                raise
            begun.append(client)
            request.version = response.begin.version  # the same at all
        return pb.BeginUpdateResponse(version=request.version)

    async def _end_at(self, clients: Sequence[SchedulerClient], update_id: str) -> None:
        message = internal.ControlRolloutsRequest(abort=pb.AbortUpdateRequest(update_id=update_id))
        await asyncio.gather(*(self._ask(client, message) for client in clients), return_exceptions=True)

    async def PutTensors(
        self, request_iterator: AsyncIterator[pb.PutTensorsRequest], context: Context | None = None
    ) -> pb.PutTensorsResponse:
        """Add a file of tensors, from a stream of its pieces."""
        stream = aiter(request_iterator)
        return await self.put(await first_of(stream, "update_id"), stream)

    async def put(
        self, first: pb.PutTensorsRequest, more: AsyncIterator[pb.PutTensorsRequest]
    ) -> pb.PutTensorsResponse:
        """Add a file of tensors. A stream is possible only if there is one scheduler."""
        record_target(first.update_id)
        clients = self._directory.schedulers_of(first.model)
        if not first.path and len(clients) > 1:
            raise InvalidRequestError(
                "path is empty, but the model has several schedulers; write the file below --weights-dir, and name it",
                field="path",
            )

        responses = [await self._put(client, first, None if first.path else more) for client in clients]
        return responses[0]

    async def _put(
        self, client: SchedulerClient, first: pb.PutTensorsRequest, more: AsyncIterator[pb.PutTensorsRequest] | None
    ) -> pb.PutTensorsResponse:
        bad: list[ServiceError] = []

        async def messages() -> AsyncIterator[pb.PutTensorsRequest]:
            yield first
            try:
                if more is not None:
                    async for request in more:
                        yield _checked(request)
            except ServiceError as error:
                bad.append(error)
                raise  # gRPC cancels the call, so that no part of a file is used

        try:
            return await client.stub.AddTensors(messages(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error, "") from None
        except asyncio.CancelledError:
            if bad:
                raise bad[0] from None
            raise

    async def CommitUpdate(
        self, request: pb.CommitUpdateRequest, context: Context | None = None
    ) -> pb.CommitUpdateResponse:
        """Load the new weights at all schedulers; then commit."""
        record_target(request.update_id)
        clients = self._directory.schedulers_of(request.model)
        if len(clients) > 1:
            await self._ask_all(clients, internal.ControlRolloutsRequest(prepare=request))
        responses = await self._ask_all(clients, internal.ControlRolloutsRequest(commit=request))
        first = responses[0].commit
        first.num_rows = sum(one.commit.num_rows for one in responses)
        first.num_workers = sum(one.commit.num_workers for one in responses)
        return first

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Context | None = None) -> pb.GetWeightsResponse:
        """The weights in use, and the open update."""
        responses = await self._call(request.model, internal.ControlRolloutsRequest(get=request))
        first = responses[0].weights
        first.num_workers = sum(one.weights.num_workers for one in responses)
        return first

    async def Pause(self, request: pb.PauseRequest, context: Context | None = None) -> pb.PauseResponse:
        """Compute no steps from now on."""
        record_target(request.pause_id)
        responses = await self._call(request.model, internal.ControlRolloutsRequest(pause=request))
        samples = [sample for one in responses for sample in one.pause.samples]
        for sample in samples:
            sample.request_id = sample.request_id.rpartition("/")[2]
        return pb.PauseResponse(samples=samples)

    AbortUpdate = _forwarded("abort", lambda response: pb.AbortUpdateResponse())
    Unpause = _forwarded("unpause", lambda response: response.unpause)
    Sleep = _forwarded("sleep", lambda response: pb.SleepResponse())
    Wake = _forwarded("wake", lambda response: pb.WakeResponse())
    ResetPrefixCache = _forwarded("reset", lambda response: pb.ResetPrefixCacheResponse())

    async def _call(self, model: str, message: internal.ControlRolloutsRequest) -> list[Response]:
        return await self._ask_all(self._directory.schedulers_of(model), message)

    async def _ask_all(
        self, clients: Sequence[SchedulerClient], message: internal.ControlRolloutsRequest
    ) -> list[Response]:
        return list(await asyncio.gather(*(self._ask(client, message) for client in clients)))

    async def _ask(self, client: SchedulerClient, message: internal.ControlRolloutsRequest) -> Response:
        response: Response = await ask(client.stub.ControlRollouts, message, CALL_TIMEOUT_S)
        return response


def _checked(request: pb.PutTensorsRequest) -> pb.PutTensorsRequest:
    if len(request.data) > MAX_PIECE_BYTES:
        raise InvalidRequestError(
            f"data has {len(request.data)} bytes; a message has at most {MAX_PIECE_BYTES}", field="data"
        )
    return request
