"""The endpoints of files and batches (docs/batches.md), of OpenAI's API and Anthropic's; the calls that send lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from gateway_svc.batches.batches import OPEN, Batches, Json
from gateway_svc.batches.lines import BATCH, FILE, MESSAGES, BatchLine, Checker, Reply, Splitter
from gateway_svc.http.app import REQUEST_ID_HEADER
from gateway_svc.http.forms import FormReader
from gateway_svc.http.json_text import decode, invalid, object_of, one_of, text
from gateway_svc.http.replies import EventStream, Read, json_reply
from gateway_svc.http.responses.bodies import metadata_of
from svc_common.errors import OverloadedError

FILES = "/v1/files"
MAX_UPLOADS = 16  # at the same time
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class FileHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, batches: Batches, read: Read) -> None:
        self._batches = batches
        self._read = read
        self._num_uploads = 0

    def routes(self) -> list[Route]:
        return [
            Route(FILES, self.files, methods=["GET", "POST"]),
            Route(f"{FILES}/{{file_id}}", self.file, methods=["GET", "DELETE"]),
            Route(f"{FILES}/{{file_id}}/content", self.file_content, methods=["GET"]),
            Route("/v1/batches", self.batches, methods=["GET", "POST"]),
            Route("/v1/batches/{batch_id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel_batch, methods=["POST"]),
        ]

    async def files(self, request: Request) -> Response:
        """Upload a file of requests, or list the files of the caller."""
        if request.method == "GET":
            purpose, found = request.query_params.get("purpose"), await self._batches.all(FILE)
            return _listed(request, [doc for doc in found if purpose in (None, doc["purpose"])], file_object)
        if self._num_uploads >= MAX_UPLOADS:
            raise OverloadedError(f"{MAX_UPLOADS} files are being uploaded; retry later", retry_after_s=1.0)
        form = FormReader(request.headers.get("content-type", ""))
        self._num_uploads += 1
        try:
            file = await self._batches.upload(_parts(request, form), lambda: _described(form))
        finally:
            self._num_uploads -= 1
        return json_reply(file_object(file), sorted({*form.values} - {"purpose"}))

    async def file(self, request: Request) -> Response:
        """A file, or delete it."""
        file_id = request.path_params["file_id"]
        if request.method == "GET":
            return json_reply(file_object(await self._batches.find(FILE, file_id)))
        await self._batches.delete(FILE, file_id)
        return json_reply({"id": file_id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> EventStream:
        """The content of a file. That of an output has the lines that are answered so far."""
        file = await self._batches.find(FILE, request.path_params["file_id"])
        return await json_lines(self._batches.content(file["id"]))

    async def batches(self, request: Request) -> Response:
        """Start a batch, or list the batches of the caller."""
        if request.method == "GET":
            return _listed(request, await self._batches.all(BATCH), batch_object)
        body = object_of("body", await self._read(request, _parsed))
        own, window = {"metadata": metadata_of(body)}, body.get("completion_window", "24h")
        file_id, key = text(body, "input_file_id"), request.headers.get("idempotency-key", "")
        batch = await self._batches.create(body.get("endpoint"), file_id, window, own, key=key)
        return json_reply(batch_object(batch))

    async def batch(self, request: Request) -> Response:
        """A batch, with the number of its answers so far."""
        return json_reply(batch_object(await self._batches.find(BATCH, request.path_params["batch_id"])))

    async def cancel_batch(self, request: Request) -> Response:
        """End a batch. Its answers so far stay."""
        return json_reply(batch_object(await self._batches.cancel(request.path_params["batch_id"])))


async def _parts(request: Request, form: FormReader) -> AsyncIterator[bytes]:
    """The file of a form that arrives, in parts."""
    splitter = Splitter()
    async for data in request.stream():
        for name, content in form.feed(data):
            one_of("file", name, ("file",))
            for part in splitter.feed(content):
                yield part
    form.end()
    for part in splitter.end():
        yield part


def _described(form: FormReader) -> Json:
    if "file" not in form.file_names:
        raise invalid("file", "is not set; send a file of requests, one JSON object per line")
    purpose = one_of("purpose", form.values.get("purpose", [None])[-1], (BATCH,))
    return {"filename": form.file_names["file"][:255] or "file", "purpose": purpose}


def _parsed(data: bytes) -> Any:
    try:
        return decode(data)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"is not valid JSON: {error}") from None


def _listed(request: Request, found: list[Json], shown: Callable[[Json], Json]) -> Response:
    ordered = found[::-1] if request.query_params.get("order") == "asc" else found
    return json_reply({"object": "list", **page_of(list(map(shown, ordered)), request.query_params, "after")})


def file_object(doc: Json) -> Json:
    """A file in OpenAI's form."""
    shown = {name: doc[name] for name in ("id", "bytes", "created_at", "filename", "purpose", "status")}
    return {**shown, "object": "file", "expires_at": int(doc["deleted_at"])}


def batch_object(doc: Json) -> Json:
    """A batch in OpenAI's form."""
    problems, done = doc.get("problems"), doc["counts"].get("succeeded", 0)
    failed = sum(doc["counts"].values()) - done
    return {
        **{name: doc[name] for name in ("id", "endpoint", "status", "created_at", "expires_at")},
        "object": "batch",
        "input_file_id": doc["input"],
        "completion_window": doc["window"],
        "output_file_id": doc.get("output"),
        "error_file_id": doc.get("errors") if failed else None,
        "errors": {"object": "list", "data": problems} if problems else None,
        **{f"{name}_at": doc.get(f"{name}_at") for name in TIMES},
        "request_counts": {"total": doc["total"], "completed": done, "failed": failed},
        "metadata": doc.get("metadata") or None,
    }


MAX_LISTED = 100


async def send_line(app: ASGIApp, path: str, body: bytes) -> Reply:
    """The answer of an endpoint of this process to a call of the current caller. `retry_after_s`: send it again."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": ("batch", 0),
    }
    messages, waiting = list[Message](), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    headers = Headers(raw=messages[0]["headers"])
    again = headers.get("x-should-retry") == "true"
    return Reply(
        messages[0]["status"],
        headers[REQUEST_ID_HEADER],
        b"".join(message.get("body", b"") for message in messages[1:]),
        float(headers.get("retry-after-ms", "0")) / 1000 if again else None,
    )


async def json_lines(content: AsyncGenerator[bytes, None]) -> EventStream:
    """A response whose lines are read while they are sent."""
    return await EventStream.begun(content, {"content-type": "application/x-ndjson"})


def page_of(found: Sequence[Json], query: QueryParams, after: str) -> Json:
    """The page of a list that a query asks for. `after`: the parameter with the last id of the page before."""
    given, ids = query.get("limit", "20"), [one["id"] for one in found]
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if limit <= 0:
        raise invalid("limit", f"is {given[:80]!r}; must be an integer from 1 to 10000")
    if query.get(after) and query[after] not in ids:
        raise invalid(after, f"is {query[after][:80]!r}, which is not in the list")
    start = ids.index(query[after]) + 1 if query.get(after) else 0
    page = list(found[start : start + min(limit, MAX_LISTED)])
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"data": page, **ends, "has_more": start + len(page) < len(found)}


MESSAGES_PATH = f"{MESSAGES}/batches"
KINDS = ("succeeded", "errored", "canceled", "expired")
ENDS = ("completed", "cancelled", "expired", "failed")


class _Request(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _Body(msgspec.Struct):
    requests: list[_Request]


class MessageBatchHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, batches: Batches, read: Read) -> None:
        self._batches = batches
        self._read = read

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES_PATH, self.message_batches, methods=["GET", "POST"]),
            Route(f"{MESSAGES_PATH}/{{batch_id}}", self.message_batch, methods=["GET", "DELETE"]),
            Route(f"{MESSAGES_PATH}/{{batch_id}}/cancel", self.cancel_message_batch, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/{{batch_id}}/results", self.message_batch_results, methods=["GET"]),
        ]

    async def message_batches(self, request: Request) -> Response:
        """Start a batch of messages, or list the batches of the caller."""
        if request.method == "GET":
            found = [doc for doc in await self._batches.all(BATCH) if doc["endpoint"] == MESSAGES]
            page = page_of([message_batch_object(request, doc) for doc in found], request.query_params, "after_id")
            return json_reply(page)
        parts, total = await self._read(request, lambda data: _parts_of(data, self._batches.limits.max_lines))

        async def stored() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        file = await self._batches.upload(stored(), lambda: {"filename": "requests.jsonl", "purpose": BATCH})
        doc = await self._batches.create(MESSAGES, file["id"], "24h", {"total": total})
        return json_reply(message_batch_object(request, doc))

    async def message_batch(self, request: Request) -> Response:
        """A batch, with the number of its results so far, or delete it with its results."""
        batch_id = request.path_params["batch_id"]
        if request.method == "GET":
            return json_reply(message_batch_object(request, await self._batches.find(BATCH, batch_id)))
        await self._batches.delete(BATCH, batch_id)
        return json_reply({"id": batch_id, "type": "message_batch_deleted"})

    async def cancel_message_batch(self, request: Request) -> Response:
        """End a batch. Its results so far stay."""
        return json_reply(message_batch_object(request, await self._batches.cancel(request.path_params["batch_id"])))

    async def message_batch_results(self, request: Request) -> EventStream:
        """The results so far."""
        doc = await self._batches.find(BATCH, request.path_params["batch_id"])
        return await json_lines(self._batches.content(*(doc[of] for of in ("output", "errors") if of in doc)))


def _parts_of(data: bytes, max_lines: int) -> tuple[list[bytes], int]:
    """The requests of a body as parts of an input, and their number. All are checked."""
    if data.count(b'"custom_id"') > 2 * max_lines:  # before they are made
        raise invalid("requests", f"has too many requests; a batch has 1 to {max_lines} (--batch-max-lines)")
    try:
        asked = msgspec.json.decode(data, type=_Body).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("requests", f"cannot be read: {error}") from None
    splitter, checker, parts = Splitter(), Checker(MESSAGES, max_lines), list[bytes]()
    for one in asked:
        line = msgspec.json.encode(BatchLine(one.custom_id, MESSAGES, one.params))
        parts += splitter.feed(msgspec.json.format(line, indent=-1) + b"\n")
    parts += splitter.end()
    for part in parts:
        checker.check(part)
    checker.end()
    for problem in checker.problems:
        raise invalid(f"requests[{(problem['line'] or 1) - 1}]", f"is not valid: {problem['message']}")
    return parts, checker.num_lines


def message_batch_object(request: Request, doc: Json) -> Json:
    """A batch in Anthropic's form. Its results can be read from the start."""
    counts = {kind: doc["counts"].get(kind, 0) for kind in KINDS}
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    base = f"{'https' if scheme == 'https' else 'http'}://{request.url.netloc}{MESSAGES_PATH}"
    running = "canceling" if doc["status"] == "cancelling" else "in_progress"
    return {
        "id": doc["id"],
        "type": "message_batch",
        "processing_status": running if doc["status"] in OPEN else "ended",
        "request_counts": {"processing": max(0, doc["total"] - sum(counts.values())), **counts},
        "created_at": _time(doc["created_at"]),
        "expires_at": _time(doc["expires_at"]),
        "ended_at": _time(next((doc[f"{how}_at"] for how in ENDS if f"{how}_at" in doc), None)),
        "cancel_initiated_at": _time(doc.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{base}/{doc['id']}/results" if "output" in doc else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
