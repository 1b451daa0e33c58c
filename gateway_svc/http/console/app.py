"""The ASGI application of --console-listen.

    /console/            the page and its files: constant, without data, so they need no key
    /console/api/state   the state; needs a key of operators, if there are keys. ?worker=ID&worker=ID: with their pools
    /console/api/history events and ended requests; needs the same key. ?request=ID: one request with its stages
    everything else      the HTTP API, for the playground; needs a key for inference, if there are keys

The page sends keys in a header, never in cookies, so that no other page can use them.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.resources import files
from itertools import islice
from operator import itemgetter

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as ProtoMessage
from quire.v1 import inference_pb2 as pb
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.http.app import HttpApp, SitePolicy
from gateway_svc.operators.admin import get_history, get_pools
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.routes import table_of
from svc_common.calls import RpcStats
from svc_common.observe.metrics import quire_version

MIN_INTERVAL_S = 0.2
Key = frozenset[str] | str  # workers, or a request
MAX_ERRORS = 50  # pairs of method and code, the most frequent ones
MAX_POOLS = 8  # limit for one page, unless it asks for no workers


class ConsoleState:
    """Owns the newest states. Schedulers are asked once per MIN_INTERVAL_S for all pages that show the same workers."""

    def __init__(
        self,
        status: Callable[[], Awaitable[pb.GetStatusResponse]],
        directory: ModelDirectory,
        errors: Mapping[tuple[str, str], int],
    ) -> None:
        self._errors = errors  # errors of the gateway's calls, by method and code
        self._status = status
        self._directory = directory
        self._newest: dict[Key, tuple[float, bytes]] = {}
        self._reading = asyncio.Lock()

    async def newest(self, worker_ids: Iterable[str] = ()) -> bytes:
        """The state as JSON, at most MIN_INTERVAL_S old, with the pools of these workers or of the first ones. Field
        names are those of the protocol.
        """
        wanted = frozenset(islice(worker_ids, MAX_POOLS))
        return await self._kept(wanted, lambda: self._read(wanted))

    async def history(self, request_id: str = "") -> bytes:
        """Events and ended requests of all schedulers, or one request with its stages, as JSON."""
        return await self._kept(request_id, lambda: self._read_history(request_id))

    async def _kept(self, key: Key, read: Callable[[], Awaitable[object]]) -> bytes:
        async with self._reading:
            now = time.monotonic()
            self._newest = {key: made for key, made in self._newest.items() if now - made[0] < MIN_INTERVAL_S}
            if key not in self._newest:
                self._newest[key] = now, json.dumps(await read(), separators=(",", ":")).encode()
            return self._newest[key][1]

    async def _read_history(self, request_id: str) -> object:
        clients = self._directory.clients
        found = await asyncio.gather(*(get_history(client, request_id) for client in clients))
        return [{"address": client.address, **_plain(past)} for client, past in zip(clients, found, strict=True)]

    async def _read(self, worker_ids: frozenset[str]) -> object:
        clients = self._directory.clients
        status, pools = await asyncio.gather(
            self._status(), asyncio.gather(*(get_pools(client, worker_ids) for client in clients))
        )
        schedulers = [
            {**_plain(scheduler), **_plain(state)} for scheduler, state in zip(status.schedulers, pools, strict=True)
        ]
        return {
            "version": quire_version(),
            "time": time.time(),
            "open_streams": status.open_streams,
            "pinned_sessions": status.pinned_sessions if status.HasField("pinned_sessions") else None,
            "pins_by_owner": [_plain(pins) for pins in status.pins_by_owner],
            "errors": sorted(([*call, count] for call, count in self._errors.items()), key=itemgetter(2))[-MAX_ERRORS:],
            "routes": _plain(table_of(self._directory.routes.rows))["routes"],
            "schedulers": schedulers,
        }


def _plain(message: ProtoMessage) -> dict[str, object]:
    """The fields of a message. 64-bit numbers are strings and bytes are base64, as in protobuf's JSON format."""
    fields: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


FOLDER = "/console/"
STATE = "/console/api/state"
HISTORY = "/console/api/history"
HEADERS = {
    # No inline code and no other host: text of models and clients cannot become code.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def console_app(
    api: ASGIApp, state: ConsoleState, operators: Authenticator | None, stats: RpcStats, sites: SitePolicy
) -> ASGIApp:
    """The page with its state, in front of the HTTP API. `operators` None: any caller may read the state."""
    assets = read_assets()

    async def console_state(request: Request) -> Response:
        return Response(await state.newest(request.query_params.getlist("worker")), media_type="application/json")

    async def console_history(request: Request) -> Response:
        return Response(await state.history(request.query_params.get("request", "")), media_type="application/json")

    async def console_file(request: Request) -> Response:
        name = request.url.path.removeprefix(FOLDER) or "index.html"
        return Response(assets[name], media_type=mimetypes.guess_type(name)[0])

    async def console_start(request: Request) -> Response:
        return RedirectResponse(FOLDER)

    paths = [FOLDER, *(FOLDER + name for name in assets)]
    starts = ["/", FOLDER.rstrip("/")]
    routes = [
        Route(STATE, console_state, methods=["GET"]),
        Route(HISTORY, console_history, methods=["GET"]),
        *(Route(path, console_file, methods=["GET"]) for path in paths),
        *(Route(path, console_start, methods=["GET"]) for path in starts),
    ]
    page = HttpApp(routes, authenticator=operators, stats=stats, open_paths=[*paths, *starts], sites=sites)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in starts or scope["path"].startswith(FOLDER):
            await page(scope, receive, _with_headers(send))
        else:
            await api(scope, receive, send)

    return app


def read_assets() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = files("gateway_svc.http.console") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers
