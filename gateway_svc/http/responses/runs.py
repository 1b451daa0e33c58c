"""Answers in progress on this gateway. A run reads the events of one generation; any number of readers follow it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import FAILED
from gateway_svc.http.errors import error_of_sample
from gateway_svc.http.json_text import Json, joined_lists
from gateway_svc.http.openai.logprobs import ChatLogprobs, positions
from gateway_svc.http.responses.events import CALL, MESSAGE, REASONING, Event, OutputPart, ResponseEnd, ResponseEvents
from svc_common.errors import ServiceError, TakenOverError, UnavailableError, shown_error
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

STATUSES = {types.FINISH_REASON_LENGTH: "incomplete", types.FINISH_REASON_ABORTED: "cancelled"}
# After these errors, the answer can be continued, on this or another gateway.
LOST = (TakenOverError, UnavailableError)

Source = AsyncGenerator[pb.GenerateResponse, None]
Store = Callable[[Json], Awaitable[Json]]


class ResponseRun:
    """One answer. `store` gets the complete response object before the last event is published. It returns the stored
    object, which may come from another gateway.
    """

    late_fields: Callable[[], Json] = dict  # fields that the complete response has and its stored object has not

    def __init__(self, head: Json, source: Source, store: Store | None) -> None:
        self._builder = ResponseEvents(head)
        self._source = source
        self._store = store
        self._final: Json | None = None  # the stored object
        self._logprobs: list[Any] = []  # log probabilities of tokens whose text has not arrived
        self._events: list[Event] = []
        self._changed = asyncio.Event()  # replaced after each change
        self._task: asyncio.Task[None] | None = None
        self.error: ServiceError | None = None
        self.is_over = False
        self.is_complete = False  # the last event is published

    def start(self, on_over: Callable[[], None]) -> None:
        """Start reading. `on_over` is called at the end."""
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: on_over())

    async def cancel(self) -> None:
        """End the run. An answer that is not complete can be continued from its record."""
        if self._task is not None:
            await cancel(self._task)

    @property
    def queued(self) -> Json:
        """The response object of the first event."""
        response: Json = self._events[0].data["response"]
        return response

    @property
    def response(self) -> Json:
        """The response object as it is now."""
        return {**(self._final or self._builder.response()), **(self.late_fields() if self.is_complete else {})}

    async def begun(self) -> None:
        """Wait until the request is accepted. Raises the error of a refused request."""
        while not self._events and not self.is_over:
            await self._changed.wait()
        if not self._events and self.error is not None:
            raise self.error

    async def over(self) -> None:
        """Wait until the run has ended."""
        while not self.is_over:
            await self._changed.wait()

    async def watch(self, after: int = -1) -> AsyncGenerator[Event, None]:
        """The events after a sequence number, until the run is over."""
        position = 0
        while True:
            while position < len(self._events):
                event = self._events[position].after(after)
                position += 1
                if event is not None:
                    yield event
            if self.is_over:
                return
            await self._changed.wait()

    async def _read(self) -> None:
        try:
            async with aclosing(self._source):
                async for event in self._source:
                    await self._take(event)
        except Exception as error:
            self._fail(shown_error("HTTP /v1/responses", error))
        finally:
            self.is_over = True
            self._publish([])

    async def _take(self, event: pb.GenerateResponse) -> None:
        if event.HasField("accepted"):
            self._publish(self._builder.begin())
        elif event.HasField("chunk"):
            self._publish(self._builder.add(self._parts_of(event.chunk)))
        elif event.HasField("finished"):
            await self._finish(event.finished)

    def _parts_of(self, chunk: pb.Chunk) -> list[OutputPart]:
        """The output of a chunk. Log probabilities are those of the tokens since the text of a message before."""
        parts = [_part_of(part) for part in chunk.parts]
        if not chunk.HasField("logprobs"):
            return parts
        self._logprobs.append(ChatLogprobs().entry(list(positions(chunk.logprobs)))["content"])
        first = next((i for i, part in enumerate(parts) if part.kind == MESSAGE), None)
        if first is not None:
            parts[first] = replace(parts[first], logprobs=joined_lists(self._logprobs))
        if parts:
            self._logprobs.clear()
        return parts

    async def _finish(self, finished: pb.Finished) -> None:
        if finished.reason in FAILED:
            raise error_of_sample(finished.message)
        status = STATUSES.get(finished.reason, "completed")
        events = self._builder.finish(ResponseEnd(status, usage_of(finished.usage), int(time.time())))
        if self._store is not None:
            await self._put(self._store)
        self.is_complete = True
        last = events.pop()
        self._publish([*events, Event(last.number, {**last.data, "response": self.response})])

    async def _put(self, store: Store) -> None:
        try:
            self._final = await store(self._builder.response())
        except UnavailableError as error:
            log.warning("response %s was not stored: %s", self._builder.response()["id"], error.message)

    def _fail(self, error: ServiceError) -> None:
        self.error = error
        if not self._events or (self._store is not None and isinstance(error, LOST)):
            return
        code = "server_error"
        self.is_complete = True
        self._publish(self._builder.finish(ResponseEnd("failed", error={"code": code, "message": error.message})))

    def _publish(self, events: list[Event]) -> None:
        self._events += events
        self._changed.set()
        self._changed = asyncio.Event()


def _part_of(part: pb.AnswerPart) -> OutputPart:
    if part.HasField("tool_call"):
        call = part.tool_call
        return OutputPart(part.item, CALL, call.arguments, call.name, call.id)
    if part.HasField("reasoning"):
        return OutputPart(part.item, REASONING, part.reasoning)
    return OutputPart(part.item, MESSAGE, part.content)


def usage_of(usage: types.Usage) -> Json:
    """Token counts under the names of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
