"""The calls that change the adapters and the weights of one leased worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc

from svc_common.errors import ServiceError, error_of_call

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # an adapter of 1 GB from a slow disk
SWITCH_TIMEOUT_S = 60.0
STAGE_TIMEOUT_S = 600.0  # a whole checkpoint from a slow disk
READS_FILES = (worker_pb2.WEIGHTS_ACTION_CHECK, worker_pb2.WEIGHTS_ACTION_STAGE, worker_pb2.WEIGHTS_ACTION_WAKE)

OnSwapped = Callable[[bytes, bool], None]


class WorkerCalls:
    """Calls under one lease. All raise ServiceError with the worker's name. `on_swapped(digest, is_resident)` reports
    the end of each swap of adapters.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, fence: worker_pb2.Fence, worker_id: str) -> None:
        self._stub = stub
        self._fence = fence
        self._worker_id = worker_id
        self._swaps: set[asyncio.Task[None]] = set()
        self.on_swapped: OnSwapped = lambda digest, is_resident: None

    async def load_adapter(self, name: str, path: str) -> worker_pb2.WorkerAdapter:
        """Load an adapter into the worker's memory."""
        request = worker_pb2.LoadWorkerAdapterRequest(fence=self._fence, name=name, path=path)
        response: worker_pb2.LoadWorkerAdapterResponse = await self._ask(
            self._stub.LoadWorkerAdapter, request, LOAD_TIMEOUT_S
        )
        return response.adapter

    async def unload_adapter(self, name: str) -> bool:
        """Remove an adapter from the worker's memory. False if it was not there."""
        request = worker_pb2.UnloadWorkerAdapterRequest(fence=self._fence, name=name)
        return bool((await self._ask(self._stub.UnloadWorkerAdapter, request, SWITCH_TIMEOUT_S)).was_loaded)

    def swap_adapter(self, digest: bytes, kept: Sequence[bytes]) -> None:
        """Start to make an adapter resident, beside those that are kept."""
        task = asyncio.create_task(self._swap(digest, kept))
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)

    async def _swap(self, digest: bytes, kept: Sequence[bytes]) -> None:
        request = worker_pb2.SwapWorkerAdapterRequest(fence=self._fence, digest=digest, kept=kept)
        try:
            await self._ask(self._stub.SwapWorkerAdapter, request, SWITCH_TIMEOUT_S)
        except ServiceError as error:
            log.error("swapping adapter %s in failed: %s", digest.hex(), error.message)
            self.on_swapped(digest, False)
        else:
            self.on_swapped(digest, True)

    async def change_weights(
        self,
        action: worker_pb2.WeightsAction.ValueType,
        *,
        version: int = 0,
        files: Sequence[str] = (),
        tags: Sequence[str] = (),
    ) -> worker_pb2.ChangeWeightsResponse:
        """One action of an update, or of sleep."""
        request = worker_pb2.ChangeWeightsRequest(
            fence=self._fence, action=action, version=version, files=files, tags=tags
        )
        timeout_s = STAGE_TIMEOUT_S if action in READS_FILES else SWITCH_TIMEOUT_S
        response: worker_pb2.ChangeWeightsResponse = await self._ask(self._stub.ChangeWeights, request, timeout_s)
        return response

    async def write_tensors(self, path: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a file below the worker's --weights-dir."""

        async def messages() -> AsyncIterator[worker_pb2.WriteTensorsRequest]:
            yield worker_pb2.WriteTensorsRequest(fence=self._fence, path=path)
            async for data in pieces:
                yield worker_pb2.WriteTensorsRequest(data=data)

        await self._ask(self._stub.WriteTensors, messages(), STAGE_TIMEOUT_S)

    def close(self) -> None:
        """The lease has ended."""
        for task in self._swaps:
            task.cancel()

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error, f"worker {self._worker_id}: ") from None
