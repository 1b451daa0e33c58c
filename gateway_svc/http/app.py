"""The ASGI application: credentials, web pages that may call, body limit, request ids, errors, clients that leave."""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from io import BytesIO
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.answer.open_streams import http_request_id
from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.callers.caller import CANCELLED, OK, annotate, current_caller, current_targets
from gateway_svc.http.errors import BodyTooLargeError, MethodNotAllowedError, error_body_of, error_headers
from gateway_svc.http.json_text import encode
from gateway_svc.operators.audit import AuditLog
from gateway_svc.operators.operator_port import NoOperators
from gateway_svc.request.validation import REQUEST_ID
from svc_common.calls import ANYONE, RpcStats
from svc_common.errors import NotFoundError, PermissionDeniedError, ServiceError, shown_error
from svc_common.memory import Intake
from svc_common.tasks import cancel

ANY = "*"
MAX_SHOWN = 200
# Names that no site on the internet can have: a page can point only a name of its own to this address (DNS rebinding).
LOCAL_SUFFIXES = (".localhost", ".svc", ".cluster.local")
EXPOSED_HEADERS = ("x-request-id", "x-ignored-fields", "x-should-retry", "retry-after", "retry-after-ms")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The app with CORS headers for these origins; `*` is any origin. Without origins, the app is unchanged.

    The middleware answers the preflight requests of browsers, which have no API key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
        max_age=3600,
    )


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """Which hosts and origins a request without a key may name (--http-allow-host, --http-allow-origin).

    A browser sends requests of any page to servers of its machine and network. Where clients need no keys, nothing else
    tells such a request from the user's own.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def check(self, headers: Headers, method: str) -> None:
        """Raise PermissionDeniedError for a request of another site's page."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if not self._permits_host(host):
            raise PermissionDeniedError(
                "this port needs no key, so it answers only at an IP address or a local name, not at "
                f"{host[:MAX_SHOWN]!r}; require keys, or permit the name by --http-allow-host"
            )
        if ANY in self.origins or origin in self.origins:
            return
        is_foreign = bool(origin) and origin.partition("://")[2] != host
        if is_foreign or not _is_own(headers.get("sec-fetch-site", ""), headers.get("sec-fetch-mode", ""), method):
            raise PermissionDeniedError(
                f"this port needs no key, so it refuses requests of another site's page ({origin[:MAX_SHOWN]!r}); "
                "require keys, or permit the origin by --http-allow-origin"
            )

    def _permits_host(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        # Browsers always name a host. `*.example.com` is every name below it.
        return not host or is_local(name) or any(fnmatchcase(name, permitted) for permitted in self.hosts)


def _is_own(site: str, mode: str, method: str) -> bool:
    """Whether a request comes from this server's own page, from no page, or from a link that the user follows."""
    return site in ("", "none", "same-origin") or (mode == "navigate" and method == "GET")


def is_local(name: str) -> bool:
    """Whether a host is an IP address, or a name that nobody can register."""
    try:
        return bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return "." not in name or name.endswith(LOCAL_SUFFIXES)


MAX_BODY_BYTES = 16 << 20  # about three million token ids as JSON
MAX_SHOWN_PATH = 100
SIMILAR = 0.85  # ratio of difflib from which a path is a misspelled one
OPEN_PATHS = ("/health", "/ping")  # probes need no key
REQUEST_ID_HEADER = "x-request-id"
KEY_HEADER = "x-api-key"  # sent by Anthropic's clients
IGNORED_HEADER = "x-ignored-fields"
TARGET_HEADER = b"x-model-target"


class ClientGoneError(Exception):
    """The client disconnected before its body was complete."""


class HttpApp:
    """Calls the routes. When a client disconnects, its request is cancelled, also on the scheduler."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        *,
        authenticator: Authenticator | None,
        stats: RpcStats,
        audit: AuditLog | None = None,
        intake: Intake | None = None,
        on_headers: Callable[[Mapping[str, str]], None] | None = None,
        open_paths: Collection[str] = OPEN_PATHS,
        operators: Authenticator | NoOperators | None = None,
        operator_paths: Collection[str] = (),
        sites: SitePolicy | None = None,
        streamed_paths: Collection[str] = (),
    ) -> None:
        """`operators` are checked in place of the callers of inference, at `operator_paths`. `sites` holds where no
        `authenticator` checks the callers. Handlers of `streamed_paths` read their body themselves, while it arrives.
        """
        self._sites = None if authenticator is not None else sites or SitePolicy()
        self._operators = operators
        self._operator_paths = operator_paths
        self._streamed_paths = streamed_paths
        self._router = Router(routes)
        self._authenticator = authenticator
        self._stats = stats
        self._audit = audit
        self._intake = intake or Intake()
        self._on_headers = on_headers
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise for an unknown path instead of answering with plain text
        headers = Headers(scope=scope)
        answer = _Sender(send, headers)
        scope["request_id"] = answer.request_id
        http_request_id.set(answer.request_id)
        current_targets.set(answer.targets)
        if self._on_headers is not None:
            self._on_headers(headers)
        with self._audited(scope, answer):
            await self._answer(scope, headers, receive, answer)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, answer: _Sender) -> None:
        try:
            if self._sites is not None:
                self._sites.check(headers, scope["method"])
            if scope["path"] in self._open_paths:
                await self._router(scope, _replay(b""), answer)
                return
            with self._intake:
                await self._answer_admitted(scope, headers, receive, answer)
        except ClientGoneError:
            return
        except HTTPException as error:
            await self._answer_unrouted(scope, error, answer)
        except Exception as error:
            await self._answer_error(scope, error, answer)

    @contextmanager
    def _audited(self, scope: Scope, answer: _Sender) -> Iterator[None]:
        """Write the line of this request to the audit log. Probes have none."""
        if self._audit is None or scope["path"] in self._open_paths:
            yield
            return
        host, port = scope.get("client") or ("", 0)
        entry = self._audit.begin("", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            yield
        finally:
            entry.method, entry.caller = _method(scope), current_caller.get()
            entry.http_status, entry.http_request_id = answer.status, answer.request_id
            entry.end(OK if answer.is_complete else CANCELLED)

    async def _answer_admitted(self, scope: Scope, headers: Headers, receive: Receive, answer: _Sender) -> None:
        """Check the caller before the body is received."""
        authenticator = self._operators if scope["path"] in self._operator_paths else self._authenticator
        if authenticator is not None:
            key = headers.get(KEY_HEADER)
            await authenticator.authenticate(headers.get("authorization") or (key and f"Bearer {key}"))
        self._intake.check_memory()
        sender = current_caller.get().sender or ANYONE
        if answer.has_unread_body and scope["path"] in self._streamed_paths:
            await self._router(scope, self._streamed(receive, sender, answer), answer)
            return
        body = b""
        if answer.has_unread_body:
            body = await self._intake.receive(sender, partial(_read_body, receive))
            answer.has_unread_body = False
        await _until_hang_up(self._router(scope, _replay(body), answer), receive)

    def _streamed(self, receive: Receive, sender: str, answer: _Sender) -> Receive:
        """A `receive` whose messages have a place each, as whole bodies have."""

        async def next_message() -> Message:
            message = await self._intake.receive(sender, receive)
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            answer.has_unread_body = message.get("more_body", False)
            return message

        return next_message

    async def _answer_unrouted(self, scope: Scope, error: HTTPException, answer: _Sender) -> None:
        """Answer a path or method without a handler. OPTIONS of a known path lists its methods."""
        shown = _unrouted(scope, error, [getattr(route, "path", "") for route in self._router.routes])
        if not isinstance(shown, MethodNotAllowedError) or scope["method"] != "OPTIONS":
            await self._answer_error(scope, shown, answer)
            return
        headers = [(b"allow", shown.allowed.encode())]
        await answer({"type": "http.response.start", "status": 204, "headers": headers})
        await answer({"type": "http.response.body", "body": b""})

    async def _answer_error(self, scope: Scope, error: Exception, answer: _Sender) -> None:
        if answer.has_started:  # raising closes the connection, so the client sees that the answer is incomplete
            annotate(code=(error if isinstance(error, ServiceError) else ServiceError).code.name)
            raise error
        shown = shown_error(f"HTTP {scope['path']}", error)
        self._stats.errors[_method(scope), shown.code.name] += 1
        annotate(code=shown.code.name)
        body = encode(error_body_of(scope["path"], shown, scope.get("names")))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(shown)}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await answer({"type": "http.response.start", "status": shown.http_status, "headers": raw})
        await answer({"type": "http.response.body", "body": body})


class _Sender:
    """Sends an answer with the request id as a header. Closes the connection if the request's body was not read."""

    def __init__(self, send: Send, headers: Headers) -> None:
        request_id = headers.get(REQUEST_ID_HEADER, "")
        self.has_unread_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.request_id = request_id if REQUEST_ID.fullmatch(request_id) else f"req-{secrets.token_hex(12)}"
        self._send = send
        self._header = (REQUEST_ID_HEADER.encode(), self.request_id.encode())
        self.targets: list[str] = []  # targets that were chosen by routes
        self.status: int | None = None
        self.is_complete = False

    @property
    def has_started(self) -> bool:
        return self.status is not None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            closing = [(b"connection", b"close")] if self.has_unread_body else []
            targets = [(TARGET_HEADER, ", ".join(dict.fromkeys(self.targets)).encode())] if self.targets else []
            message["headers"] = [*message.get("headers", ()), self._header, *targets, *closing]
        await self._send(message)
        if message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises BodyTooLargeError or ClientGoneError.

    A body that is too large is read to its end and discarded: many clients read no answer before they have sent it.
    """
    body = BytesIO()  # gives its bytes without a copy
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size <= MAX_BODY_BYTES:
            body.write(part)
        else:
            body = BytesIO()
        if not message.get("more_body", False):
            break
    if size > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body has {size} bytes; at most {MAX_BODY_BYTES} are allowed: send a smaller body")
    return body.getvalue()


def _replay(body: bytes) -> Receive:
    """A `receive` that returns a body that was read before."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _until_hang_up(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Await the answer, or cancel it when the client disconnects. Raises the exceptions of `answering`."""
    task = asyncio.create_task(answering)
    gone = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_answered = task.done()
        await cancel(task, gone)
    if is_answered:
        try:
            task.result()
        finally:
            del task  # else task, exception and this frame keep each other and the body until a garbage collection


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unrouted(scope: Scope, error: HTTPException, known: Sequence[str]) -> NotFoundError | MethodNotAllowedError:
    path = scope["path"]
    if error.status_code != MethodNotAllowedError.http_status:
        (close,) = difflib.get_close_matches(path[:MAX_SHOWN_PATH], known, n=1, cutoff=SIMILAR) or [""]
        close = f"/v1{path}" if f"/v1{path}" in known else close
        words = f"did you mean {close}?" if close else "docs/http.md lists the endpoints"
        return NotFoundError(f"there is no endpoint {path[:MAX_SHOWN_PATH]}; {words}")
    methods = (error.headers or {}).get("Allow", "").split(", ")
    allowed = ", ".join(sorted({*methods, "OPTIONS"}))
    words = f"{path} does not accept {scope['method']}; send one of {allowed}"
    return MethodNotAllowedError(words, allowed=allowed)


def _method(scope: Scope) -> str:
    """The endpoint's label in metrics. All unknown paths share one label."""
    return f"http/{getattr(scope.get('endpoint'), '__name__', 'unknown')}"
