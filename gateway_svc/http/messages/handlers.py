"""The endpoints of the Messages API."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing

from quire.v1 import inference_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.callers.caller import record_request_id
from gateway_svc.http.errors import message_error
from gateway_svc.http.merge import merged
from gateway_svc.http.messages.bodies import MessagesBody, count_request, messages_request
from gateway_svc.http.messages.events import BlockBuilder
from gateway_svc.http.openai.answers import named_event
from gateway_svc.http.replies import EventStream, Read, encoded_events, ignored_headers, json_reply, mark_conversation
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.schedulers.directory import ModelDirectory
from svc_common.errors import ServiceError


class MessagesHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, generation: GenerationPipeline, directory: ModelDirectory, read: Read) -> None:
        self._generation = generation
        self._directory = directory
        self._read = read

    def routes(self) -> list[Route]:
        """All endpoints."""
        return [
            Route("/v1/messages", self.create_message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_message_tokens, methods=["POST"]),
        ]

    async def create_message(self, request: Request) -> Response | EventStream:
        """Answer a chat in Anthropic's format."""
        asked = await self._asked(request, messages_request)
        mark_conversation(request, [asked.request])
        message_id = f"msg_{secrets.token_hex(12)}"
        record_request_id(message_id)
        asked.request.request_id = message_id
        builder = BlockBuilder(message_id, asked.request.model)
        events = merged([self._generation.generate(asked.request)])
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
