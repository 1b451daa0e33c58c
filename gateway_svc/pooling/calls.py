"""Embed and Score, for gRPC and HTTP."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul

from quire.internal.v1 import pooling_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import OpenStream, OpenStreams
from gateway_svc.callers.caller import current_caller
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.metrics import GatewayMetrics, RequestMeter
from gateway_svc.operators.audit.entry import note, note_generation
from gateway_svc.pooling.inputs import InputReader, PooledInput
from gateway_svc.pooling.runs import pooled_numbers, scheduler_requests
from gateway_svc.request import validation
from gateway_svc.request.field_errors import FieldErrors, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import check_determinism
from gateway_svc.request.prompts.readers import PromptReaders, check_prompt
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher, Hints
from request_fields import checks
from svc_common.errors import NotConfiguredError
from svc_common.logs import current_request_id

MAX_INPUTS = 2048
MAX_PAIRS = 1024

Salt = Callable[[pb.SchedulingParams], str]


class PooledCalls:
    """Validates, tokenizes, submits and waits. Calls in progress are counted among `streams`."""

    def __init__(
        self,
        directory: ModelDirectory,
        dispatcher: Dispatcher,
        prompts: PromptReaders,
        metrics: GatewayMetrics,
        limits: KeyLimits,
        streams: OpenStreams,
        cache_salt: Salt,
        request_limits: validation.RequestLimits,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._metrics = metrics
        self._limits = limits
        self._streams = streams
        self._cache_salt = cache_salt
        self._request_limits = request_limits

    async def embed(self, request: pb.EmbedRequest, deadline: float | None = None) -> pb.EmbedResponse:
        """One vector per input."""
        _check_count("inputs", len(request.inputs), MAX_INPUTS)
        for i, prompt in enumerate(request.inputs):
            check_prompt(prompt, f"inputs[{i}]")
        model = self._model(request)
        pooling = embed_pooling(request, model.info)
        with self._call(request, model, deadline) as call:
            reader = InputReader(self._prompts, model, truncates=request.truncate)
            inputs = await reader.inputs(request.inputs, request.prompt_name)
            numbers = await call.run(inputs, pooling)
        vectors = [
            pb.Embedding(values=values, prompt_tokens=len(item.ids))
            for values, item in zip(numbers, inputs, strict=True)
        ]
        return pb.EmbedResponse(
            request_id=call.request_id, model=model.name, revision=model.info.revision, embeddings=vectors
        )

    async def score(self, request: pb.ScoreRequest, deadline: float | None = None) -> pb.ScoreResponse:
        """One score per pair: of the classification head, of the answer yes, or the cosine of both embeddings."""
        _check_count("pairs", len(request.pairs), MAX_PAIRS)
        for i, pair in enumerate(request.pairs):
            for name in ("query", "document"):
                if not getattr(pair, name):
                    raise invalid(f"pairs[{i}].{name}", "is empty; send at least one character")
        model = self._model(request)
        facts = model.info.pooling
        if request.instruction and not facts.answer_token_ids:
            raise invalid("instruction", f"is set, but model {model.name!r} takes no instruction; remove it")
        if not (facts.num_classes or facts.answer_token_ids or facts.embeds):
            raise NotConfiguredError(
                f"model {model.name!r} has no classification head, no LogitScore module and no embedding configuration "
                "(modules.json), so it cannot score; serve a reranker or an embedding model",
                field="model",
            )
        with self._call(request, model, deadline) as call:
            reader = InputReader(self._prompts, model, truncates=request.truncate)
            if facts.num_classes or facts.answer_token_ids:
                scores, counts = await self._scores(request, reader, call)
            else:
                scores, counts = await self._similarities(request, reader, call)
        return pb.ScoreResponse(
            request_id=call.request_id,
            model=model.name,
            revision=model.info.revision,
            scores=scores,
            prompt_tokens=counts,
        )

    async def _scores(self, request: pb.ScoreRequest, reader: InputReader, call: Call) -> tuple[list[float], list[int]]:
        """The scores of a reranker."""
        facts, pooling = call.model.info.pooling, score_pooling(call.model)
        if facts.num_classes:
            inputs = await reader.pairs(request.pairs)
        else:
            inputs = await reader.rendered_pairs(request.pairs, request.instruction)
        numbers = await call.run(inputs, pooling)
        return [score_of(values, facts) for values in numbers], [len(item.ids) for item in inputs]

    async def _similarities(
        self, request: pb.ScoreRequest, reader: InputReader, call: Call
    ) -> tuple[list[float], list[int]]:
        """The cosine of the embeddings of each pair. Each text is computed once."""
        texts = list(dict.fromkeys(text for pair in request.pairs for text in (pair.query, pair.document)))
        inputs = await reader.inputs([pb.Prompt(text=text) for text in texts], "")
        vectors = await call.run(inputs, embed_pooling(pb.EmbedRequest(normalize=True), call.model.info))
        by_text = dict(zip(texts, vectors, strict=True))
        sizes = {text: len(item.ids) for text, item in zip(texts, inputs, strict=True)}
        scores = [sum(map(mul, by_text[pair.query], by_text[pair.document])) for pair in request.pairs]
        return scores, [sizes[pair.query] + sizes[pair.document] for pair in request.pairs]

    def _model(self, request: pb.EmbedRequest | pb.ScoreRequest) -> ServedModel:
        """The model, if the caller may use it and it computes embeddings or scores."""
        validation.check_request_id(request.request_id)
        with FieldErrors():
            checks.check_fields(request)
        validation.check_priority(request.scheduling.priority, self._request_limits)
        model = self._directory.find(request.model, "")
        note(model=model.name)
        self._limits.check(current_caller.get().owner, model.name, request.scheduling.priority)
        if model.info.HasField("encoder"):
            raise NotConfiguredError(
                f"model {model.name!r} has an encoder and a decoder: it generates text, no embeddings or scores",
                field="model",
            )
        if not model.info.HasField("pooling"):
            raise NotConfiguredError(
                f"model {model.name!r}: its workers compute no embeddings and no scores; start them with --backend cpu",
                field="model",
            )
        check_determinism(request.scheduling.determinism, model)
        return model

    @contextmanager
    def _call(
        self, request: pb.EmbedRequest | pb.ScoreRequest, model: ServedModel, deadline: float | None
    ) -> Iterator[Call]:
        """A call in progress: counted, measured and noted in the audit log."""
        with (
            self._streams.open(request.request_id, request.ByteSize(), kind="emb") as stream,
            self._metrics.request(stream.scoped_id, model.name) as meter,
        ):
            current_request_id.set(stream.scoped_id)
            note_generation(stream.request_id, meter)
            yield Call(self, model, stream.request_id, stream, meter, request.scheduling, deadline)

    async def run(self, call: Call, inputs: Sequence[PooledInput], pooling: pooling_pb2.Pooling) -> list[array[float]]:
        """The numbers of all inputs of a call."""
        count, model = sum(len(item.ids) for item in inputs), call.model
        requests = scheduler_requests(
            inputs,
            pooling,
            call.scheduling,
            scoped_id=call.stream.scoped_id,
            cache_salt=self._cache_salt(call.scheduling),
            deadline=call.deadline,
        )
        owner = current_caller.get().owner
        async with self._limits.admitted(owner, call.stream.scoped_id, count, lambda: count):
            for request in requests:
                call.stream.set_request(request)
            call.meter.on_accepted(count, resumes=False)
            return await pooled_numbers(requests, lambda one: self._dispatcher.submit(one, model.info, Hints()))


@dataclass(frozen=True, slots=True)
class Call:
    """One Embed or Score in progress."""

    calls: PooledCalls
    model: ServedModel
    request_id: str
    stream: OpenStream
    meter: RequestMeter
    scheduling: pb.SchedulingParams
    deadline: float | None

    async def run(self, inputs: Sequence[PooledInput], pooling: pooling_pb2.Pooling) -> list[array[float]]:
        """The numbers of all inputs, in order."""
        return await self.calls.run(self, inputs, pooling)


def embed_pooling(request: pb.EmbedRequest, info: types.ModelInfo) -> pooling_pb2.Pooling:
    """What an embedding is: the settings of the request, else those of the model. Raises InvalidRequestError."""
    facts = info.pooling
    if request.pooling not in types.PoolingKind.values():
        raise invalid("pooling", f"is {request.pooling}; must be a PoolingKind")
    if request.HasField("dimensions") and not 1 <= request.dimensions <= facts.dimensions:
        raise invalid("dimensions", f"is {request.dimensions}; must be from 1 to {facts.dimensions}")
    return pooling_pb2.Pooling(
        task=pooling_pb2.POOLING_TASK_VECTOR,
        kind=request.pooling or facts.kind,
        normalize=request.normalize if request.HasField("normalize") else facts.normalize,
        dimensions=request.dimensions,
    )


def score_pooling(model: ServedModel) -> pooling_pb2.Pooling:
    """What the model computes for a score. Raises NotConfiguredError if that is not one number."""
    facts = model.info.pooling
    if facts.num_classes > 1:
        raise NotConfiguredError(
            f"model {model.name!r} has {facts.num_classes} classes; Score needs a model with 1 (num_labels)",
            field="model",
        )
    if facts.num_classes:
        return pooling_pb2.Pooling(task=pooling_pb2.POOLING_TASK_CLASSES)
    return pooling_pb2.Pooling(task=pooling_pb2.POOLING_TASK_LOGITS, token_ids=facts.answer_token_ids)


def score_of(values: Sequence[float], facts: types.PoolingInfo) -> float:
    """The output of the head, or the logit of yes minus that of no; as a probability if the model says so."""
    value = values[0] - (values[1] if len(values) > 1 else 0.0)
    if not facts.has_sigmoid:
        return value
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise invalid(field, f"has {count} items; must have 1 to {most}")
