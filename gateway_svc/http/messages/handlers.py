"""The endpoints of the Messages API."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.answer.open_streams import FAILED
from gateway_svc.callers.caller import record_request_id
from gateway_svc.http.errors import error_of_sample, message_error
from gateway_svc.http.json_text import Json, named_event
from gateway_svc.http.messages.bodies import MessagesBody, count_request, messages_request
from gateway_svc.http.replays import ReplayEntries
from gateway_svc.http.replies import (
    EventStream,
    Read,
    answer_id,
    encoded_events,
    ignored_headers,
    json_reply,
    mark_conversation,
    merged,
)
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.text.calls.values import parsed
from svc_common.errors import ServiceError


class BlockBuilder:
    """Builds one message. Blocks are numbered in the order in which they begin, and one ends before the next begins."""

    late_fields: Callable[[], Json] = dict  # fields that are known after the last event

    def __init__(self, message_id: str, model: str) -> None:
        self._message: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(0, 0, 0),
        }
        self._blocks: list[Json] = []
        self._texts: list[list[str]] = []
        self._item = -1  # index of the open block
        self._num_prompt = 0

    def take(self, event: pb.GenerateResponse) -> Iterator[Json]:
        """The events for an event of the generation. Raises ServiceError if it failed."""
        if event.HasField("accepted"):
            self._num_prompt = event.accepted.prompt_tokens
            self._message |= {"model": event.accepted.model, "usage": _usage(self._num_prompt, 0, 0)}
            yield {"type": "message_start", "message": dict(self._message)}
        elif event.HasField("chunk"):
            for part in event.chunk.parts:
                yield from self._add(part)
        elif event.HasField("finished"):
            yield from self._finish(event.finished)

    def whole(self) -> Json:
        """The message, after the last event."""
        content = [_filled(block, "".join(texts)) for block, texts in zip(self._blocks, self._texts, strict=True)]
        return {**self._message, "content": content, **self.late_fields()}

    def _add(self, part: pb.AnswerPart) -> Iterator[Json]:
        kind = part.WhichOneof("kind")
        if part.item != self._item:
            yield from self._close()
            self._item = part.item
            self._blocks.append(_empty_block(part, self._message["id"]))
            self._texts.append([])
            shown = {**self._blocks[-1], "signature": ""} if kind == "reasoning" else self._blocks[-1]
            yield self._event("content_block_start", content_block=shown)
        text, delta = _delta(part)
        if text:
            self._texts[-1].append(text)
            yield self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Json]:
        """The last events of the open block, if there is one."""
        if self._item < 0:
            return
        self._item = -1
        if "signature" in self._blocks[-1]:
            delta = {"type": "signature_delta", "signature": self._blocks[-1]["signature"]}
            yield self._event("content_block_delta", delta=delta)
        yield self._event("content_block_stop")

    def _finish(self, finished: pb.Finished) -> Iterator[Json]:
        if finished.reason in FAILED:
            raise error_of_sample(finished.message)
        yield from self._close()
        used = finished.usage
        usage = _usage(self._num_prompt, used.cached_tokens, used.output_tokens)
        if used.reasoning_tokens:
            usage["output_tokens_details"] = {"thinking_tokens": used.reasoning_tokens}
        end = self._end(finished)
        self._message |= {**end, "usage": usage}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop", **self.late_fields()}

    def _end(self, finished: pb.Finished) -> Json:
        if finished.HasField("stop"):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
        reason = "max_tokens" if finished.reason == types.FINISH_REASON_LENGTH else "end_turn"
        is_call = reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if is_call else reason, "stop_sequence": None}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _usage(num_prompt: int, num_cached: int, num_output: int) -> Json:
    """Token counts in Anthropic's meaning: the input tokens are those that were not in the cache."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def _empty_block(part: pb.AnswerPart, message_id: str) -> Json:
    """The block that a part begins. Clients require a signature of thinking; it is not checked when it comes back."""
    if part.HasField("tool_call"):
        return {"type": "tool_use", "id": part.tool_call.id, "name": part.tool_call.name, "input": {}}
    if part.HasField("reasoning"):
        return {"type": "thinking", "thinking": "", "signature": message_id}
    return {"type": "text", "text": "", "citations": None}


def _delta(part: pb.AnswerPart) -> tuple[str, Json]:
    if part.HasField("tool_call"):
        return part.tool_call.arguments, {"type": "input_json_delta", "partial_json": part.tool_call.arguments}
    if part.HasField("reasoning"):
        return part.reasoning, {"type": "thinking_delta", "thinking": part.reasoning}
    return part.content, {"type": "text_delta", "text": part.content}


def _filled(block: Json, text: str) -> Json:
    """A block with its text. Arguments that are no object, such as those that are cut off, are one member of it."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    try:
        value = parsed(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return {**block, "input": value if isinstance(value, dict) else {"arguments": text}}


class MessagesHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, generation: GenerationPipeline, directory: ModelDirectory, read: Read) -> None:
        self._generation = generation
        self._directory = directory
        self._read = read

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create_message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_message_tokens, methods=["POST"]),
        ]

    async def create_message(self, request: Request) -> Response | EventStream:
        """Answer a chat in Anthropic's format."""
        asked = await self._asked(request, messages_request)
        mark_conversation(request, [asked.request])
        message_id = await answer_id(request, "msg_")
        record_request_id(message_id)
        asked.request.request_id = message_id
        builder = BlockBuilder(message_id, asked.request.model)
        replays = ReplayEntries(request, self._directory)
        builder.late_fields = replays.fields
        events = merged([replays.around(asked.request, self._generation.generate(asked.request))])
        if asked.is_stream:
            data = encoded_events(MessageStream(builder), events, request.scope)
            return await EventStream.begun(data, ignored_headers(asked.ignored))
        async with aclosing(events):
            async for _, event in events:
                deque(builder.take(event), maxlen=0)
        return json_reply(builder.whole(), asked.ignored)

    async def count_message_tokens(self, request: Request) -> Response:
        """The number of tokens of a chat's prompt."""
        asked = await self._asked(request, count_request)
        return json_reply({"input_tokens": await self._generation.count_tokens(asked.request)}, asked.ignored)

    async def _asked(self, request: Request, parse: Callable[[bytes], MessagesBody]) -> MessagesBody:
        asked: MessagesBody = await self._read(request, parse)
        request.scope["names"] = asked.names
        self._directory.find_text(asked.request.model).require_tokenizer("messages")
        return asked


class MessageStream:
    """A message as server-sent events."""

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder = builder

    def take(self, prompt: int, event: pb.GenerateResponse) -> bytes:
        """The data for an event. Raises ServiceError if the generation failed."""
        return b"".join(map(named_event, self._builder.take(event)))

    def failed(self, error: ServiceError, names: Mapping[str, str]) -> bytes:
        """The last event of a stream that fails."""
        return named_event(message_error(error, names))

    def end(self) -> bytes:
        """Nothing: the last event ends the stream."""
        return b""
