"""The endpoints /v1/files and /v1/batches of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.batches.batches import Batches
from gateway_svc.batches.lines import BATCH, FILE, Splitter
from gateway_svc.batches.store import Json
from gateway_svc.http.batches.calls import json_lines, page_of
from gateway_svc.http.forms import FormReader
from gateway_svc.http.json_text import decode
from gateway_svc.http.replies import EventStream, Read, json_reply
from gateway_svc.http.responses.bodies import metadata_of
from gateway_svc.http.values import invalid, object_of, one_of, text
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
        """All endpoints."""
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
        batch = await self._batches.create(body.get("endpoint"), text(body, "input_file_id"), window, own)
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
