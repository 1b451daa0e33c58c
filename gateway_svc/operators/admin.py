"""AdminService: operations on the services of this deployment, and the calls of operators to one scheduler. All raise
ServiceError, unless they say what they return instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import grpc
from quire.internal.v1 import scheduler_pb2 as internal
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import AdminServiceServicer

from gateway_svc.callers.caller import record_target
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.routes import table_of
from gateway_svc.schedulers.scheduler_client import RELEASE_TIMEOUT_S, RETRY_AFTER_S, STATUS_TIMEOUT_S, SchedulerClient
from svc_common.errors import InvalidRequestError, NotFoundError, UnavailableError, error_of_call
from svc_common.observe.inspection import Inspector, answer_timeout_s, checked_times

log = logging.getLogger(__name__)

ADAPTER_TIMEOUT_S = 180.0  # all workers load it


async def get_pools(client: SchedulerClient, worker_ids: Collection[str]) -> internal.GetPoolsResponse:
    """The blocks and rows of these workers, without ids of the first ones, and the waiting sequences; nothing if the
    scheduler does not answer in time.
    """
    try:
        return await client.stub.GetPools(internal.GetPoolsRequest(worker_ids=worker_ids), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return internal.GetPoolsResponse()


async def get_history(client: SchedulerClient, request_id: str = "") -> internal.GetHistoryResponse:
    """The past of a scheduler, or that of one request; nothing if it does not answer in time."""
    try:
        return await client.stub.GetHistory(internal.GetHistoryRequest(request_id=request_id), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return internal.GetHistoryResponse()


async def ask(method: Callable[..., Any], request: Any, timeout_s: float, words: str = "") -> Any:
    """A unary call. The error of a failed one has `words` before its message."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise UnavailableError(f"{words}{error.details()}", retry_after_s=RETRY_AFTER_S) from None
        raise error_of_call(error, words) from None


async def inspect(
    client: SchedulerClient, kind: pb.InspectKind.ValueType, worker_id: str, seconds: float, hz: int
) -> bytes:
    """A profile or a report of the scheduler, or of one of its workers."""
    request = internal.InspectSchedulerRequest(kind=kind, worker_id=worker_id, seconds=seconds, hz=hz)
    timeout_s = 2 * answer_timeout_s(kind, seconds)
    return bytes((await ask(client.stub.InspectScheduler, request, timeout_s, _words(client))).data)


async def add_adapter(client: SchedulerClient, name: str, path: str) -> pb.Adapter:
    """Load an adapter on all workers. The next request of this gateway can use it."""
    request = internal.AddAdapterRequest(name=name, path=path)
    adapter: pb.Adapter = (await ask(client.stub.AddAdapter, request, ADAPTER_TIMEOUT_S, _words(client))).adapter
    await _announced(client, name, bytes.fromhex(adapter.digest))
    return adapter


async def remove_adapter(client: SchedulerClient, name: str) -> bool:
    """Unload an adapter from all workers. False if none had it. The next request of this gateway cannot use it."""
    request = internal.RemoveAdapterRequest(name=name)
    response = await ask(client.stub.RemoveAdapter, request, ADAPTER_TIMEOUT_S, _words(client))
    await _announced(client, name, b"")
    return bool(response.was_loaded)


async def _announced(client: SchedulerClient, name: str, digest: bytes) -> None:
    """Wait for the announcement of a change: it comes by the stream, which the answer of a call can overtake."""
    with contextlib.suppress(TimeoutError):  # the stream broke; the Welcome of the next one has the change
        await asyncio.wait_for(client.loader.until_adapter(name, digest), STATUS_TIMEOUT_S)


async def adapters(client: SchedulerClient) -> list[pb.Adapter]:
    """All adapters; none if the scheduler does not answer."""
    try:
        response = await client.stub.GetAdapters(internal.GetAdaptersRequest(), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.warning("scheduler %s failed to list adapters: %s", client.address, error.details())
        return []
    return list(response.adapters)


async def release_worker(client: SchedulerClient, worker_id: str, timeout_s: float) -> int:
    """Drain a worker within `timeout_s` (0: its own limit). Returns its number of sequences."""
    request = internal.ReleaseWorkerRequest(worker_id=worker_id, timeout_s=timeout_s)
    return int((await ask(client.stub.ReleaseWorker, request, RELEASE_TIMEOUT_S, _words(client))).num_moved)


def _words(client: SchedulerClient) -> str:
    return f"scheduler {client.address}: "


MAX_DRAIN_S = 86_400.0
MAX_IDS_SHOWN = 50
MAX_NAME_CHARS = 128
MAX_PATH_CHARS = 4096

Context = grpc.aio.ServicerContext[Any, Any]
Found = tuple[SchedulerClient, pb.WorkerInfo]


class AdminServicer(AdminServiceServicer):
    """Finds the worker's scheduler and forwards the call. `inspector` is that of this gateway."""

    def __init__(self, directory: ModelDirectory, inspector: Inspector) -> None:
        self._directory = directory
        self._inspector = inspector

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """Drain a worker. Raises InvalidRequestError, NotFoundError, or the scheduler's error."""
        if not request.worker_id:
            raise InvalidRequestError("worker_id is empty; `quire status` lists the workers", field="worker_id")
        if not math.isfinite(request.timeout_s) or not 0 <= request.timeout_s <= MAX_DRAIN_S:
            words = f"timeout_s is {request.timeout_s:g}; must be a number from 0 to {MAX_DRAIN_S:g}"
            raise InvalidRequestError(words, field="timeout_s")
        client, worker = await self._find(request.worker_id, request.model)
        record_target(worker.worker_id)
        num_moved = await release_worker(client, worker.worker_id, request.timeout_s)
        log.info("worker %s of scheduler %s drains %d sequences", worker.worker_id, client.address, num_moved)
        return pb.DrainWorkerResponse(num_moved=num_moved)

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context | None = None
    ) -> pb.LoadAdapterResponse:
        """Load an adapter on all workers of a model. Raises ServiceError."""
        if not 0 < len(request.name) <= MAX_NAME_CHARS or not request.name.isprintable():
            words = f"name is {request.name[:MAX_NAME_CHARS]!r}; use 1 to {MAX_NAME_CHARS} printable characters"
            raise InvalidRequestError(words, field="name")
        if not 0 < len(request.path) <= MAX_PATH_CHARS:
            raise InvalidRequestError(
                f"path has {len(request.path)} characters; name a folder below the workers' --adapter-dir", field="path"
            )
        if any(model.name == request.name for model, _ in self._directory.models()):
            raise InvalidRequestError(
                f"name is {request.name!r}, which is the name of a model; use another", field="name"
            )
        record_target(request.name)
        clients = self._directory.schedulers_of(request.model)
        found = [await add_adapter(client, request.name, request.path) for client in clients]
        digests = {adapter.digest for adapter in found}
        if len(digests) > 1:
            raise InvalidRequestError(
                f"adapter {request.name!r} has different content at different schedulers (digests "
                f"{', '.join(sorted(digests))}); unload it, and copy the same folder to all workers",
                field="path",
            )
        return pb.LoadAdapterResponse(adapter=_merged(found)[0])

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context | None = None
    ) -> pb.UnloadAdapterResponse:
        """Unload an adapter. Raises NotFoundError, or the scheduler's error while requests use it."""
        record_target(request.name)
        clients = self._directory.schedulers_of(request.model)
        were_loaded = [await remove_adapter(client, request.name) for client in clients]
        if not any(were_loaded):
            known = sorted({adapter.name for model, _ in self._directory.models() for adapter in model.info.adapters})
            raise NotFoundError(
                f"no adapter {request.name[:200]!r} is loaded; loaded adapters: {', '.join(known) or 'none'}",
                field="name",
                subject=request.name,
            )
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """The adapters of one model or of all models."""
        clients = self._directory.schedulers_of(request.model) if request.model else self._directory.clients
        connected = [client for client in clients if client.is_connected]
        found = await asyncio.gather(*(adapters(client) for client in connected))
        return pb.ListAdaptersResponse(adapters=_merged([adapter for part in found for adapter in part]))

    async def SetRoute(self, request: pb.SetRouteRequest, context: Context) -> pb.SetRouteResponse:
        """Set or remove a route. Raises ServiceError."""
        targets = dict(request.route.targets)
        record_target(request.route.name)
        for model in filter(None, (*targets, request.route.shadow)):
            if not self._directory.readiness(model):
                self._directory.find(model)  # raises what is wrong with the name
        await self._directory.routes.set(request.route, self._directory.readiness)
        record_target(f"{request.route.name} {targets or 'removed'} {request.route.shadow}".strip())
        return pb.SetRouteResponse()

    async def ListRoutes(self, request: pb.ListRoutesRequest, context: Context) -> pb.ListRoutesResponse:
        return table_of(self._directory.routes.rows)

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectResponse:
        """A profile or a report of a service. Raises InvalidRequestError, NotFoundError, or the service's error."""
        record_target(request.service)
        if request.kind == pb.INSPECT_KIND_PROFILE:
            checked_times(request.seconds, request.hz)
        if request.service == "gateway":
            data = await self._inspector.inspect(request.kind, request.seconds, request.hz)
        else:
            client, worker_id = await self._service(request.service)
            data = await inspect(client, request.kind, worker_id, request.seconds, request.hz)
        return pb.InspectResponse(data=data)

    async def _service(self, name: str) -> tuple[SchedulerClient, str]:
        """The scheduler to ask, and the id of its worker; empty for the scheduler itself. Raises NotFoundError."""
        clients = self._directory.clients
        for client in clients:
            if name == client.address or (name == "scheduler" and len(clients) == 1):
                return client, ""
        workers = [pair for pair in await self._workers("") if pair[1].state != types_pb2.WORKER_STATE_LOST]
        found = [pair for pair in workers if name == pair[1].worker_id or (name == "worker" and len(workers) == 1)]
        if not found:
            known = ["gateway", *(client.address for client in clients), *(worker.worker_id for _, worker in workers)]
            shown = ", ".join(known[:MAX_IDS_SHOWN]) + (" and more" if len(known) > MAX_IDS_SHOWN else "")
            raise NotFoundError(
                f"no service {name[:200]!r}, or it is not the only one; services: {shown}", field="service"
            )
        client, worker = found[0]
        return client, worker.worker_id

    async def _workers(self, model: str) -> list[Found]:
        clients = self._directory.clients
        statuses = await asyncio.gather(*(client.get_status() for client in clients))
        return [
            (client, worker)
            for client, status in zip(clients, statuses, strict=True)
            if not model or status.model == model
            for worker in status.workers
        ]

    async def _find(self, worker_id: str, model: str) -> Found:
        """The worker and its scheduler. If several schedulers list it, prefer one that has not lost it."""
        workers = await self._workers(model)
        found = [(client, worker) for client, worker in workers if worker.worker_id == worker_id]
        if not found:
            raise NotFoundError(_not_found(worker_id, model, workers), field="worker_id", subject=worker_id)
        return min(found, key=lambda pair: pair[1].state == types_pb2.WORKER_STATE_LOST)


def _merged(adapters: Iterable[pb.Adapter]) -> list[pb.Adapter]:
    """One entry per adapter, with the workers of all schedulers."""
    merged: dict[tuple[str, str, str], pb.Adapter] = {}
    for adapter in adapters:
        key = adapter.model, adapter.name, adapter.digest
        if key in merged:
            merged[key].num_workers += adapter.num_workers
            merged[key].num_resident += adapter.num_resident
        else:
            merged[key] = adapter
    return [merged[key] for key in sorted(merged)]


def _not_found(worker_id: str, model: str, workers: list[Found]) -> str:
    ids = sorted({worker.worker_id for _, worker in workers})
    known = ", ".join(ids[:MAX_IDS_SHOWN]) + (" and more" if len(ids) > MAX_IDS_SHOWN else "")
    of_model = f" of model {model[:200]!r}" if model else ""
    return f"no worker{of_model} has id {worker_id[:200]!r}; known workers: {known or 'none'}"
