"""Embed, Score and classification: each is planned, its inputs are submitted, and their numbers become the answer."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from quire.v1 import inference_pb2 as pb

from gateway_svc.answer.open_streams import OpenStream, OpenStreams
from gateway_svc.answer.pooled import add_embeddings, pooled_numbers, scores_of
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
from gateway_svc.schedulers.submitter import Submitter

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
        response = pb.EmbedResponse(request_id=stream.request_id, model=model.name, revision=model.info.revision)
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
            model=model.name,
            revision=model.info.revision,
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
