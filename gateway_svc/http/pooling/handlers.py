"""The endpoints of embeddings and scores."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http.fields import paths_of
from gateway_svc.http.pooling import bodies
from gateway_svc.http.replies import Read, json_reply
from gateway_svc.pipeline.pooling import PoolingPipeline
from gateway_svc.request.threads import Lane

EMBED_NAMES = {"inputs": "input"}  # names of fields in a body, for errors


class PoolingHandlers:
    """One method per endpoint. All raise QuireError."""

    def __init__(self, pooling: PoolingPipeline, lane: Lane, read: Read) -> None:
        self._pooling = pooling
        self._lane = lane
        self._read = read

    def routes(self) -> list[Route]:
        """All endpoints."""
        endpoints = {"/v1/embeddings": self.embeddings, "/v1/score": self.score, "/v1/rerank": self.rerank}
        return [
            Route(path, endpoint, methods=["POST"]) for name, endpoint in endpoints.items() for path in paths_of(name)
        ]

    async def embeddings(self, request: Request) -> Response:
        """Embed one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked = await self._read(request, bodies.embeddings_of)
        reply = await self._pooling.embed(asked.request)
        size = 8 * sum(len(item.values) for item in reply.embeddings)
        answer = await self._lane.run(size, bodies.encoded_embeddings, reply, is_base64=asked.is_base64)
        return json_reply(answer, asked.ignored)

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
