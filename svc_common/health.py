"""grpc.health.v1 on a service's main port, for load balancers and for gRPC's client-side health checking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.errors import NotFoundError

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Implements Check and Watch. All services of a process have one status, NOT_SERVING at first.

    Unlike grpc_health's servicer, `set` never waits for a watcher that does not read, and a watcher that leaves does
    not end the notifications of others.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset(("", *service_names))
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def set(self, is_serving: bool) -> None:
        """Set the status and notify all watchers."""
        self._is_serving = is_serving
        self._notify()

    def close(self) -> None:
        """End all Watch streams after they have sent the status, so that they do not delay the exit of the process."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The current status. Raises NotFoundError for a service that this process does not have."""
        if request.service not in self._names:
            known = ", ".join(sorted(name for name in self._names if name))
            raise NotFoundError(f"unknown service {request.service[:200]!r}; known services: {known}", field="service")
        return self._response(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current status and each change; SERVICE_UNKNOWN for a service that this process does not have."""
        last = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response.status != last:
                last = response.status
                yield response
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        if service not in self._names:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if self._is_serving else response.NOT_SERVING)
