"""The calls of operators to one scheduler. All raise ServiceError, unless they say what they return instead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import inference_pb2 as public

from gateway_svc.schedulers.scheduler_client import RELEASE_TIMEOUT_S, RETRY_AFTER_S, STATUS_TIMEOUT_S, SchedulerClient
from svc_common.errors import UnavailableError, error_of_call
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


async def ask(method: Callable[..., Any], request: Any, timeout_s: float, words: str = "") -> Any:
    """A unary call. The error of a failed one has `words` before its message."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise UnavailableError(f"{words}{error.details()}", retry_after_s=RETRY_AFTER_S) from None
        raise error_of_call(error, words) from None


async def inspect(
    client: SchedulerClient, kind: public.InspectKind.ValueType, worker_id: str, seconds: float, hz: int
) -> bytes:
    """A profile or a report of the scheduler, or of one of its workers."""
    request = pb.InspectSchedulerRequest(kind=kind, worker_id=worker_id, seconds=seconds, hz=hz)
    timeout_s = 2 * answer_timeout_s(kind, seconds)
    return bytes((await ask(client.stub.InspectScheduler, request, timeout_s, _words(client))).data)


async def add_adapter(client: SchedulerClient, name: str, path: str) -> public.Adapter:
    """Load an adapter on all workers. The next request of this gateway can use it."""
    request = pb.AddAdapterRequest(name=name, path=path)
    response: pb.AddAdapterResponse = await ask(client.stub.AddAdapter, request, ADAPTER_TIMEOUT_S, _words(client))
    await _announced(client, name, bytes.fromhex(response.adapter.digest))
    return response.adapter


async def remove_adapter(client: SchedulerClient, name: str) -> bool:
    """Unload an adapter from all workers. False if none had it. The next request of this gateway cannot use it."""
    request = pb.RemoveAdapterRequest(name=name)
    response = await ask(client.stub.RemoveAdapter, request, ADAPTER_TIMEOUT_S, _words(client))
    await _announced(client, name, b"")
    return bool(response.was_loaded)


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
    return int((await ask(client.stub.ReleaseWorker, request, RELEASE_TIMEOUT_S, _words(client))).num_moved)


def _words(client: SchedulerClient) -> str:
    return f"scheduler {client.address}: "
