"""The calls that change the adapters of one leased worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc

from scheduler_svc.core.features.adapters import AdapterSwap
from svc_common.errors import ServiceError, error_from_code

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # an adapter of 1 GB from a slow disk
SWAP_TIMEOUT_S = 60.0

OnSwapped = Callable[[bytes, bool], None]


class AdapterCalls:
    """Loads, unloads and swaps adapters of a worker under one lease. `on_swapped(digest, is_resident)` reports the end
    of each swap.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, fence: worker_pb2.Fence, worker_id: str) -> None:
        self._stub = stub
        self._fence = fence
        self._worker_id = worker_id
        self._swaps: set[asyncio.Task[None]] = set()
        self.on_swapped: OnSwapped = lambda digest, is_resident: None

    async def load(self, name: str, path: str) -> worker_pb2.WorkerAdapter:
        """Load an adapter into the worker's memory. Raises ServiceError with the worker's name."""
        request = worker_pb2.LoadWorkerAdapterRequest(fence=self._fence, name=name, path=path)
        try:
            return (await self._stub.LoadWorkerAdapter(request, timeout=LOAD_TIMEOUT_S)).adapter
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def unload(self, name: str) -> bool:
        """Remove an adapter from the worker's memory. False if it was not there. Raises ServiceError."""
        request = worker_pb2.UnloadWorkerAdapterRequest(fence=self._fence, name=name)
        try:
            return (await self._stub.UnloadWorkerAdapter(request, timeout=SWAP_TIMEOUT_S)).was_loaded
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def swap(self, swap: AdapterSwap) -> None:
        """Start to make an adapter resident."""
        task = asyncio.create_task(self._swap(swap))
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)

    async def _swap(self, swap: AdapterSwap) -> None:
        request = worker_pb2.SwapWorkerAdapterRequest(fence=self._fence, digest=swap.digest, kept=swap.kept)
        try:
            await self._stub.SwapWorkerAdapter(request, timeout=SWAP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.error(
                "worker %s: swapping adapter %s in failed: %s", self._worker_id, swap.digest.hex(), error.details()
            )
            self.on_swapped(swap.digest, False)
        else:
            self.on_swapped(swap.digest, True)

    def close(self) -> None:
        """The lease has ended."""
        for task in self._swaps:
            task.cancel()

    def _error(self, error: grpc.aio.AioRpcError) -> ServiceError:
        return error_from_code(error.code().value[0], f"worker {self._worker_id}: {error.details()}")
