"""Builds the requests of `embed`, `score` and `decide` from keyword options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_client.errors import invalid
from quire_client.inputs import Image, Question
from quire_client.requests.generate import assign, prompt_message

EmbedInput = str | Sequence[Any]  # a text, token ids, or the messages of a conversation


class QueueOptions(TypedDict, total=False):
    """Keyword options of `embed` and `score`."""

    request_id: str  # at most 64 characters of [A-Za-z0-9._:-]; default: chosen by the server
    truncate: bool  # cut inputs that are longer than the model accepts; default: they are refused
    priority: int  # lower runs first
    tenant_id: str  # fair queueing


class EmbedOptions(QueueOptions, total=False):
    """Keyword options of `embed`. An unset option takes the model's setting."""

    pooling: str  # last, mean or cls
    normalize: bool  # embeddings have length 1
    dimensions: int  # keep the first numbers
    prompt_name: str  # name of a prompt of the model, which precedes each text, e.g. query


class ScoreOptions(QueueOptions, total=False):
    """Keyword options of `score`."""

    instruction: str  # text that says when a document matches, for models that take an instruction


POOLING = {"last": types_pb2.POOLING_KIND_LAST, "mean": types_pb2.POOLING_KIND_MEAN, "cls": types_pb2.POOLING_KIND_CLS}


def embed_request(inputs: str | Sequence[EmbedInput], model: str, options: EmbedOptions) -> pb.EmbedRequest:
    """An Embed of texts, token ids or conversations."""
    request = pb.EmbedRequest(model=model)
    for item in [inputs] if isinstance(inputs, str) else inputs:
        request.inputs.append(_embed_input(item))
    if (pooling := options.get("pooling")) is not None:
        if pooling not in POOLING:
            raise invalid("pooling", f"pooling must be one of {', '.join(POOLING)}; got {pooling!r}")
        request.pooling = POOLING[pooling]
    for name in ("normalize", "dimensions", "prompt_name", "truncate", "request_id"):
        assign(request, name, options)
    for name in ("priority", "tenant_id"):
        assign(request.scheduling, name, options)
    return request


def _embed_input(item: EmbedInput) -> pb.Prompt:
    if isinstance(item, str):
        return prompt_message(item, None, None, {})
    items = list(item)
    if items and isinstance(items[0], int):
        return prompt_message(None, items, None, {})
    return prompt_message(None, None, items, {})


def score_request(
    query: str | Sequence[str], documents: str | Sequence[str], model: str, options: ScoreOptions
) -> pb.ScoreRequest:
    """A Score of one query against all documents, or of as many queries as documents."""
    found = [documents] if isinstance(documents, str) else list(documents)
    queries = [query] * len(found) if isinstance(query, str) else list(query)
    if len(queries) != len(found):
        raise invalid("query", f"{len(queries)} queries for {len(found)} documents; give one query, or as many")
    request = pb.ScoreRequest(model=model)
    for one, document in zip(queries, found, strict=True):
        request.pairs.add(query=one, document=document)
    for name in ("instruction", "truncate", "request_id"):
        assign(request, name, options)
    for name in ("priority", "tenant_id"):
        assign(request.scheduling, name, options)
    return request


def decide_request(request: pb.GenerateRequest, questions: Iterable[str | Question]) -> pb.DecideRequest:
    """A Decide. A question that is a str is a predicate."""
    decide = pb.DecideRequest(request=request)
    decide.request.ClearField("joins_events")
    if request.output == pb.OutputParams(parse_chat=True):  # nothing that the caller has set
        decide.request.ClearField("output")
    for question in questions:
        asked = Question(question) if isinstance(question, str) else question
        parts = (asked.instructions,) if isinstance(asked.instructions, str) else asked.instructions
        decide.questions.add(choices=_choices(asked.choices), levels=_choices(asked.levels)).instructions.extend(
            pb.ContentPart(image=part.data) if isinstance(part, Image) else pb.ContentPart(text=part) for part in parts
        )
    return decide


def _choices(labels: Sequence[str] | Mapping[str, str]) -> list[pb.Choice]:
    described = labels if isinstance(labels, Mapping) else dict.fromkeys(labels, "")
    return [pb.Choice(label=label, description=words) for label, words in described.items()]
