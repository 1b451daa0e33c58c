"""The calls of operators to one scheduler. All raise ServiceError, unless they say what they return instead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import inference_pb2 as public

from gateway_svc.schedulers.scheduler_client import RELEASE_TIMEOUT_S, RETRY_AFTER_S, STATUS_TIMEOUT_S, SchedulerClient
from svc_common.errors import ServiceError, UnavailableError, error_from_code
from svc_common.observe.inspection import answer_timeout_s

log = logging.getLogger(__name__)

ADAPTER_TIMEOUT_S = 180.0  # all workers load it


async def get_pools(client: SchedulerClient, worker_ids: Collection[str]) -> pb.GetPoolsResponse:
    """The blocks and rows of these workers, without ids of the first ones, and the waiting sequences; nothing if the
    scheduler does not answer in time.
    """
    try:
        return await client.stub.GetPools(pb.GetPoolsRequest(worker_ids=worker_ids), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return pb.GetPoolsResponse()


async def get_history(client: SchedulerClient, request_id: str = "") -> pb.GetHistoryResponse:
    """The past of a scheduler, or that of one request; nothing if it does not answer in time."""
    try:
        return await client.stub.GetHistory(pb.GetHistoryRequest(request_id=request_id), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return pb.GetHistoryResponse()


async def inspect(
    client: SchedulerClient, kind: public.InspectKind.ValueType, worker_id: str, seconds: float, hz: int
) -> bytes:
    """A profile or a report of the scheduler, or of one of its workers."""
    request = pb.InspectSchedulerRequest(kind=kind, worker_id=worker_id, seconds=seconds, hz=hz)
    try:
        response = await client.stub.InspectScheduler(request, timeout=2 * answer_timeout_s(kind, seconds))
    except grpc.aio.AioRpcError as error:
        raise error_from_code(error.code().value[0], f"scheduler {client.address}: {error.details()}") from None
    return response.data


async def add_adapter(client: SchedulerClient, name: str, path: str) -> public.Adapter:
    """Load an adapter on all workers. The next request of this gateway can use it."""
    request = pb.AddAdapterRequest(name=name, path=path)
    try:
        adapter = (await client.stub.AddAdapter(request, timeout=ADAPTER_TIMEOUT_S)).adapter
    except grpc.aio.AioRpcError as error:
        raise _error(client, error) from None
    await _announced(client, name, bytes.fromhex(adapter.digest))
    return adapter


async def remove_adapter(client: SchedulerClient, name: str) -> bool:
    """Unload an adapter from all workers. False if none had it. The next request of this gateway cannot use it."""
    request = pb.RemoveAdapterRequest(name=name)
    try:
        was_loaded = (await client.stub.RemoveAdapter(request, timeout=ADAPTER_TIMEOUT_S)).was_loaded
    except grpc.aio.AioRpcError as error:
        raise _error(client, error) from None
    await _announced(client, name, b"")
    return was_loaded


async def _announced(client: SchedulerClient, name: str, digest: bytes) -> None:
    """Wait for the announcement of a change: it comes by the stream, which the answer of a call can overtake."""
    with contextlib.suppress(TimeoutError):  # the stream broke; the Welcome of the next one has the change
        await asyncio.wait_for(client.loader.until_adapter(name, digest), STATUS_TIMEOUT_S)


async def adapters(client: SchedulerClient) -> list[public.Adapter]:
    """All adapters; none if the scheduler does not answer."""
    try:
        response = await client.stub.GetAdapters(pb.GetAdaptersRequest(), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.warning("scheduler %s failed to list adapters: %s", client.address, error.details())
        return []
    return list(response.adapters)


async def release_worker(client: SchedulerClient, worker_id: str, timeout_s: float) -> int:
    """Drain a worker within `timeout_s` (0: its own limit). Returns its number of sequences."""
    request = pb.ReleaseWorkerRequest(worker_id=worker_id, timeout_s=timeout_s)
    try:
        response = await client.stub.ReleaseWorker(request, timeout=RELEASE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise _error(client, error) from None
    return response.num_moved


def _error(client: SchedulerClient, error: grpc.aio.AioRpcError) -> ServiceError:
    words = f"scheduler {client.address}: {error.details()}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(words, retry_after_s=RETRY_AFTER_S)
    return error_from_code(error.code().value[0], words)
