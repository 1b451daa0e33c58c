"""AdminService: operations on the workers behind this gateway."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import AdminServiceServicer

from gateway_svc.audit.entry import note_target
from gateway_svc.directory import ModelDirectory
from gateway_svc.scheduler_client import SchedulerClient
from svc_common.errors import InvalidRequestError, NotFoundError

log = logging.getLogger(__name__)

MAX_DRAIN_S = 86_400.0
MAX_IDS_SHOWN = 50

Found = tuple[SchedulerClient, pb.WorkerInfo]


class AdminServicer(AdminServiceServicer):
    """Finds the worker's scheduler and forwards the call."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainWorkerResponse:
        """Drain a worker. Raises InvalidRequestError, NotFoundError, or the scheduler's error."""
        if not request.worker_id:
            raise InvalidRequestError("worker_id is empty; `quire status` lists the workers", field="worker_id")
        if not math.isfinite(request.timeout_s) or not 0 <= request.timeout_s <= MAX_DRAIN_S:
            words = f"timeout_s is {request.timeout_s:g}; must be a number from 0 to {MAX_DRAIN_S:g}"
            raise InvalidRequestError(words, field="timeout_s")
        client, worker = await self._find(request.worker_id, request.model)
        note_target(worker.worker_id)
        num_moved = await client.release_worker(worker.worker_id, request.timeout_s)
        log.info("worker %s of scheduler %s drains %d sequences", worker.worker_id, client.address, num_moved)
        return pb.DrainWorkerResponse(num_moved=num_moved)

    async def _find(self, worker_id: str, model: str) -> Found:
        """The worker and its scheduler. If several schedulers list it, prefer one that has not lost it."""
        clients = self._directory.clients
        statuses = await asyncio.gather(*(client.get_status() for client in clients))
        workers = [
            (client, worker)
            for client, status in zip(clients, statuses, strict=True)
            if not model or status.model == model
            for worker in status.workers
        ]
        found = [(client, worker) for client, worker in workers if worker.worker_id == worker_id]
        if not found:
            raise NotFoundError(_not_found(worker_id, model, workers), field="worker_id")
        return min(found, key=lambda pair: pair[1].state == types_pb2.WORKER_STATE_LOST)


def _not_found(worker_id: str, model: str, workers: list[Found]) -> str:
    ids = sorted({worker.worker_id for _, worker in workers})
    known = ", ".join(ids[:MAX_IDS_SHOWN]) + (" and more" if len(ids) > MAX_IDS_SHOWN else "")
    of_model = f" of model {model[:200]!r}" if model else ""
    return f"no worker{of_model} has id {worker_id[:200]!r}; known workers: {known or 'none'}"
