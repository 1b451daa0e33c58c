"""The endpoints /v1/messages/batches of Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.batches.batches import OPEN, Batches
from gateway_svc.batches.lines import BATCH, MESSAGES, BatchLine, Checker, Splitter
from gateway_svc.batches.store import Json
from gateway_svc.http.batches.calls import json_lines, page_of
from gateway_svc.http.replies import EventStream, Read, json_reply
from gateway_svc.http.values import invalid

PATH = f"{MESSAGES}/batches"
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
        """All endpoints."""
        return [
            Route(PATH, self.message_batches, methods=["GET", "POST"]),
            Route(f"{PATH}/{{batch_id}}", self.message_batch, methods=["GET", "DELETE"]),
            Route(f"{PATH}/{{batch_id}}/cancel", self.cancel_message_batch, methods=["POST"]),
            Route(f"{PATH}/{{batch_id}}/results", self.message_batch_results, methods=["GET"]),
        ]

    async def message_batches(self, request: Request) -> Response:
        """Start a batch of messages, or list the batches of the caller."""
        if request.method == "GET":
            found = [doc for doc in await self._batches.all(BATCH) if doc["endpoint"] == MESSAGES]
            page = page_of([batch_object(request, doc) for doc in found], request.query_params, "after_id")
            return json_reply(page)
        parts, total = await self._read(request, lambda data: _parts_of(data, self._batches.limits.max_lines))

        async def stored() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        file = await self._batches.upload(stored(), lambda: {"filename": "requests.jsonl", "purpose": BATCH})
        doc = await self._batches.create(MESSAGES, file["id"], "24h", {"total": total})
        return json_reply(batch_object(request, doc))

    async def message_batch(self, request: Request) -> Response:
        """A batch, with the number of its results so far, or delete it with its results."""
        batch_id = request.path_params["batch_id"]
        if request.method == "GET":
            return json_reply(batch_object(request, await self._batches.find(BATCH, batch_id)))
        await self._batches.delete(BATCH, batch_id)
        return json_reply({"id": batch_id, "type": "message_batch_deleted"})

    async def cancel_message_batch(self, request: Request) -> Response:
        """End a batch. Its results so far stay."""
        return json_reply(batch_object(request, await self._batches.cancel(request.path_params["batch_id"])))

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


def batch_object(request: Request, doc: Json) -> Json:
    """A batch in Anthropic's form. Its results can be read from the start."""
    counts = {kind: doc["counts"].get(kind, 0) for kind in KINDS}
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    base = f"{'https' if scheme == 'https' else 'http'}://{request.url.netloc}{PATH}"
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
