"""The endpoints of the Responses API. docs/responses.md describes them."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.internal.v1 import record_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.answer.resuming import Resumed
from gateway_svc.callers.caller import CANCELLED, OK, forked, record_request_id, scoped
from gateway_svc.http.json_text import BOOLEANS, Json, encode, invalid, named_event, one_of
from gateway_svc.http.replays import Around, ReplayEntries
from gateway_svc.http.replies import EventStream, Read, answer_id, ignored_headers, json_reply, mark_conversation
from gateway_svc.http.responses.bodies import ResponseBody, messages_of, response_request, with_ids
from gateway_svc.http.responses.events import Event, events_of
from gateway_svc.http.responses.runs import ResponseRun, Source
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.records.fields import Update
from gateway_svc.records.store import StoredRecord
from gateway_svc.request.validation import REQUEST_ID
from gateway_svc.schedulers.directory import ModelDirectory
from svc_common.errors import ContextLengthError, NotFoundError, RecordsUnavailableError, UnavailableError

log = logging.getLogger(__name__)

MAX_LISTED = 100
DEFAULT_LISTED = 20
INTEGER = re.compile("-?[0-9]{1,18}")


class ResponsesHandlers:
    """One method per endpoint. Owns the runs of this gateway, by the scoped id of the response."""

    def __init__(self, generation: GenerationPipeline, directory: ModelDirectory, read: Read) -> None:
        self._generation = generation
        self._directory = directory
        self._read = read
        self._runs: dict[str, ResponseRun] = {}

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self.create_response, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route("/v1/responses/compact", self.compact_response, methods=["POST"]),
            Route(one, self.one_response, methods=["GET", "DELETE"]),
            Route(f"{one}/cancel", self.cancel_response, methods=["POST"]),
            Route(f"{one}/input_items", self.list_input_items, methods=["GET"]),
        ]

    # -- endpoints ----------------------------------------------------------------------------------------------------

    async def create_response(self, request: Request) -> Response | EventStream:
        """Answer an input, directly or in the background."""
        asked: ResponseBody = await self._read(request, response_request)
        request.scope["names"] = asked.names
        mark_conversation(request, [asked.request])
        self._directory.find_text(asked.request.model).require_tokenizer("input")
        is_stored = self._is_stored(asked)
        response_id = await answer_id(request, "resp_")
        record_request_id(response_id)
        await self._add_conversation(asked)
        replays = ReplayEntries(request, self._directory)
        try:
            return await self._answer(response_id, asked, replays, is_stored=is_stored)
        except RecordsUnavailableError:
            if asked.store or asked.is_background:
                raise
            return await self._answer(response_id, asked, replays, is_stored=False)

    async def _answer(
        self, response_id: str, asked: ResponseBody, replays: ReplayEntries, *, is_stored: bool
    ) -> Response | EventStream:
        run = self._new_run(response_id, asked, replays.around, is_stored=is_stored)
        run.late_fields = replays.fields
        try:
            await run.begun()
            return await self._reply(run, asked)
        except BaseException:
            await run.cancel()
            raise

    async def one_response(self, request: Request) -> Response | EventStream:
        """Read or delete a stored response. With `stream=true`, read its events after `starting_after`."""
        if request.method == "DELETE":
            return await self.delete_response(request)
        return await self.retrieve_response(request)

    async def retrieve_response(self, request: Request) -> Response | EventStream:
        """A stored response; with `stream=true`, its events after `starting_after`."""
        response_id = _id_of(request)
        is_stream, after = _stream_of(request)
        if is_stream:
            return await EventStream.begun(_encoded(self._follow(response_id, after)), {})
        run = self._runs.get(scoped(response_id))
        try:
            record = await self._load(response_id)  # another gateway may have deleted or ended what runs here
        except UnavailableError:
            if run is None:
                raise
            return json_reply(run.response)
        if record.stored_object:
            return json_reply(json.loads(record.stored_object))
        if run is None:
            run = self._continue(record)
            await run.begun()
        return json_reply(run.response)

    async def cancel_response(self, request: Request) -> Response:
        """End a response in progress. A complete response is returned unchanged."""
        response_id = _id_of(request)
        record = await self._load(response_id)
        if not record.stored_object:
            await self._abort(record)
            record = await self._load(response_id)
        return json_reply(json.loads(record.stored_object))

    async def delete_response(self, request: Request) -> Response:
        """Delete a stored response. A response in progress is ended first."""
        response_id = _id_of(request)
        record = await self._load(response_id)
        if not record.stored_object:
            await self._abort(record)
        await self._generation.recorder.records.delete(record.record_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def list_input_items(self, request: Request) -> Response:
        """The input of a stored response, the latest item first."""
        items = _notes_of(await self._load(_id_of(request)))["items"]
        query = request.query_params
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        limit = _number(query, "limit", DEFAULT_LISTED, 1, MAX_LISTED)
        ids = [item["id"] for item in items]
        start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        page = items[start : start + limit]
        return json_reply(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": start + limit < len(items),
            }
        )

    async def count_input_tokens(self, request: Request) -> Response:
        """The number of tokens of the prompt that a response would have."""
        asked: ResponseBody = await self._read(request, response_request)
        request.scope["names"] = asked.names
        self._directory.find_text(asked.request.model).require_tokenizer("input")
        await self._add_conversation(asked)
        count = await self._generation.count_tokens(asked.request)
        return json_reply({"object": "response.input_tokens", "input_tokens": count}, asked.ignored)

    async def compact_response(self, request: Request) -> Response:
        """Not supported."""
        raise NotFoundError("/v1/responses/compact is not supported; send a shorter input")

    # -- creating -----------------------------------------------------------------------------------------------------

    def _is_stored(self, asked: ResponseBody) -> bool:
        """Whether to keep a record. Raises if the request requires a record and this gateway keeps none."""
        if asked.is_background and asked.store is False:
            raise invalid("background", "is true, but store is false; a background response must be stored")
        if asked.store is False:
            return False
        if asked.store or asked.is_background:
            return self._generation.recorder is not None  # raises if this gateway keeps no records
        return self._generation.keeps_records

    async def _add_conversation(self, asked: ResponseBody) -> None:
        """Put the previous response's conversation and the instructions in front of the input."""
        own = list(asked.request.prompt.chat.messages)
        before: list[pb.ChatMessage] = []
        if asked.previous_id:
            record = await self._load(asked.previous_id, "previous_response_id")
            if not record.stored_object:
                words = f"{asked.previous_id!r} is not complete; retrieve it until it is, which continues a broken one"
                raise invalid("previous_response_id", words)
            earlier = record.content.request.prompt.chat.messages
            before += earlier[1:] if _notes_of(record)["has_instructions"] else earlier
            before += messages_of(json.loads(record.stored_object)["output"], "previous_response_id")
        if asked.instructions:
            before.insert(0, pb.ChatMessage(role="system", content=asked.instructions))
        del asked.request.prompt.chat.messages[:]
        asked.request.prompt.chat.messages.extend([*before, *own])
        if asked.truncates:
            await self._truncate(asked)

    async def _truncate(self, asked: ResponseBody) -> None:
        """Leave out as many of the oldest turns as needed, and keep the instructions and the last turn."""
        messages, kept = asked.request.prompt.chat.messages, int(bool(asked.instructions))
        starts = [i for i, message in enumerate(messages) if message.role == "user" and i > kept]
        if not starts or await self._fits(asked.request):
            return
        low, high = 1, len(starts)  # the number of turns to leave out
        cuts = [kept, *starts]
        while low < high:
            middle = (low + high) // 2
            if await self._fits(_without(asked.request, kept, cuts[middle])):
                high = middle
            else:
                low = middle + 1
        del messages[kept : cuts[low]]

    async def _fits(self, request: pb.GenerateRequest) -> bool:
        """Whether prompt and output fit into the context of the model."""
        limit = self._directory.text_of(request).info.max_model_len - max(1, request.stop.max_tokens)
        try:
            return await self._generation.count_tokens(request) <= limit
        except ContextLengthError:
            return False

    def _new_run(self, response_id: str, asked: ResponseBody, around: Around, *, is_stored: bool) -> ResponseRun:
        model = asked.request.model or self._directory.find_text("").name
        head = {"id": response_id, **asked.head, "created_at": int(time.time()), "model": model, "store": is_stored}
        notes = {
            "head": head,
            "items": with_ids(response_id, asked.items),
            "has_instructions": bool(asked.instructions),
        }
        asked.request.request_id = response_id
        asked.request.resumable = is_stored
        asked.request.output.token_ids = False
        events = self._generation.generate(asked.request, notes=encode(notes) if is_stored else b"")
        source = around(asked.request, events)
        return self._start(scoped(response_id), head, source, is_stored=is_stored)

    def _start(self, scoped_id: str, head: Json, source: Source, *, is_stored: bool) -> ResponseRun:
        async def store(response: Json) -> Json:
            stored: Json = json.loads(await self._generation.recorder.records.put_object(scoped_id, encode(response)))
            return stored

        run = self._runs[scoped_id] = ResponseRun(head, source, store if is_stored else None)
        if not is_stored:
            run.start(lambda: self._forget(scoped_id, run))
            return run
        with forked("http/response_run") as entry:  # a stored response may be computed after the request has ended

            def on_over() -> None:
                self._forget(scoped_id, run)
                if entry is not None:
                    ended = OK if run.is_complete else CANCELLED
                    entry.end(ended if run.error is None else run.error.code.name)

            run.start(on_over)
        return run

    def _forget(self, scoped_id: str, run: ResponseRun) -> None:
        if self._runs.get(scoped_id) is run:
            del self._runs[scoped_id]

    async def _reply(self, run: ResponseRun, asked: ResponseBody) -> Response | EventStream:
        if asked.is_stream:
            events = self._follow(run.response["id"], -1, run) if asked.is_background else _of_client(run)
            return await EventStream.begun(_encoded(events), ignored_headers(asked.ignored))
        if not asked.is_background:
            await run.over()
            if run.error is not None:
                raise run.error
        return json_reply(run.response if not asked.is_background else run.queued, asked.ignored)

    # -- continuing ---------------------------------------------------------------------------------------------------

    async def _load(self, response_id: str, field: str = "response_id") -> StoredRecord:
        record = None
        if REQUEST_ID.fullmatch(response_id):
            record = await self._generation.recorder.records.load(scoped(response_id))
        if record is None or not record.content.notes:
            raise NotFoundError(
                f"there is no response {response_id[:80]!r}: it was not stored, has expired (--record-ttl-s), or was "
                "deleted",
                field=field,
            )
        return record

    def _continue(self, record: StoredRecord) -> ResponseRun:
        """Follow a response of another gateway, or compute it here if that gateway has ended."""
        source = self._generation.generate_again(Resumed(record, (0,), follows=True))
        return self._start(record.record_id, _notes_of(record)["head"], source, is_stored=True)

    async def _follow(
        self, response_id: str, after: int, run: ResponseRun | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of a stored response after a sequence number. Any gateway may compute the response."""
        while True:
            run = run or self._runs.get(scoped(response_id))
            if run is None and (record := await self._load(response_id)).stored_object:
                rests = [event.after(after) for event in events_of(json.loads(record.stored_object))]
                for rest in filter(None, rests):
                    yield rest
                return
            if run is None:
                run = self._continue(record)
                await run.begun()
            async with aclosing(run.watch(after)) as events:
                async for event in events:
                    yield event
                    after = event.number
            if run.is_complete:
                return
            if isinstance(run.error, UnavailableError):
                raise run.error
            run = None

    async def _abort(self, record: StoredRecord) -> None:
        """End a response on any gateway, and store it as cancelled."""
        records, run_id = self._generation.recorder.records, secrets.token_hex(8)
        await records.claim(record.record_id, run_id, by_force=True)  # from now on no other gateway can continue it
        await self._generation.abort_everywhere(record.record_id)
        run = self._runs.get(record.record_id)
        if run is not None:
            await run.over()
        current = await records.load(record.record_id)
        if current is None or current.stored_object:
            return
        await records.write([_cancelled(current, run_id)])
        current = await records.load(record.record_id) or current
        await self._continue(current).over()


def _without(request: pb.GenerateRequest, start: int, end: int) -> pb.GenerateRequest:
    """A copy without these messages."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    del copy.prompt.chat.messages[start:end]
    return copy


def _notes_of(record: StoredRecord) -> Json:
    notes: Json = json.loads(record.content.notes)
    return notes


async def _of_client(run: ResponseRun) -> AsyncGenerator[Event, None]:
    """The events of a run, which is cancelled when the client disconnects."""
    try:
        async with aclosing(run.watch()) as events:
            async for event in events:
                yield event
        if not run.is_complete and run.error is not None:
            raise run.error
    finally:
        await run.cancel()


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield named_event(event.data)


def _id_of(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    if REQUEST_ID.fullmatch(response_id):
        record_request_id(response_id)
    return response_id


def _stream_of(request: Request) -> tuple[bool, int]:
    """`stream` and `starting_after` of a query."""
    query = request.query_params
    stream = BOOLEANS[one_of("stream", query.get("stream", "false").lower(), BOOLEANS)]
    return stream, _number(query, "starting_after", -1, -1, 2**53)


def _number(query: QueryParams, name: str, default: int, low: int, high: int) -> int:
    given = ", ".join(query.getlist(name))
    if not given:
        return default
    number = int(given) if INTEGER.fullmatch(given) else low - 1
    if not low <= number <= high:
        raise invalid(name, f"is {given[:80]!r}; must be an integer from {low} to {high}")
    return number


def _cancelled(record: StoredRecord, run: str) -> Update:
    """The update that ends a response as cancelled."""
    finish = scheduler_pb2.SampleFinished(reason=types.FINISH_REASON_ABORTED)
    end = record_pb2.SampleEnd(finish=finish, num_output=len(record.outputs[0]))
    return Update(record.record_id, run, ends={0: end.SerializeToString()}, releases=True)
