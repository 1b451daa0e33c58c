"""Calls by which a gateway answers lines of batches, and helpers of both dialects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Message

from gateway_svc.batches.lines import Reply
from gateway_svc.batches.store import Json
from gateway_svc.http.app import REQUEST_ID_HEADER
from gateway_svc.http.replies import EventStream
from gateway_svc.http.values import invalid

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
