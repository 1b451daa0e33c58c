"""Entries of replay logs in the answers of HTTP requests that ask for them (docs/replay.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from google.protobuf import json_format
from msgspec import Raw
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request

from gateway_svc.http.json_text import encode
from gateway_svc.http.openai.chat import MessageBuilder
from gateway_svc.http.values import Json, invalid
from gateway_svc.schedulers.directory import ModelDirectory
from request_fields.replay_log import sample_entry, turn_entry

HEADER = "x-quire-replay"
MAX_REQUEST_BYTES = 2 << 20  # converted and encoded in some milliseconds

Events = AsyncGenerator[pb.GenerateResponse, None]
Around = Callable[[pb.GenerateRequest, Events], Events]


class ReplayEntries:
    """The entries of the generations of one HTTP request, if its header asks for them."""

    def __init__(self, request: Request, directory: ModelDirectory) -> None:
        self._is_wanted = request.headers.get(HEADER, "0") != "0"
        self._directory = directory
        self._entries: dict[int, Raw] = {}  # by number of the generation
        self._num_begun = 0

    def fields(self) -> Json:
        """The field of the answer with the entries of the generations that have ended."""
        return {"quire_replay": [self._entries[i] for i in sorted(self._entries)]} if self._is_wanted else {}

    def around(self, request: pb.GenerateRequest, events: Events) -> Events:
        """The events of a generation. Its entry is made before the last one. Raises InvalidRequestError."""
        if not self._is_wanted:
            return events
        if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
            limit = f"is set, but the request has {size} bytes; entries have at most {MAX_REQUEST_BYTES}"
            raise invalid(HEADER, f"{limit}: send it without the header, or record it with the SDK")
        self._num_begun += 1
        return self._read(self._num_begun, request, events)

    async def _read(self, number: int, request: pb.GenerateRequest, events: Events) -> Events:
        entry = _AnswerEntry(request)
        async with aclosing(events):
            async for event in events:
                if event.HasField("accepted"):
                    entry.begin(event.accepted, self._directory)
                elif entry.ends_with(event):
                    self._entries[number] = Raw(await asyncio.to_thread(lambda: encode(entry.made())))
                yield event


class _AnswerEntry:
    """The entry of one generation, from its events."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)

    def begin(self, accepted: pb.Accepted, directory: ModelDirectory) -> None:
        self._accepted = accepted
        self._info = directory.find_text(accepted.target or accepted.model).info
        self._texts: list[list[str]] = [[] for _ in range(accepted.n)]
        self._messages = [MessageBuilder() for _ in range(accepted.n)]
        self._ends: dict[int, pb.Finished] = {}

    def ends_with(self, event: pb.GenerateResponse) -> bool:
        """Take an event after the first one. Returns whether all samples have ended."""
        if event.HasField("chunk"):
            self._texts[event.chunk.index].append(event.chunk.text)
            self._messages[event.chunk.index].add(event.chunk.parts)
        elif event.HasField("finished"):
            self._ends[event.finished.index] = event.finished
        return len(self._ends) == self._accepted.n

    def made(self) -> Json:
        request = json_format.MessageToDict(self._request, preserving_proto_field_name=True)
        return turn_entry(request, self._info, self._accepted, [self._sample(i) for i in sorted(self._ends)])

    def _sample(self, index: int) -> Json:
        message, finished = self._messages[index].message(), self._ends[index]
        text = "".join(self._texts[index]) + (message["content"] or "")
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        reason = types.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        return sample_entry(text, message.get("reasoning", ""), calls, reason, finished)
