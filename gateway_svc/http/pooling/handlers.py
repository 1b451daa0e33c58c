"""The endpoints of embeddings and scores."""

from __future__ import annotations

import time
from functools import partial

from quire.v1 import inference_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http.fields import paths_of
from gateway_svc.http.pooling import bodies, cohere
from gateway_svc.http.pooling.bodies import PoolingBody
from gateway_svc.http.pooling.cohere import CohereEmbeddings
from gateway_svc.http.replies import Read, json_reply
from gateway_svc.pipeline.pooling import PoolingPipeline
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory

# Names of fields in a body, for errors.
EMBED_NAMES = {"inputs": "input"}
COHERE_NAMES = {"inputs": "texts", "dimensions": "output_dimension"}


class PoolingHandlers:
    """One method per endpoint. All raise ServiceError."""

    def __init__(self, pooling: PoolingPipeline, directory: ModelDirectory, lane: Lane, read: Read) -> None:
        self._pooling = pooling
        self._directory = directory
        self._lane = lane
        self._read = read

    def routes(self) -> list[Route]:
        """All endpoints."""
        endpoints = {
            "/v1/embeddings": self.embeddings,
            "/v2/embed": self.cohere_embeddings,
            "/pooling": self.pool,
            "/classify": self.classify,
            "/v1/score": self.score,
            "/v1/rerank": self.rerank,
        }
        return [
            Route(path, endpoint, methods=["POST"]) for name, endpoint in endpoints.items() for path in paths_of(name)
        ]

    async def embeddings(self, request: Request) -> Response:
        """Embed one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked = await self._read(request, bodies.embeddings_of)
        reply = await self._pooling.embed(asked.request)
        answer = await self._lane.run(_size(reply), bodies.encoded_embeddings, reply, is_base64=asked.is_base64)
        return json_reply(answer, asked.ignored)

    async def cohere_embeddings(self, request: Request) -> Response:
        """Embed one or more texts, in Cohere's form."""
        request.scope["names"] = COHERE_NAMES
        asked: CohereEmbeddings = await self._read(request, cohere.cohere_embeddings_of)
        prompts = self._directory.find_text(asked.request.model).text.pooling.prompts
        asked.request.prompt_name = asked.prompt_name(prompts)
        reply = await self._pooling.embed(asked.request)
        return json_reply(await self._lane.run(_size(reply), cohere.encoded_cohere, reply, asked), asked.ignored)

    async def pool(self, request: Request) -> Response:
        """The vectors or the class probabilities of one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked: PoolingBody = await self._read(request, bodies.pooling_of)
        reply = await self._pooled(asked)
        encode = partial(bodies.encoded_pooling, is_base64=asked.is_base64, created=int(time.time()))
        return json_reply(await self._lane.run(_size(reply), encode, reply), asked.ignored)

    async def classify(self, request: Request) -> Response:
        """The class of one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked: PoolingBody = await self._read(request, bodies.classify_of)
        reply = await self._pooled(asked)
        labels = self._directory.find_text(reply.model).text.pooling.labels
        answer = partial(bodies.classify_answer, labels=labels, created=int(time.time()))
        return json_reply(await self._lane.run(_size(reply), answer, reply), asked.ignored)

    async def _pooled(self, asked: PoolingBody) -> pb.EmbedResponse:
        facts = self._directory.find_text(asked.request.model).info.pooling
        if asked.task == "classify" or (asked.task is None and facts.num_classes):
            return await self._pooling.classify(asked.request, is_raw=asked.is_raw)
        return await self._pooling.embed(asked.request)

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        asked = await self._read(request, bodies.score_of)
        reply = await self._pooling.score(asked.request)
        return json_reply(bodies.score_answer(reply, int(time.time())), asked.ignored)

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they match a query."""
        asked = await self._read(request, bodies.rerank_of)
        reply = await self._pooling.score(asked.request)
        return json_reply(bodies.rerank_answer(reply, asked), asked.ignored)


def _size(reply: pb.EmbedResponse) -> int:
    """The work of encoding all numbers, as bytes of text."""
    return 8 * sum(len(item.values) for item in reply.embeddings)
