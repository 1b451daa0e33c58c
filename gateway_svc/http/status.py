"""Endpoints about the gateway itself: health, load, metrics, version."""

from __future__ import annotations

from collections.abc import Callable, Sized

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http.replies import json_reply
from svc_common.errors import UnavailableError
from svc_common.observe.metrics import quire_version

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusHandlers:
    """One method per endpoint. `streams`: the requests in progress; `metrics_text`: in the Prometheus text format."""

    def __init__(self, is_serving: Callable[[], bool], streams: Sized, metrics_text: Callable[[], bytes]) -> None:
        self._is_serving = is_serving
        self._streams = streams
        self._metrics_text = metrics_text

    def routes(self) -> list[Route]:
        """All endpoints."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 while every process of this gateway can take requests."""
        if not self._is_serving():
            raise UnavailableError(
                "this gateway is not serving: it is shutting down, no model is ready, or one of its processes is not "
                "ready; retry later"
            )
        return json_reply({"status": "serving"})

    async def load(self, request: Request) -> Response:
        """The number of requests in progress in this process."""
        return json_reply({"server_load": len(self._streams)})

    async def metrics(self, request: Request) -> Response:
        """The metrics of this process in the Prometheus text format."""
        return Response(self._metrics_text(), media_type=METRICS_TYPE)

    async def version(self, request: Request) -> Response:
        """The gateway's version."""
        return json_reply({"version": quire_version()})
