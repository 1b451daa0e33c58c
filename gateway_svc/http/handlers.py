"""The endpoints: convert a body to requests, call the same servicer as gRPC, and convert its answer to JSON."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from quire.v1 import inference_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway_svc.directory import ModelDirectory
from gateway_svc.http import answers, bodies, openapi
from gateway_svc.http.answers import PromptParts, Shape, StreamAnswer, WholeAnswer, encode, model_of, sse
from gateway_svc.http.app import IGNORED_HEADER
from gateway_svc.http.bodies import Generation, ignored_header
from gateway_svc.http.errors import error_body
from gateway_svc.http.merge import Numbered, merged, within
from gateway_svc.prompts import PromptReader
from gateway_svc.servicer import InferenceServicer
from svc_common.errors import InvalidRequestError, UnavailableError, shown_error
from svc_common.metrics import quire_version

log = logging.getLogger(__name__)

DEADLINE_MARGIN_S = 0.5
PARSE_BYTES = 16  # parsing this many bytes of JSON takes as long as tokenizing one byte of text
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Handlers:
    """One method per endpoint. All raise QuireError, which the app turns into an answer."""

    def __init__(
        self,
        servicer: InferenceServicer,
        directory: ModelDirectory,
        prompts: PromptReader,
        is_serving: Callable[[], bool],
    ) -> None:
        self._servicer = servicer
        self._directory = directory
        self._prompts = prompts
        self._is_serving = is_serving
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All endpoints."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> Response | EventStream:
        """Answer a chat."""
        asked = await self._read(request, bodies.chat_generation)
        return await self._generate(request, asked, answers.CHAT)

    async def completions(self, request: Request) -> Response | EventStream:
        """Continue one or more prompts."""
        asked = await self._read(request, bodies.completion_generation)
        return await self._generate(request, asked, answers.COMPLETION)

    async def models(self, request: Request) -> Response:
        """All models."""
        listed = await self._servicer.ListModels(pb.ListModelsRequest())
        return _json({"object": "list", "data": [model_of(model, self._created) for model in listed.models]})

    async def model(self, request: Request) -> Response:
        """One model."""
        found = await self._servicer.GetModel(pb.GetModelRequest(model=request.path_params["model"]))
        return _json(model_of(found.model, self._created))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        asked, ignored = await self._read(request, bodies.tokenize_request)
        reply = await self._servicer.Tokenize(asked)
        ids = list(reply.ids)
        strings = list(reply.token_strings) if asked.token_strings else None
        answer = {"count": len(ids), "max_model_len": reply.max_model_len, "tokens": ids, "token_strs": strings}
        return _json(answer, ignored)

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and chat template of a model (`?model=`)."""
        text = self._directory.find_text(request.query_params.get("model", "")).text
        template = None if text.tokenizer is None else text.tokenizer.chat_template
        named = {name: text.special_tokens.get(name) for name in ("eos_token", "bos_token", "pad_token")}
        return _json({**named, "chat_template": template})

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        request.scope["names"] = {"ids": "tokens"}
        asked, ignored = await self._read(request, bodies.detokenize_request)
        return _json({"prompt": (await self._servicer.Detokenize(asked)).text}, ignored)

    async def health(self, request: Request) -> Response:
        """200 while this gateway can take requests."""
        if not self._is_serving():
            raise UnavailableError(
                "this gateway is not serving: it is shutting down, or no model is ready; retry later"
            )
        return _json({"status": "serving"})

    async def openapi(self, request: Request) -> Response:
        """The description of this API in the format OpenAPI 3.1."""
        endpoints = [
            (route.path_format, method, doc_of(route)) for route in self.routes() for method in methods_of(route)
        ]
        return _json(openapi.document(endpoints, quire_version()))

    async def version(self, request: Request) -> Response:
        """The gateway's version."""
        return _json({"version": quire_version()})

    async def _read(self, request: Request, parse: Callable[[bytes], Any]) -> Any:
        """The parsed body. A large body is parsed in a thread."""
        data = await request.body()
        return await self._prompts.run(len(data) // PARSE_BYTES, parse, data)

    async def _generate(self, request: Request, asked: Generation, shape: Shape) -> Response | EventStream:
        request.scope["names"] = asked.names
        self._directory.find_text(asked.model).require_tokenizer("prompt")  # answers are text
        prompts = [await self._parts_of(one, asked) for one in asked.requests]
        answer_id = f"{shape.id_prefix}-{secrets.token_hex(12)}"
        log.debug("HTTP request %s is request %s", request.scope["request_id"], answer_id)
        requests = _with_ids(asked.requests, answer_id)
        events = self._events(requests, asked.timeout_s)
        headers = _ignored(asked.ignored)
        if asked.is_stream:
            stream = _stream(StreamAnswer(asked, shape, answer_id, int(time.time()), prompts), events, request.scope)
            return await EventStream.begun(stream, headers)
        answer = WholeAnswer(asked, shape, answer_id, int(time.time()), prompts)
        async with aclosing(events):
            async for prompt, event in events:
                answer.take(prompt, event)
        return _json(answer.whole(), asked.ignored)

    async def _parts_of(self, request: pb.GenerateRequest, asked: Generation) -> PromptParts:
        """The parts of the prompt that the answer has: text for echo, token ids for return_token_ids."""
        echo = await self._text_of(request) if asked.has_echo else ""
        if not asked.returns_token_ids:
            return PromptParts(echo)
        tokens = await self._servicer.Tokenize(pb.TokenizeRequest(model=request.model, prompt=request.prompt))
        return PromptParts(echo, list(tokens.ids))

    async def _text_of(self, request: pb.GenerateRequest) -> str:
        prompt = request.prompt
        if prompt.HasField("text"):
            return prompt.text
        try:
            text = await self._servicer.Detokenize(
                pb.DetokenizeRequest(
                    model=request.model,
                    ids=prompt.tokens.ids,
                    skip_special_tokens=not request.output.HasField("skip_special_tokens")
                    or request.output.skip_special_tokens,
                )
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace("ids", "prompt", 1), field="prompt") from None
        return text.text

    def _events(self, requests: Sequence[pb.GenerateRequest], timeout_s: float | None) -> Numbered:
        if timeout_s is None:
            return merged([self._servicer.generate(one) for one in requests])
        # The scheduler refuses requests that cannot meet their deadline. Its own deadline is a little later, so that
        # the error is always that of `within`.
        deadline = asyncio.get_running_loop().time() + timeout_s + DEADLINE_MARGIN_S
        return within(timeout_s, merged([self._servicer.generate(one, deadline=deadline) for one in requests]))


class EventStream:
    """A response of server-sent events. It is created after the first event, so a refusal can set the HTTP status."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self._first = first
        self._rest = rest
        self._headers = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **headers}.items()]

    @classmethod
    async def begun(cls, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> EventStream:
        """Wait for the first event. Raises the generator's exception if there is none."""
        return cls(await anext(events), events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _stream(answer: StreamAnswer, events: Numbered, scope: Scope) -> AsyncGenerator[bytes, None]:
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
            yield sse(error_body(shown_error(f"HTTP {scope['path']}", error), scope["names"]))
            return
    yield answer.end()


def _with_ids(requests: Sequence[pb.GenerateRequest], answer_id: str) -> Sequence[pb.GenerateRequest]:
    """Use the answer's id as request id, so that clients can pass it to Abort and find it in logs."""
    for i, request in enumerate(requests):
        request.request_id = answer_id if len(requests) == 1 else f"{answer_id}-{i}"
    return requests


def methods_of(route: Route) -> list[str]:
    return sorted((route.methods or set()) - {"HEAD"})


def doc_of(route: Route) -> str:
    return route.endpoint.__doc__ or ""


def _ignored(names: Sequence[str]) -> dict[str, str]:
    return {IGNORED_HEADER: ignored_header(names)} if names else {}


def _json(value: dict[str, Any], ignored: Sequence[str] = ()) -> Response:
    return Response(encode(value), media_type="application/json", headers=_ignored(ignored))
