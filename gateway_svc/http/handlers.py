"""The endpoints: convert a body to requests, call the same pipelines as gRPC, and convert its answer to JSON."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Sized
from contextlib import aclosing
from functools import cached_property
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.batches.batches import Batches
from gateway_svc.callers.caller import record_request_id
from gateway_svc.http import openapi
from gateway_svc.http.audio import AudioHandlers
from gateway_svc.http.batches import FILES, FileHandlers, MessageBatchHandlers
from gateway_svc.http.decisions import decision_routes
from gateway_svc.http.json_text import encode
from gateway_svc.http.messages.handlers import MessagesHandlers
from gateway_svc.http.openai import answers, bodies
from gateway_svc.http.openai.answers import AnswerShape, PromptParts, StreamAnswer, WholeAnswer, models_of
from gateway_svc.http.openai.bodies import Generation, with_suffix, with_token_ids
from gateway_svc.http.pooling import PoolingHandlers
from gateway_svc.http.replays import Around, ReplayEntries
from gateway_svc.http.replies import (
    EventStream,
    Numbered,
    answer_id,
    encoded_events,
    ignored_headers,
    json_reply,
    mark_conversation,
    merged,
    within,
)
from gateway_svc.http.responses.handlers import ResponsesHandlers
from gateway_svc.http.rollouts import RolloutHandlers
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.rollouts import RolloutServicer
from gateway_svc.request.prompts.reader import has_images
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer
from svc_common.errors import InvalidRequestError, UnavailableError
from svc_common.observe.metrics import quire_version
from svc_common.tasks import Slices

log = logging.getLogger(__name__)


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusHandlers:
    """One method per endpoint. `streams`: the requests in progress; `metrics_text`: in the Prometheus text format."""

    def __init__(self, is_serving: Callable[[], bool], streams: Sized, metrics_text: Callable[[], bytes]) -> None:
        self._is_serving = is_serving
        self._streams = streams
        self._metrics_text = metrics_text

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 while every process of this gateway can take requests."""
        if not self._is_serving():
            raise UnavailableError(
                "this gateway is not serving: it is shutting down, no model is ready, or one of its processes is not "
                "ready; retry later"
            )
        return json_reply({"status": "serving"})

    async def load(self, request: Request) -> Response:
        """The number of requests in progress in this process."""
        return json_reply({"server_load": len(self._streams)})

    async def metrics(self, request: Request) -> Response:
        """The metrics of this process in the Prometheus text format."""
        return Response(self._metrics_text(), media_type=METRICS_TYPE)

    async def version(self, request: Request) -> Response:
        """The gateway's version."""
        return json_reply({"version": quire_version()})


DEADLINE_MARGIN_S = 0.5
PARSE_BYTES = 16  # parsing this many bytes of JSON takes as long as tokenizing one byte of text


class Handlers:
    """One method per endpoint. All raise ServiceError, which the app turns into an answer."""

    def __init__(
        self,
        servicer: InferenceServicer,
        directory: ModelDirectory,
        lane: Lane,
        status: StatusHandlers,
        admin: AdminServicer,
        rollouts: RolloutServicer,
        batches: Batches,
    ) -> None:
        self._servicer = servicer
        self._directory = directory
        self._lane = lane
        self._status = status
        self._created = int(time.time())
        self._responses = ResponsesHandlers(servicer.generation, directory, self._read)
        self._messages = MessagesHandlers(servicer.generation, directory, self._read)
        self._pooling = PoolingHandlers(servicer.pooling, directory, lane, self._read)
        self._batches = FileHandlers(batches, self._read), MessageBatchHandlers(batches, self._read)
        self._audio = AudioHandlers(servicer.generation, lane)
        self._rollouts = RolloutHandlers(rollouts, admin, directory, servicer.generation.limits, self._read)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/inference/v1/generate", self.rollouts, methods=["POST"]),
            *self._responses.routes(),
            *self._messages.routes(),
            *(route for handlers in self._batches for route in handlers.routes()),
            *self._audio.routes(),
            *self._pooling.routes(),
            *decision_routes(self._servicer.decisions, self._lane, self._read),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            *self._status.routes(),
            *self._rollouts.routes(),
        ]

    @property
    def streamed_paths(self) -> frozenset[str]:
        """The endpoints whose bodies may be larger than others."""
        return frozenset((FILES,))

    @property
    def operator_paths(self) -> frozenset[str]:
        """The endpoints that are for operators."""
        return frozenset(route.path for route in self._rollouts.routes())

    async def chat_completions(self, request: Request) -> Response | EventStream:
        """Answer a chat."""
        asked = await self._read(request, bodies.chat_generation)
        return await self._generate(request, asked, answers.CHAT)

    async def completions(self, request: Request) -> Response | EventStream:
        """Continue one or more prompts."""
        asked: Generation = await self._read(request, bodies.completion_generation)
        if asked.suffix:
            tokenizer = self._directory.find_text(asked.model).require_tokenizer("suffix")
            asked = with_suffix(asked, tokenizer.has_token)
        return await self._generate(request, asked, answers.COMPLETION)

    async def rollouts(self, request: Request) -> Response | EventStream:
        """Continue token ids; the answer has token ids, their log probabilities and the seed."""
        asked: Generation = await self._read(request, bodies.rollout_generation)
        return await self._generate(request, asked, answers.ROLLOUT)

    async def models(self, request: Request) -> Response:
        """All models."""
        listed = await self._servicer.ListModels(pb.ListModelsRequest())
        return json_reply({"object": "list", "data": [e for m in listed.models for e in models_of(m, self._created)]})

    async def model(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["model"]
        found = await self._servicer.GetModel(pb.GetModelRequest(model=name))
        entries = models_of(found.model, self._created)
        return json_reply(next((entry for entry in entries if entry["id"] == name), entries[0]))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        asked, ignored = await self._read(request, bodies.tokenize_request)
        reply = await self._servicer.Tokenize(asked)
        has_strings = asked.token_strings
        return json_reply(await self._lane.run(len(reply.ids), answers.encoded_tokens, reply, has_strings), ignored)

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and chat template of a model (`?model=`)."""
        text = self._directory.find_text(request.query_params.get("model", "")).text
        template = None if text.tokenizer is None else text.tokenizer.chat_template
        named = {name: text.special_tokens.get(name) for name in ("eos_token", "bos_token", "pad_token")}
        return json_reply({**named, "chat_template": template})

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        request.scope["names"] = {"ids": "tokens"}
        asked, ignored = await self._read(request, bodies.detokenize_request)
        return json_reply({"prompt": (await self._servicer.Detokenize(asked)).text}, ignored)

    async def openapi(self, request: Request) -> Response:
        """The description of this API in the format OpenAPI 3.1."""
        return Response(self._description, media_type="application/json")

    @cached_property
    def _description(self) -> bytes:
        endpoints = [
            (route.path_format, method, doc_of(route)) for route in self.routes() for method in methods_of(route)
        ]
        return encode(openapi.document(endpoints, quire_version()))

    async def _read(self, request: Request, parse: Callable[[bytes], Any]) -> Any:
        """The parsed body. A large body is parsed in a thread."""
        data = await request.body()
        return await self._lane.run(len(data) // PARSE_BYTES, parse, data)

    async def _generate(self, request: Request, asked: Generation, shape: AnswerShape) -> Response | EventStream:
        request.scope["names"] = asked.names
        mark_conversation(request, asked.requests)
        self._servicer.generation.streams.check_room(num_calls=len(asked.requests))
        if self._directory.text_of(asked.requests[0]).text.tokenizer is None:
            asked = with_token_ids(asked)
        prompts, slices = list[PromptParts](), Slices()
        for one in asked.requests:
            prompts.append(await self._parts_of(one, asked))
            await slices.rest()
        own_id = await answer_id(request, f"{shape.id_prefix}-")
        log.debug("HTTP request %s is request %s", request.scope["request_id"], own_id)
        record_request_id(own_id)
        requests = _with_ids(asked.requests, own_id)
        replays = ReplayEntries(request, self._directory)
        events = self._events(requests, asked.timeout_s, replays.around)
        headers = ignored_headers(asked.ignored)
        if asked.is_stream:
            stream = StreamAnswer(asked, shape, own_id, int(time.time()), prompts)
            stream.late_fields = replays.fields
            return await EventStream.begun(encoded_events(stream, events, request.scope), headers)
        answer = WholeAnswer(asked, shape, own_id, int(time.time()), prompts)
        answer.late_fields = replays.fields
        async with aclosing(events):
            async for prompt, event in events:
                answer.take(prompt, event)
                await slices.rest()
        return json_reply(await self._lane.run(answer.num_bytes, answer.encoded), asked.ignored)

    async def _parts_of(self, request: pb.GenerateRequest, asked: Generation) -> PromptParts:
        """The parts of the prompt that the answer repeats: text for echo, token ids for return_token_ids."""
        prompt, cut, ids = request.prompt, request.truncate_prompt_tokens, None
        has_ids = asked.returns_token_ids and not (prompt.HasField("embeddings") or has_images(prompt.chat))
        if has_ids or (cut and asked.has_echo):
            model = self._directory.text_of(request)
            ids = list((await self._servicer.tokenize(pb.TokenizeRequest(prompt=prompt), model)).ids)
            if cut and len(ids) > cut:  # the rest is not computed
                ids = ids[-cut:]
                prompt = pb.Prompt(tokens=types.TokenIds(ids=ids))
        echo = await self._text_of(request, prompt) if asked.has_echo else ""
        return PromptParts(echo, ids if has_ids else None)

    async def _text_of(self, request: pb.GenerateRequest, prompt: pb.Prompt) -> str:
        if prompt.HasField("text"):
            return prompt.text
        try:
            text = await self._servicer.detokenize(
                pb.DetokenizeRequest(
                    ids=prompt.tokens.ids,
                    skip_special_tokens=not request.output.HasField("skip_special_tokens")
                    or request.output.skip_special_tokens,
                ),
                self._directory.text_of(request),
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace("ids", "prompt", 1), field="prompt") from None
        return text.text

    def _events(self, requests: Sequence[pb.GenerateRequest], timeout_s: float | None, around: Around) -> Numbered:
        generate = self._servicer.generation.generate
        if timeout_s is None:
            return merged([around(one, generate(one)) for one in requests])
        # The scheduler refuses requests that cannot meet their deadline. Its deadline is later than the timeout, so
        # that `within` always raises the error.
        deadline = asyncio.get_running_loop().time() + timeout_s + DEADLINE_MARGIN_S
        return within(timeout_s, merged([around(one, generate(one, deadline=deadline)) for one in requests]))


def _with_ids(requests: Sequence[pb.GenerateRequest], answer_id: str) -> Sequence[pb.GenerateRequest]:
    """Use the answer's id as request id, so that clients can pass it to Abort and find it in logs."""
    for i, request in enumerate(requests):
        request.request_id = answer_id if len(requests) == 1 else f"{answer_id}-{i}"
    return requests


def methods_of(route: Route) -> list[str]:
    return sorted((route.methods or set()) - {"HEAD"})


def doc_of(route: Route) -> str:
    return route.endpoint.__doc__ or ""
