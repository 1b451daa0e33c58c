"""InferenceService and SessionService: maps RPCs that clients call to the pipelines. Methods raise ServiceError, which
an interceptor turns into a gRPC status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2 as spb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceServicer
from quire.v1.session_pb2_grpc import SessionServiceServicer

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.answer.receipts import ReceiptSigner
from gateway_svc.answer.request_traces import GenerationTraces
from gateway_svc.callers.caller import annotate, record_target, scoped
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.pipeline.decisions import DecisionPipeline
from gateway_svc.pipeline.generation import GenerationPipeline
from gateway_svc.pipeline.pooling import PoolingPipeline
from gateway_svc.pipeline.sessions import Sessions
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.request.field_errors import BYTES_PER_TOKEN
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import Planner
from gateway_svc.request.prompts.readers import PromptReaders, check_detokenize, check_tokenize
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.validation import check_abort
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.routes import MAX_SHADOW_BYTES, MAX_SHADOWS, Shadows
from gateway_svc.schedulers.submitter import PrefixReader, Submitter

Context = grpc.aio.ServicerContext[Any, Any]
MAX_SHOWN_OWNERS = 20


class InferenceServicer(InferenceServiceServicer):
    """One method per RPC. `shows_workers`: clients are operators and see the state of every scheduler."""

    def __init__(
        self,
        directory: ModelDirectory,
        admission: CallAdmission,
        prompts: PromptReaders,
        generation: GenerationPipeline,
        pooling: PoolingPipeline,
        decisions: DecisionPipeline,
        *,
        shows_workers: bool = True,
    ) -> None:
        self._directory = directory
        self.admission = admission
        self._prompts = prompts
        self.generation = generation
        self.pooling = pooling
        self.decisions = decisions
        self._shows_workers = shows_workers

    # -- generation ---------------------------------------------------------------------------------------------------

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """The events of one generation."""
        self.read_traceparent(context)
        return self.generation.generate(request, deadline=deadline_of(context))

    def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """The further events of a request that has a record."""
        self.read_traceparent(context)
        return self.generation.resume(request, deadline=deadline_of(context))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the caller's requests by id, on any gateway."""
        check_abort(request.request_ids)
        record_target(" ".join(request.request_ids))
        asked = {scoped(request_id): request_id for request_id in request.request_ids}
        found = await self.generation.abort(list(asked))
        return pb.AbortResponse(
            aborted_ids=[request_id for scoped_id, request_id in asked.items() if scoped_id in found],
            unknown_ids=[request_id for scoped_id, request_id in asked.items() if scoped_id not in found],
        )

    def read_traceparent(self, context: Context) -> None:
        """The next generation of this call continues the caller's trace."""
        if self.generation.traces is not None:
            self.generation.traces.receive(dict(context.invocation_metadata() or ()))

    # -- embeddings, scores and decisions -----------------------------------------------------------------------------

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """One vector per input."""
        return await self.pooling.embed(request, deadline_of(context))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """One score per pair of texts."""
        return await self.pooling.score(request, deadline_of(context))

    async def Decide(self, request: pb.DecideRequest, context: Context) -> pb.DecideResponse:
        """One answer per question."""
        self.read_traceparent(context)
        return await self.decisions.decide(request, deadline_of(context))

    # -- text ---------------------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context | None = None) -> pb.TokenizeResponse:
        """Token ids of a prompt."""
        async with self.admission.call(request.ByteSize() // BYTES_PER_TOKEN):
            return await self.tokenize(request)

    async def tokenize(self, request: pb.TokenizeRequest, model: ServedModel | None = None) -> pb.TokenizeResponse:
        """The same as a part of another call, for its model."""
        check_tokenize(request)
        model = model or self._directory.find_text(request.model)
        annotate(model=model.name)
        return await self._prompts.tokenize(request, model)

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context | None = None
    ) -> pb.CountTokensResponse:
        """The number of tokens of a prompt."""
        return pb.CountTokensResponse(prompt_tokens=await self.generation.count_tokens(request.request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context | None = None) -> pb.DetokenizeResponse:
        """Text of token ids."""
        async with self.admission.call(len(request.ids)):
            return await self.detokenize(request)

    async def detokenize(
        self, request: pb.DetokenizeRequest, model: ServedModel | None = None
    ) -> pb.DetokenizeResponse:
        """The same as a part of another call, for its model."""
        check_detokenize(request.ids)
        model = model or self._directory.find_text(request.model)
        annotate(model=model.name)
        return await self._prompts.detokenize(request, model)

    # -- models and status --------------------------------------------------------------------------------------------

    async def ListModels(self, request: pb.ListModelsRequest, context: Context | None = None) -> pb.ListModelsResponse:
        async with self.admission.call():
            return pb.ListModelsResponse(models=self._directory.listed())

    async def GetModel(self, request: pb.GetModelRequest, context: Context | None = None) -> pb.GetModelResponse:
        async with self.admission.call():
            name = self._directory.find_text(request.model).name
            listed = {model.info.model: model for model in self._directory.listed()}
        return pb.GetModelResponse(model=listed.get(request.model) or listed[name])

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """The state of every scheduler; a summary where clients are not operators."""
        if self._shows_workers:
            return await self.full_status()
        summary = pb.GetStatusResponse(is_summary=True)
        for client in self._directory.clients:
            summary.schedulers.add(
                model="" if client.model is None else client.model.name, connected=client.is_connected
            )
        return summary

    async def full_status(self) -> pb.GetStatusResponse:
        """The current state of every scheduler. A scheduler that does not answer is reported as not connected."""
        asked = asyncio.gather(*(client.get_status() for client in self._directory.clients))
        schedulers, pinned = await asyncio.gather(asked, self.generation.sessions.num_pinned())
        _drop_moved_workers(schedulers)
        most = sorted((pinned or {}).items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_SHOWN_OWNERS]
        return pb.GetStatusResponse(
            schedulers=schedulers,
            open_streams=len(self.generation.streams),
            pinned_sessions=None if pinned is None else sum(pinned.values()),
            pins_by_owner=[pb.OwnerPins(owner=owner, num_sessions=num_sessions) for owner, num_sessions in most],
        )


def _drop_moved_workers(schedulers: Sequence[pb.SchedulerStatus]) -> None:
    """Remove the workers that a scheduler has lost and another one serves."""
    lost = types_pb2.WORKER_STATE_LOST
    served = {worker.worker_id for status in schedulers for worker in status.workers if worker.state != lost}
    for status in schedulers:
        kept = [worker for worker in status.workers if worker.state != lost or worker.worker_id not in served]
        del status.workers[:]
        status.workers.extend(kept)


class SessionServicer(SessionServiceServicer):
    """One method per RPC of SessionService."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def Checkpoint(self, request: spb.CheckpointRequest, context: Context) -> spb.CheckpointResponse:
        """A copy of a session as it is now."""
        return spb.CheckpointResponse(session=await self._sessions.checkpoint(request.session_id))

    async def Fork(self, request: spb.ForkRequest, context: Context) -> spb.ForkResponse:
        """Several copies of a session."""
        return spb.ForkResponse(sessions=await self._sessions.fork(request.session_id, request.n))

    async def Rewind(self, request: spb.RewindRequest, context: Context) -> spb.RewindResponse:
        """A copy of a session with less output."""
        return spb.RewindResponse(session=await self._sessions.rewind(request.session_id, request.num_tokens))

    async def Pin(self, request: spb.PinRequest, context: Context) -> spb.PinResponse:
        """Keep a session."""
        return spb.PinResponse(session=await self._sessions.pin(request.session_id, request.ttl_s))

    async def GetSession(self, request: spb.GetSessionRequest, context: Context) -> spb.GetSessionResponse:
        return await self._sessions.get(request.session_id, with_content=request.with_content)

    async def ListSessions(self, request: spb.ListSessionsRequest, context: Context) -> spb.ListSessionsResponse:
        """The sessions of the caller."""
        return spb.ListSessionsResponse(sessions=await self._sessions.list())

    async def DeleteSession(self, request: spb.DeleteSessionRequest, context: Context) -> spb.DeleteSessionResponse:
        await self._sessions.delete(request.session_id)
        return spb.DeleteSessionResponse()


def make_servicer(
    directory: ModelDirectory,
    dispatcher: Dispatcher,
    prompts: PromptReaders,
    grammars: GrammarChecker,
    streams: OpenStreams,
    *,
    admission: CallAdmission | None = None,
    reader: PrefixReader | None = None,
    chunk_interval_s: float = 0.0,
    recorder: OutputRecorder | None = None,
    traces: GenerationTraces | None = None,
    shows_workers: bool = True,
    signer: ReceiptSigner | None = None,
) -> InferenceServicer:
    """A servicer with its pipelines."""
    admission, lane = admission or CallAdmission(directory), prompts.threads.requests
    submitter = Submitter(dispatcher, lane, reader, chunk_interval_s)
    planner = Planner(grammars, lane)
    direct = ModelDirectory(directory.clients)  # without routes, limits of keys and room for requests
    copies = CallAdmission(direct, requests=admission.requests, isolates_tenants=admission.isolates_tenants)
    copy_streams = OpenStreams(MAX_SHADOWS, MAX_SHADOW_BYTES, streams.metrics)
    shadow = GenerationPipeline(direct, copies, prompts, planner, submitter, copy_streams)
    generation = GenerationPipeline(
        directory,
        admission,
        prompts,
        planner,
        submitter,
        streams,
        recorder=recorder,
        traces=traces,
        signer=signer,
        shadows=Shadows(directory.routes.rows, shadow.generate, streams.metrics.on_drop),
    )
    pooling = PoolingPipeline(admission, prompts, submitter, streams)
    decisions = DecisionPipeline(generation, directory, admission, lane)
    return InferenceServicer(directory, admission, prompts, generation, pooling, decisions, shows_workers=shows_workers)


def deadline_of(context: Context) -> float | None:
    """The client's deadline on the loop's clock; None if it set none."""
    left_s = context.time_remaining()  # type: ignore[no-untyped-call,unused-ignore]
    return None if left_s is None else asyncio.get_running_loop().time() + left_s
