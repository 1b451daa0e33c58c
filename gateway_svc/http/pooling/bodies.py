"""Bodies and answers of /v1/embeddings, /v1/score, /v1/rerank, /pooling and /classify."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, set_parameters
from gateway_svc.http.json_text import encode, encoded_list
from gateway_svc.http.openai.bodies import body_of, pooled_inputs
from gateway_svc.http.values import flag, invalid, number_of, one_of, shown, text, text_of
from gateway_svc.request.field_errors import check_pooled_cost
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
    body = body_of(data)
    request = _embed_request(body)
    if (pooling := body.get("pooling")) is not None:
        request.pooling = POOLING[one_of("pooling", pooling, POOLING)]
    _set_vector(body, request)
    return PoolingBody(request, "embed", ignored_names(fields.EMBEDDINGS, body), _is_base64(body))


def _is_base64(body: Mapping[str, Any]) -> bool:
    return one_of("encoding_format", body.get("encoding_format") or "float", FORMATS) == "base64"


def _embed_request(body: Mapping[str, Any]) -> pb.EmbedRequest:
    request = pb.EmbedRequest(
        model=text(body, "model"),
        inputs=pooled_inputs(body.get("input")),
        prompt_name=text(body, "prompt_name"),
        truncate=_truncates(body),
    )
    set_parameters(fields.POOLED, body, request)
    return request


def _set_vector(body: Mapping[str, Any], request: pb.EmbedRequest) -> None:
    if body.get("normalize") is not None:
        request.normalize = flag(body, "normalize", default=True)
    if body.get("dimensions") is not None:
        request.dimensions = positive(body, "dimensions")


def pooling_of(data: bytes) -> PoolingBody:
    """Parse a body of /pooling. Raises InvalidRequestError."""
    body = body_of(data)
    task = None if body.get("task") is None else one_of("task", body["task"], TASKS)
    request = _embed_request(body)
    _set_vector(body, request)
    is_raw = not flag(body, "use_activation", default=True)
    return PoolingBody(request, task, ignored_names(fields.POOLING, body), _is_base64(body), is_raw)


def classify_of(data: bytes) -> PoolingBody:
    """Parse a body of /classify. Raises InvalidRequestError."""
    body = body_of(data)
    is_raw = not flag(body, "use_activation", default=True)
    return PoolingBody(_embed_request(body), "classify", ignored_names(fields.CLASSIFY, body), is_raw=is_raw)


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
