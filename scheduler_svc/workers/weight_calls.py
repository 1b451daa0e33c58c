"""The calls that change the weights of one leased worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.v1 import rollouts_pb2, types_pb2

from svc_common.errors import ServiceError, error_of_call

STAGE_TIMEOUT_S = 600.0  # a whole checkpoint from a slow disk
SWITCH_TIMEOUT_S = 60.0


class WeightCalls:
    """Checks, stages and activates weights of a worker under one lease. All raise ServiceError with its name."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, fence: worker_pb2.Fence, worker_id: str) -> None:
        self._stub = stub
        self._fence = fence
        self._worker_id = worker_id

    async def check(self, files: Sequence[str]) -> list[rollouts_pb2.TensorChecksum]:
        """The tensors of the last file, if they fit the model."""
        return list((await self._call(worker_pb2.WEIGHTS_ACTION_CHECK, files=files)).tensors)

    async def stage(self, version: int, files: Sequence[str]) -> worker_pb2.ChangeWeightsResponse:
        """Load the weights with these files, beside those in use."""
        return await self._call(worker_pb2.WEIGHTS_ACTION_STAGE, version=version, files=files)

    async def activate(self, version: int, files: Sequence[str]) -> types_pb2.ModelInfo:
        """Compute with the staged weights. Returns the model with them."""
        call = self._call(worker_pb2.WEIGHTS_ACTION_ACTIVATE, version=version, files=files, timeout_s=SWITCH_TIMEOUT_S)
        return (await call).info

    async def drop(self) -> None:
        """Forget the staged weights."""
        await self._call(worker_pb2.WEIGHTS_ACTION_DROP, timeout_s=SWITCH_TIMEOUT_S)

    async def sleep(self, tags: Sequence[str]) -> None:
        """Free memory."""
        await self._call(worker_pb2.WEIGHTS_ACTION_SLEEP, tags=tags, timeout_s=SWITCH_TIMEOUT_S)

    async def wake(self, tags: Sequence[str], version: int, files: Sequence[str]) -> None:
        """Get memory back, with these weights."""
        await self._call(worker_pb2.WEIGHTS_ACTION_WAKE, tags=tags, version=version, files=files)

    async def forget_prefixes(self) -> None:
        """Forget the content of all blocks, which another scheduler could adopt."""
        await self._call(worker_pb2.WEIGHTS_ACTION_FORGET_PREFIXES, timeout_s=SWITCH_TIMEOUT_S)

    async def write(self, path: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a file below the worker's --weights-dir."""

        async def messages() -> AsyncIterator[worker_pb2.WriteTensorsRequest]:
            yield worker_pb2.WriteTensorsRequest(fence=self._fence, path=path)
            async for data in pieces:
                yield worker_pb2.WriteTensorsRequest(data=data)

        try:
            await self._stub.WriteTensors(messages(), timeout=STAGE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def _call(
        self,
        action: worker_pb2.WeightsAction.ValueType,
        *,
        version: int = 0,
        files: Sequence[str] = (),
        tags: Sequence[str] = (),
        timeout_s: float = STAGE_TIMEOUT_S,
    ) -> worker_pb2.ChangeWeightsResponse:
        request = worker_pb2.ChangeWeightsRequest(
            fence=self._fence, action=action, version=version, files=files, tags=tags
        )
        try:
            return await self._stub.ChangeWeights(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.aio.AioRpcError) -> ServiceError:
        return error_of_call(error, f"worker {self._worker_id}: ")
