"""Embed, Score and classification: each is planned, its inputs are submitted, and their numbers become the answer.

Each input is a request of its own to the schedulers. All are sent at once, so inputs of one call share the steps of the
workers. Each survives the loss of its worker or scheduler like a generation: it is computed again.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import mul

from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import OpenStream, OpenStreams
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.request.models import ServedModel
from gateway_svc.request.pooling import (
    PoolingPlan,
    check_embed,
    check_model,
    check_score,
    plan_classes,
    plan_embed,
    plan_score,
)
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.schedulers.submitter import Submission, Submitter
from svc_common.errors import AbortedError, ServiceError
from svc_common.tasks import cancel

MAX_OPEN = 256  # inputs of one call that are sent at the same time


async def pooled_numbers(submissions: Sequence[Submission]) -> list[array[float]]:
    """The numbers of all inputs, in order. Raises the first failure and cancels the others."""
    gate = asyncio.Semaphore(MAX_OPEN)

    async def run(submission: Submission) -> array[float]:
        async with gate:
            submission.send()
            return await _numbers_of(submission)

    tasks = [asyncio.create_task(run(submission)) for submission in submissions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for submission in submissions:
            submission.request.release()
        await cancel(*tasks)


async def _numbers_of(submission: Submission) -> array[float]:
    request = submission.request
    await request.wait_accepted()
    while request.samples[0].finish is None:
        await request.wait()
    finish = request.samples[0].finish
    if finish.reason == types.FINISH_REASON_ABORTED:
        raise AbortedError(finish.message or "the request was aborted")
    if request.pooled is None:
        raise ServiceError(finish.message or "internal error: the scheduler ended the request without numbers")
    return request.pooled


def add_embeddings(response: pb.EmbedResponse, plan: PoolingPlan, numbers: Sequence[array[float]]) -> None:
    """Add the vectors of an Embed, which takes time if they are many."""
    for values, item in zip(numbers, plan.inputs, strict=True):
        response.embeddings.add(values=ACTIVATIONS[plan.activation](values), prompt_tokens=len(item.ids))


def scores_of(
    plan: PoolingPlan, numbers: Sequence[array[float]], facts: types.PoolingInfo
) -> tuple[list[float], list[int]]:
    """The scores of the pairs, and their prompt tokens. Takes time if the pairs are many."""
    sizes = [len(item.ids) for item in plan.inputs]
    if not plan.pairs:
        return [_score(values, facts) for values in numbers], sizes
    cosines = [sum(map(mul, numbers[query], numbers[document])) for query, document in plan.pairs]
    return cosines, [sizes[query] + sizes[document] for query, document in plan.pairs]


def _score(values: Sequence[float], facts: types.PoolingInfo) -> float:
    """The output of the head, or the logit of yes minus that of no; as a probability if the model says so."""
    value = values[0] - (values[1] if len(values) > 1 else 0.0)
    return _sigmoid(value) if facts.has_sigmoid else value


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


ACTIVATIONS: Mapping[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "": lambda values: values,
    "sigmoid": lambda values: list(map(_sigmoid, values)),
    "softmax": _softmax,
}


PlanVectors = Callable[[pb.EmbedRequest, ServedModel, PromptReaders], Awaitable[PoolingPlan]]


class PoolingPipeline:
    """Serves Embed, Score and classification. Calls in progress are counted among `streams`."""

    def __init__(
        self, admission: CallAdmission, prompts: PromptReaders, submitter: Submitter, streams: OpenStreams
    ) -> None:
        self._admission = admission
        self._prompts = prompts
        self._lane = prompts.threads.requests
        self._submitter = submitter
        self._streams = streams

    async def embed(self, request: pb.EmbedRequest, deadline: float | None = None) -> pb.EmbedResponse:
        """One vector per input. Raises ServiceError."""
        return await self._vectors(request, plan_embed, deadline)

    async def classify(self, request: pb.EmbedRequest, *, is_raw: bool) -> pb.EmbedResponse:
        """The probabilities of the classes of each input; with `is_raw` the head's outputs. Raises ServiceError."""
        return await self._vectors(request, partial(plan_classes, is_raw=is_raw), None)

    async def _vectors(
        self, request: pb.EmbedRequest, plan_of: PlanVectors, deadline: float | None
    ) -> pb.EmbedResponse:
        check_embed(request, self._admission.requests)
        model = self._admission.model(request)
        check_model(request, model)
        with self._open(request, model) as stream:
            plan = await plan_of(request, model, self._prompts)
            numbers = await self._numbers(plan, request, model, stream, deadline)
        response = pb.EmbedResponse(request_id=stream.request_id, revision=model.info.revision, **model.names)
        await self._lane.run(_size(numbers), add_embeddings, response, plan, numbers)
        return response

    async def score(self, request: pb.ScoreRequest, deadline: float | None = None) -> pb.ScoreResponse:
        """One score per pair of texts. Raises ServiceError."""
        check_score(request, self._admission.requests)
        model = self._admission.model(request)
        check_model(request, model)
        with self._open(request, model) as stream:
            plan = await plan_score(request, model, self._prompts)
            numbers = await self._numbers(plan, request, model, stream, deadline)
        scores, prompt_tokens = await self._lane.run(_size(numbers), scores_of, plan, numbers, model.info.pooling)
        return pb.ScoreResponse(
            request_id=stream.request_id,
            revision=model.info.revision,
            **model.names,
            scores=scores,
            prompt_tokens=prompt_tokens,
        )

    def _open(self, request: pb.EmbedRequest | pb.ScoreRequest, model: ServedModel) -> OpenStream:
        return self._streams.open(request.request_id, request.ByteSize(), model.name, kind="emb")

    async def _numbers(
        self,
        plan: PoolingPlan,
        request: pb.EmbedRequest | pb.ScoreRequest,
        model: ServedModel,
        stream: OpenStream,
        deadline: float | None,
    ) -> list[array[float]]:
        """The numbers of all inputs."""
        submissions = await self._submitter.prepare_pooled(
            plan.inputs,
            plan.pooling,
            model,
            request.scheduling,
            scoped_id=stream.scoped_id,
            cache_salt=self._admission.cache_salt(request.scheduling),
            deadline=deadline,
        )
        count = plan.num_tokens
        async with self._admission.counted(stream.scoped_id, count, lambda: count):
            for submission in submissions:
                stream.set_request(submission.request)
            stream.meter.on_accepted(count, resumes=False)
            return await pooled_numbers(submissions)


def _size(numbers: Sequence[array[float]]) -> int:
    """Bytes of all numbers."""
    return 4 * sum(map(len, numbers))
