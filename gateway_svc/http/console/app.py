"""The ASGI application of --console-listen.

    /console/            the page and its files: constant, without data, so they need no key
    /console/api/state   the state; needs a key of operators, if there are keys. ?worker=ID&worker=ID: with their pools
    /console/api/history events and ended requests; needs the same key. ?request=ID: one request with its stages
    everything else      the HTTP API, for the playground; needs a key for inference, if there are keys

The page sends keys in a header, never in cookies, so that no other page can use them.
"""

from __future__ import annotations

import mimetypes
from importlib.resources import files

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.http.app import HttpApp
from gateway_svc.http.origins import SitePolicy
from gateway_svc.operators.console_state import ConsoleState
from svc_common.calls import RpcStats

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
