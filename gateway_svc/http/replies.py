"""Answers of the endpoints: JSON, and server-sent events from one or several generations."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import xxhash
from quire.v1 import inference_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway_svc.callers.caller import annotate
from gateway_svc.http.app import IGNORED_HEADER
from gateway_svc.http.json_text import encode
from request_fields.fields import BY_PATH
from svc_common.errors import DeadlineError, ServiceError, shown_error
from svc_common.tasks import cancel

Events = AsyncGenerator[pb.GenerateResponse, None]
Numbered = AsyncGenerator[tuple[int, pb.GenerateResponse], None]
STARTED_AT_ONCE = 4
MAX_QUEUED = 64  # number of events that wait for a slow reader; further tokens wait in the journals


async def merged(streams: Sequence[Events]) -> Numbered:
    """Yields every event with the index of its stream. Nothing is yielded before every stream has its first event, so
    that a refused stream raises before any output. Raises the exceptions of the streams. Closing it closes all streams.
    """
    try:
        if len(streams) == 1:
            async for alone in streams[0]:
                yield 0, alone
            return
        for first in enumerate(await _first_events(streams)):
            yield first
        queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]] = asyncio.Queue(MAX_QUEUED)
        pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
        try:
            num_open = len(streams)
            while num_open:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            await cancel(*pumps)
    finally:
        for stream in streams:
            await stream.aclose()


async def within(timeout_s: float, events: Numbered) -> Numbered:
    """The events of a stream. Raises DeadlineError when `timeout_s` has passed since the first call."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(events):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineError(
                    f"timeout is {timeout_s:g} s, and the answer is not complete", field="timeout"
                ) from None
            yield event


async def _first_events(streams: Sequence[Events]) -> list[pb.GenerateResponse]:
    """Starts the streams in slices: planning a thousand requests takes longer than a pause of other streams may."""
    tasks: list[asyncio.Future[pb.GenerateResponse]] = []
    try:
        for number, stream in enumerate(streams, start=1):
            tasks.append(asyncio.ensure_future(anext(stream)))
            if not number % STARTED_AT_ONCE:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def _pump(
    index: int, stream: Events, queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]]
) -> None:
    try:
        async for event in stream:
            await queue.put((index, event))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))


SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PART_BYTES = 256 << 10  # written at once
MAX_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_IGNORED_SHOWN = 32

Read = Callable[[Request, Callable[[bytes], Any]], Any]
"""Reads the body of a request and parses it, in a thread if it is large."""


CONVERSATION = BY_PATH["scheduling.conversation"]
# Headers that agents send with each request of a conversation (docs/http.md).
SESSION_HEADERS = ("x-session-id", "session-id", "session_id", "x-litellm-session-id", "x-claude-code-session-id")


def mark_conversation(request: Request, asked: Iterable[pb.GenerateRequest]) -> None:
    """Keep the blocks of requests longer that are part of a conversation, by their headers."""
    name = next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
    for one in asked:
        if name and not one.scheduling.conversation:
            one.scheduling.conversation = name.encode()[: CONVERSATION.max_bytes].decode(errors="ignore")


IDEMPOTENCY_HEADER = "idempotency-key"


async def answer_id(request: Request, prefix: str) -> str:
    """The id of an answer and of its request: the same for each retry of a body with the same Idempotency-Key."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return prefix + secrets.token_hex(16)
    return prefix + xxhash.xxh3_128_hexdigest(b"%b\0%b" % (key.encode(), await request.body()))


class StreamedAnswer(Protocol):
    """Encodes the events of generations as server-sent events."""

    def take(self, prompt: int, event: pb.GenerateResponse) -> bytes:
        """The data for an event. Raises ServiceError if the generation failed."""

    def failed(self, error: ServiceError, names: Mapping[str, str]) -> bytes:
        """The last event of a stream that fails. `names`: of fields in the body."""

    def end(self) -> bytes:
        """The data after the last event."""


async def encoded_events(answer: StreamedAnswer, events: Numbered, scope: Scope) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error after the first event is sent as the last event."""
    is_begun = False
    async with aclosing(events):
        try:
            async for prompt, event in events:
                if data := answer.take(prompt, event):
                    yield data
                    is_begun = True
        except Exception as error:
            if not is_begun:
                raise
            shown = shown_error(f"HTTP {scope['path']}", error)
            annotate(code=shown.code.name)
            yield answer.failed(shown, scope["names"])
            return
    yield answer.end()


class EventStream:
    """A response of server-sent events. It is created after the first event, so a refusal can set the HTTP status."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self._first = first
        self._rest = rest
        self._headers = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **headers}.items()]

    @classmethod
    async def begun(cls, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> EventStream:
        """Wait for the first event. Raises the exception of a generator that fails before it."""
        return cls(await anext(events, b""), events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    """The header that names the ignored fields, if there are any. A name that is unsafe in a header becomes `?`."""
    shown = [name if MAX_NAME.fullmatch(name) else "?" for name in names[:MAX_IGNORED_SHOWN]]
    more = ["..."] if len(names) > MAX_IGNORED_SHOWN else []
    return {IGNORED_HEADER: ", ".join([*shown, *more])} if names else {}


def json_reply(value: dict[str, Any] | bytes, ignored: Sequence[str] = ()) -> Response:
    """A JSON answer. A large value is encoded before, in a thread."""
    content = value if isinstance(value, bytes) else encode(value)
    return PartsResponse(content, media_type="application/json", headers=ignored_headers(ignored))


class PartsResponse(Response):
    """A response that is written in parts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body, start = bytes(self.body), 0
        while len(body) - start > PART_BYTES:
            part = body[start : start + PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
            start += PART_BYTES
        await send({"type": "http.response.body", "body": body[start:]})
