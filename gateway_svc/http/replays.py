"""Entries of replay logs in the answers of HTTP requests that ask for them (docs/replay.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from google.protobuf import json_format
from msgspec import Raw
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request

from gateway_svc.http.json_text import Json, encode, invalid
from gateway_svc.http.openai.chat import MessageBuilder
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
        asked, taken, num_open = pb.GenerateRequest(), list[pb.GenerateResponse](), 0
        asked.CopyFrom(request)
        async with aclosing(events):
            async for event in events:
                taken.append(event)
                num_open += event.accepted.n - event.HasField("finished")
                if not num_open:
                    accepted = taken[0].accepted
                    info = self._directory.find_text(accepted.target or accepted.model).info
                    self._entries[number] = Raw(await asyncio.to_thread(_encoded_entry, asked, info, taken))
                yield event


def _encoded_entry(request: pb.GenerateRequest, info: types.ModelInfo, events: Sequence[pb.GenerateResponse]) -> bytes:
    """The entry of a generation, from all its events."""
    accepted, ends = events[0].accepted, [event.finished for event in events if event.HasField("finished")]
    chunks: list[list[pb.Chunk]] = [[] for _ in ends]
    for event in events:
        if event.HasField("chunk"):
            chunks[event.chunk.index].append(event.chunk)
    samples = [_sample(chunks[end.index], end) for end in sorted(ends, key=lambda end: end.index)]
    asked = json_format.MessageToDict(request, preserving_proto_field_name=True)
    return encode(turn_entry(asked, info, accepted, samples))


def _sample(chunks: Sequence[pb.Chunk], finished: pb.Finished) -> Json:
    builder = MessageBuilder()
    for chunk in chunks:
        builder.add(chunk.parts)
    message = builder.message()
    text = "".join(chunk.text for chunk in chunks) + (message["content"] or "")
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    reason = types.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return sample_entry(text, message.get("reasoning", ""), calls, reason, finished)
