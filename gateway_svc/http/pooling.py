"""Endpoints of embeddings and scores, with their bodies and answers: OpenAI's, vLLM's, Cohere's and Jina's."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, paths_of, set_parameters
from gateway_svc.http.json_text import (
    encode,
    encoded_list,
    flag,
    invalid,
    list_of,
    number_of,
    one_of,
    shown,
    text,
    text_of,
)
from gateway_svc.http.openai.bodies import body_of, pooled_inputs
from gateway_svc.http.replies import Read, json_reply
from gateway_svc.pipeline.pooling import PoolingPipeline
from gateway_svc.request.field_errors import check_pooled_cost
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from request_fields.fields import MAX_UINT32, FieldError
from svc_common.errors import InvalidRequestError

POOLING = {"last": types.POOLING_KIND_LAST, "mean": types.POOLING_KIND_MEAN, "cls": types.POOLING_KIND_CLS}
FORMATS = ("float", "base64")
TASKS = ("embed", "classify")


@dataclass(frozen=True, slots=True)
class PoolingBody:
    """A body of /v1/embeddings, /pooling or /classify. `task`: of TASKS; None: what the model was made for."""

    request: pb.EmbedRequest
    task: str | None
    ignored: list[str]
    is_base64: bool = False
    is_raw: bool = False  # outputs of the classification head instead of probabilities


@dataclass(frozen=True, slots=True)
class Scores:
    """A body of /v1/score or /v1/rerank. `documents`: those to return; none for /v1/score."""

    request: pb.ScoreRequest
    ignored: list[str]
    top_n: int = 0
    documents: Sequence[str] = ()


def embeddings_of(data: bytes) -> PoolingBody:
    """Parse a body of /v1/embeddings. Raises InvalidRequestError."""
    return _pooling_body(data, fields.EMBEDDINGS, "embed")


def pooling_of(data: bytes) -> PoolingBody:
    """Parse a body of /pooling. Raises InvalidRequestError."""
    return _pooling_body(data, fields.POOLING, None)


def classify_of(data: bytes) -> PoolingBody:
    """Parse a body of /classify. Raises InvalidRequestError."""
    return _pooling_body(data, fields.CLASSIFY, "classify")


def _pooling_body(data: bytes, rows: tuple[fields.BodyField, ...], task: str | None) -> PoolingBody:
    """A body with these fields."""
    names, given = {row.name for row in rows}, body_of(data)
    body = {name: value for name, value in given.items() if name in names and value is not None}
    request = pb.EmbedRequest(
        model=text(body, "model"),
        inputs=pooled_inputs(body.get("input")),
        prompt_name=text(body, "prompt_name"),
        truncate=_truncates(body),
    )
    set_parameters(fields.POOLED, body, request)
    if "pooling" in body:
        request.pooling = POOLING[one_of("pooling", body["pooling"], POOLING)]
    if "normalize" in body:
        request.normalize = flag(body, "normalize", default=True)
    if "dimensions" in body:
        request.dimensions = positive(body, "dimensions")
    if "task" in body:
        task = one_of("task", body["task"], TASKS)
    is_base64 = one_of("encoding_format", body.get("encoding_format") or "float", FORMATS) == "base64"
    is_raw = not flag(body, "use_activation", default=True)
    return PoolingBody(request, task, ignored_names(rows, given), is_base64, is_raw)


def score_of(data: bytes) -> Scores:
    """Parse a body of /v1/score: one or more `text_1` against one or more `text_2`. Raises InvalidRequestError."""
    body = body_of(data)
    first, second = _texts("text_1", body.get("text_1")), _texts("text_2", body.get("text_2"))
    if len(first) not in (1, len(second)):
        raise invalid("text_1", f"has {len(first)} texts and text_2 has {len(second)}; send one, or as many")
    request = _score_request(body, "text_2", first * (len(second) // len(first)), second)
    return Scores(request, ignored_names(fields.SCORE, body))


def rerank_of(data: bytes) -> Scores:
    """Parse a body of /v1/rerank, in the shape of Jina and Cohere. Raises InvalidRequestError."""
    body = body_of(data)
    query = text_of("query", body.get("query"))
    given = body.get("documents")
    if not isinstance(given, list) or not given:
        raise invalid("documents", "must be a list of strings, or of objects with `text`")
    documents = [_document(f"documents[{i}]", item) for i, item in enumerate(given)]
    top_n = positive(body, "top_n") if body.get("top_n") is not None else 0
    kept = documents if flag(body, "return_documents", default=True) else ()
    request = _score_request(body, "documents", [query] * len(documents), documents)
    return Scores(request, ignored_names(fields.RERANK, body), top_n, kept)


def encoded_embeddings(reply: pb.EmbedResponse, *, is_base64: bool) -> bytes:
    """The answer in OpenAI's shape."""
    data = [
        {"object": "embedding", "index": i, "embedding": (as_base64 if is_base64 else encoded_list)(item.values)}
        for i, item in enumerate(reply.embeddings)
    ]
    return encode({**_head_of(reply), "data": data})


def encoded_pooling(reply: pb.EmbedResponse, *, is_base64: bool, created: int) -> bytes:
    """The answer of /pooling, as vLLM's."""
    data = [
        {"index": i, "object": "pooling", "data": (as_base64 if is_base64 else encoded_list)(item.values)}
        for i, item in enumerate(reply.embeddings)
    ]
    return encode({**_head_of(reply), "created": created, "data": data})


def classify_answer(reply: pb.EmbedResponse, labels: Mapping[int, str], created: int) -> dict[str, Any]:
    """The answer of /classify, as vLLM's: the class with the largest number, and the numbers of all classes."""
    data = []
    for i, item in enumerate(reply.embeddings):
        numbers = list(item.values)
        best = max(range(len(numbers)), key=numbers.__getitem__)
        label = labels.get(best, f"LABEL_{best}")
        data.append({"index": i, "label": label, "probs": numbers, "num_classes": len(numbers)})
    return {**_head_of(reply), "created": created, "data": data}


def _head_of(reply: pb.EmbedResponse | pb.ScoreResponse) -> dict[str, Any]:
    if isinstance(reply, pb.EmbedResponse):
        used = sum(item.prompt_tokens for item in reply.embeddings)
    else:
        used = sum(reply.prompt_tokens)
    usage = {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0}
    return {"id": reply.request_id, "object": "list", "model": reply.model, "usage": usage}


def score_answer(reply: pb.ScoreResponse, created: int) -> dict[str, Any]:
    """The answer of /v1/score, as vLLM's."""
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(reply.scores)]
    return {**_head_of(reply), "created": created, "data": data}


def rerank_answer(reply: pb.ScoreResponse, asked: Scores) -> dict[str, Any]:
    """The documents by descending score; equal ones by index."""
    order = sorted(range(len(reply.scores)), key=lambda i: (-reply.scores[i], i))
    results = []
    for i in order[: asked.top_n or len(order)]:
        result: dict[str, Any] = {"index": i, "relevance_score": reply.scores[i]}
        if asked.documents:
            result["document"] = {"text": asked.documents[i]}
        results.append(result)
    usage = {"total_tokens": sum(reply.prompt_tokens), "prompt_tokens": sum(reply.prompt_tokens)}
    return {"id": reply.request_id, "model": reply.model, "usage": usage, "results": results}


def as_base64(values: Sequence[float]) -> str:
    """float32, little-endian, as base64."""
    return base64.b64encode(array("f", values).tobytes()).decode()


def _score_request(
    body: Mapping[str, Any], field: str, queries: Sequence[str], documents: Sequence[str]
) -> pb.ScoreRequest:
    try:
        check_pooled_cost(field, len(documents), sum(map(len, queries)) + sum(map(len, documents)))
    except FieldError as error:
        raise InvalidRequestError(str(error), field=error.field) from None
    pairs = zip(queries, documents, strict=True)
    request = pb.ScoreRequest(
        model=text(body, "model"),
        pairs=[pb.TextPair(query=query, document=document) for query, document in pairs],
        instruction=text(body, "instruction"),
        truncate=_truncates(body),
    )
    set_parameters(fields.POOLED, body, request)
    return request


def _truncates(body: Mapping[str, Any]) -> bool:
    """`truncate`, or vLLM's `truncate_prompt_tokens` with -1: the model's limit."""
    tokens = body.get("truncate_prompt_tokens")
    if tokens not in (None, -1):
        raise invalid("truncate_prompt_tokens", f"is {shown(tokens)}; must be -1, the limit of the model")
    return flag(body, "truncate", default=False) or tokens == -1


def positive(body: Mapping[str, Any], name: str) -> int:
    """A positive integer of a body. Raises InvalidRequestError."""
    value = number_of(body[name])
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_UINT32:
        raise invalid(name, f"is {shown(value)}; must be a positive integer")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, list) and value:
        return [text_of(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return [text_of(name, value)]


def _document(name: str, value: Any) -> str:
    return text_of(f"{name}.text", value.get("text")) if isinstance(value, dict) else text_of(name, value)


INPUT_TYPES: Mapping[str, Sequence[str]] = {  # names of a model's prompts for each type, the first one that it has
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
TRUNCATIONS = {"NONE": False, "END": True}


@dataclass(frozen=True, slots=True)
class CohereEmbeddings:
    """A body of /v2/embed. The request has no prompt_name yet: the model's prompts decide."""

    request: pb.EmbedRequest
    input_type: str
    types: Sequence[str]
    ignored: list[str]

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.request.inputs]

    def prompt_name(self, prompts: Mapping[str, str]) -> str:
        """The prompt for the type of input; "" if the model has none for it."""
        names = INPUT_TYPES.get(self.input_type, (self.input_type,))
        return next((name for name in names if name in prompts), "")


def cohere_embeddings_of(data: bytes) -> CohereEmbeddings:
    """Parse a body of /v2/embed. Raises InvalidRequestError."""
    body = body_of(data)
    given = list_of("texts", body.get("texts"), "strings")
    texts = [text_of(f"texts[{i}]", item) for i, item in enumerate(given)]
    cut = one_of("truncate", body.get("truncate") or "END", TRUNCATIONS)
    types = ["float"] if body.get("embedding_types") is None else body["embedding_types"]
    if not isinstance(types, list) or not types:
        raise invalid("embedding_types", f"is {shown(types)}; must be a list of {', '.join(ENCODINGS)}")
    kinds = [one_of(f"embedding_types[{i}]", kind, ENCODINGS) for i, kind in enumerate(types)]
    request = pb.EmbedRequest(
        model=text(body, "model"), inputs=pooled_inputs(texts, "texts"), truncate=TRUNCATIONS[cut]
    )
    set_parameters(fields.COHERE_EMBED, body, request)
    if body.get("output_dimension") is not None:
        request.dimensions = positive(body, "output_dimension")
    return CohereEmbeddings(
        request, text(body, "input_type"), list(dict.fromkeys(kinds)), ignored_names(fields.COHERE_EMBED, body)
    )


def encoded_cohere(reply: pb.EmbedResponse, asked: CohereEmbeddings) -> bytes:
    """The answer in Cohere's shape: the embeddings by type."""
    used = sum(item.prompt_tokens for item in reply.embeddings)
    embeddings = {kind: [ENCODINGS[kind](item.values) for item in reply.embeddings] for kind in asked.types}
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": used}}
    head = {"id": reply.request_id, "response_type": "embeddings_by_type", "texts": asked.texts, "meta": meta}
    return encode({**head, "embeddings": embeddings})


def _bits(values: Sequence[float]) -> list[int]:
    """One bit per value, 1 if it is positive, the first one in the highest bit of a byte."""
    bits = "".join("1" if value > 0 else "0" for value in values)
    return [int(bits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(bits), 8)]


ENCODINGS: Mapping[str, Callable[[Sequence[float]], Any]] = {
    "float": encoded_list,
    "base64": as_base64,
    "ubinary": _bits,
    "binary": lambda values: [byte - 128 for byte in _bits(values)],
}


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
        asked = await self._read(request, embeddings_of)
        reply = await self._pooling.embed(asked.request)
        answer = await self._lane.run(_size(reply), encoded_embeddings, reply, is_base64=asked.is_base64)
        return json_reply(answer, asked.ignored)

    async def cohere_embeddings(self, request: Request) -> Response:
        """Embed one or more texts, in Cohere's form."""
        request.scope["names"] = COHERE_NAMES
        asked: CohereEmbeddings = await self._read(request, cohere_embeddings_of)
        prompts = self._directory.text_of(asked.request).text.pooling.prompts
        asked.request.prompt_name = asked.prompt_name(prompts)
        reply = await self._pooling.embed(asked.request)
        return json_reply(await self._lane.run(_size(reply), encoded_cohere, reply, asked), asked.ignored)

    async def pool(self, request: Request) -> Response:
        """The vectors or the class probabilities of one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked: PoolingBody = await self._read(request, pooling_of)
        reply = await self._pooled(asked)
        encode = partial(encoded_pooling, is_base64=asked.is_base64, created=int(time.time()))
        return json_reply(await self._lane.run(_size(reply), encode, reply), asked.ignored)

    async def classify(self, request: Request) -> Response:
        """The class of one or more inputs."""
        request.scope["names"] = EMBED_NAMES
        asked: PoolingBody = await self._read(request, classify_of)
        reply = await self._pooled(asked)
        labels = self._directory.find(reply.target or reply.model).text.pooling.labels
        answer = partial(classify_answer, labels=labels, created=int(time.time()))
        return json_reply(await self._lane.run(_size(reply), answer, reply), asked.ignored)

    async def _pooled(self, asked: PoolingBody) -> pb.EmbedResponse:
        facts = self._directory.text_of(asked.request).info.pooling
        if asked.task == "classify" or (asked.task is None and facts.num_classes):
            return await self._pooling.classify(asked.request, is_raw=asked.is_raw)
        return await self._pooling.embed(asked.request)

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        asked = await self._read(request, score_of)
        reply = await self._pooling.score(asked.request)
        return json_reply(score_answer(reply, int(time.time())), asked.ignored)

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they match a query."""
        asked = await self._read(request, rerank_of)
        reply = await self._pooling.score(asked.request)
        return json_reply(rerank_answer(reply, asked), asked.ignored)


def _size(reply: pb.EmbedResponse) -> int:
    """The work of encoding all numbers, as bytes of text."""
    return 8 * sum(len(item.values) for item in reply.embeddings)
