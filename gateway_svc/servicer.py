"""InferenceService: the RPCs that clients call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceServicer

from gateway_svc.answer.best_of import source_of
from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.answer.request_traces import RequestTrace, RequestTraces
from gateway_svc.answer.resuming import Resumed, no_record, record_of, recorded
from gateway_svc.answer.stream import GenerationStream
from gateway_svc.callers.caller import current_caller, scoped
from gateway_svc.callers.isolation import tenant_salt
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.operators.audit.entry import note, note_generation, note_request_id, note_target
from gateway_svc.pooling.calls import PooledCalls
from gateway_svc.records.recorder import Recorder, Recording
from gateway_svc.request import validation
from gateway_svc.request.plan import GenerationPlan, Planner
from gateway_svc.request.prompts.readers import PromptReaders, check_detokenize, check_tokenize
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.validation import DEFAULT_MAX_LOGPROBS, RequestLimits
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher, Hints
from gateway_svc.schedulers.pacing import WakePacer
from gateway_svc.schedulers.prefix_hints import PrefixHints
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.schedulers.wire import submit_from_plan
from svc_common.errors import NotConfiguredError
from svc_common.logs import current_request_id
from svc_common.memory import MemoryLimit
from svc_common.tracing import HEADER, current_traceparent

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
NOTHING = nullcontext()


def _deadline(context: Context) -> float | None:
    """The client's deadline on the loop's clock; None if it set none."""
    left_s = context.time_remaining()  # type: ignore[no-untyped-call,unused-ignore]
    return None if left_s is None else asyncio.get_running_loop().time() + left_s


class InferenceServicer(InferenceServiceServicer):
    """Owns the open streams of this gateway. Methods raise QuireError; an interceptor turns it into a gRPC status."""

    def __init__(
        self,
        directory: ModelDirectory,
        dispatcher: Dispatcher,
        prompts: PromptReaders,
        hints: PrefixHints,
        grammars: GrammarChecker,
        *,
        max_streams: int,
        max_request_bytes: int,
        memory: MemoryLimit | None = None,
        min_priority: int = -1000,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        metrics: GatewayMetrics | None = None,
        chunk_interval_s: float = 0.0,
        recorder: Recorder | None = None,
        limits: KeyLimits | None = None,
        isolates_tenants: bool = False,
        shows_workers: bool = True,
        traces: RequestTraces | None = None,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._hints = hints
        self._planner = Planner(grammars, prompts.threads.requests)
        self.streams = OpenStreams(max_streams, max_request_bytes, memory or MemoryLimit(None))
        self._checks = RequestLimits(min_priority, max_logprobs)
        self._metrics = metrics or GatewayMetrics()
        self._pacer = WakePacer(chunk_interval_s)
        self._recorder = recorder
        self._limits = limits or KeyLimits()
        self._isolates_tenants = isolates_tenants
        self._shows_workers = shows_workers
        self._traces = traces
        self._pooled = PooledCalls(
            directory, dispatcher, prompts, self._metrics, self._limits, self.streams, self._cache_salt, self._checks,
        )  # fmt: skip

    # -- generation ---------------------------------------------------------------------------------------------------

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Validate, tokenize, submit, stream."""
        self._read_traceparent(context)
        return self.generate(request, deadline=_deadline(context))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Continue a request from its record, after the output that the client has."""
        self._read_traceparent(context)
        validation.check_resume(request)
        note_request_id(request.request_id)
        record = await self.recorder.records.load(scoped(request.request_id))
        if record is None:
            raise no_record(request.request_id)
        resumed = Resumed(record, validation.sent_tokens(request.after, len(record.outputs)))
        async with aclosing(self.resume(resumed, deadline=_deadline(context))) as events:
            async for event in events:
                yield event

    @property
    def recorder(self) -> Recorder:
        """Access to records. Raises NotConfiguredError if this gateway keeps none."""
        if self._recorder is None:
            raise NotConfiguredError(
                "this deployment keeps no request records, which resumable and stored answers need; start the gateways "
                "with --redis, or send the request without resumable",
                field="resumable",
            )
        return self._recorder

    @property
    def keeps_records(self) -> bool:
        return self._recorder is not None

    def resume(self, resumed: Resumed, *, deadline: float | None = None) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events of a request that continues from its record."""
        return self.generate(resumed.request, deadline=deadline, resumed=resumed)

    def _read_traceparent(self, context: Context) -> None:
        if self._traces is not None:
            current_traceparent.set(str(dict(context.invocation_metadata() or ()).get(HEADER, "")))

    def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None = None,
        resumed: Resumed | None = None,
        notes: bytes = b"",
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events of one generation, for gRPC and HTTP. To end it early, cancel the task or close the generator.
        `notes` are kept in the request's record.
        """
        trace = None if self._traces is None else self._traces.begin()
        events = self._generate(request, deadline, resumed, notes, trace)
        return events if trace is None else trace.around(events)

    async def _generate(
        self,
        request: pb.GenerateRequest,
        deadline: float | None,
        resumed: Resumed | None,
        notes: bytes,
        trace: RequestTrace | None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        validation.check_request_id(request.request_id)
        note_request_id(request.request_id)
        grammar = validation.check_generate(request, self._checks, is_new=resumed is None)
        model = self._directory.find(request.model, request.continuation.revision, request.adapter)
        note(model=model.name)
        self._limits.check(current_caller.get().owner, model.name, request.scheduling.priority)
        resumes = request.HasField("continuation")
        with (
            self.streams.open(request.request_id, request.ByteSize(), resumes=resumes) as stream,
            self._metrics.request(stream.scoped_id, model.name) as meter,
        ):
            current_request_id.set(stream.scoped_id)
            note_generation(stream.request_id, meter)
            if trace is not None:
                trace.note_meter(stream.scoped_id, meter)
            prompt = await self._prompts.read(request, model, None if resumed is None else resumed.prompt_ids)
            plan = await self._planner.plan(
                request,
                model,
                prompt,
                request_id=stream.request_id,
                grammar=grammar,
                cache_salt=self._cache_salt(request.scheduling),
                replay=None if resumed is None else resumed.replay,
            )
            if prompt.inputs:
                self.streams.add_bytes(stream, sum(len(carried.data) for carried in prompt.inputs))
            generation, scheduler_request = await self._prepare(
                plan, stream.scoped_id, resumes=resumes, deadline=deadline
            )
            hints = await self._hints.look_up(plan) if self._dispatcher.has_choice(model.info) else Hints()
            if trace is not None:
                trace.on_prepared()
                scheduler_request.set_trace(trace)

            def submit() -> None:
                if not scheduler_request.is_over:
                    self._dispatcher.submit(scheduler_request, model.info, hints)

            try:
                async with (
                    self._counted(scheduler_request, plan, is_new=not resumes and resumed is None),
                    self._recording(request, plan, scheduler_request, resumed, notes, submit) as recording,
                ):
                    stream.set_request(scheduler_request)
                    if resumed is None or not resumed.follows:
                        submit()
                    source = source_of(scheduler_request, plan)
                    await source.wait_accepted()
                    for message in generation.accepted(source, meter):
                        yield message
                    while not generation.is_done:
                        for message in generation.messages(await source.wait(), source, meter, recording):
                            yield message
            finally:
                scheduler_request.release()

    def _counted(
        self, scheduler_request: SchedulerRequest, plan: GenerationPlan, *, is_new: bool
    ) -> AbstractAsyncContextManager[None]:
        """Count the request against the limits of its key. Tokens before a resume are not counted again."""
        if not self._limits.is_on:
            return NOTHING
        before = scheduler_request.num_output_tokens
        num_prompt = len(plan.prompt.ids) if is_new else 0
        most = num_prompt + len(scheduler_request.samples) * plan.sampling.stop.max_tokens - before
        return self._limits.admitted(
            current_caller.get().owner,
            scheduler_request.request_id,
            most,
            lambda: num_prompt + scheduler_request.num_output_tokens - before,
        )

    def _recording(
        self,
        request: pb.GenerateRequest,
        plan: GenerationPlan,
        scheduler_request: SchedulerRequest,
        resumed: Resumed | None,
        notes: bytes,
        submit: Callable[[], None],
    ) -> AbstractAsyncContextManager[Recording | None]:
        """The record of a resumable request while it is open; None for other requests."""
        if not request.resumable:
            return NOTHING
        content = record_of(request, plan, notes)
        return recorded(self.recorder, content, scheduler_request, resumed, submit)

    def _cache_salt(self, scheduling: pb.SchedulingParams) -> str:
        """A record keeps the salt of the request, so a resumed request gets the same salt again."""
        salt = scheduling.cache_salt
        return tenant_salt(current_caller.get().owner, salt) if self._isolates_tenants else salt

    async def _prepare(
        self, plan: GenerationPlan, scoped_id: str, *, resumes: bool, deadline: float | None
    ) -> tuple[GenerationStream, SchedulerRequest]:
        size = 4 * sum(map(len, plan.resume.outputs))
        generation = await self._prompts.threads.requests.run(size, GenerationStream, plan)
        submit = submit_from_plan(plan, request_id=scoped_id)
        scheduler_request = SchedulerRequest(
            submit,
            *plan.resume.computed,
            resumes=resumes,
            deadline=deadline,
            pacer=self._pacer,
            num_prompt_logprobs=plan.resume.num_prompt_logprobs,
        )
        for finish in generation.ends:
            if finish is not None:
                scheduler_request.on_finished(finish)
        if scheduler_request.is_over:
            scheduler_request.on_accepted()
        if plan.resume.replay is not None:
            scheduler_request.announce_output()
        return generation, scheduler_request

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the caller's requests by id, in this process directly and on other gateways through the schedulers."""
        validation.check_abort(request.request_ids)
        note_target(" ".join(request.request_ids))
        asked = {scoped(request_id): request_id for request_id in request.request_ids}
        found = {scoped_id for scoped_id in asked if self.streams.abort(scoped_id)}
        if elsewhere := [scoped_id for scoped_id in asked if scoped_id not in found]:
            found |= await self._abort_at_schedulers(elsewhere)
        return pb.AbortResponse(
            aborted_ids=[request_id for scoped_id, request_id in asked.items() if scoped_id in found],
            unknown_ids=[request_id for scoped_id, request_id in asked.items() if scoped_id not in found],
        )

    async def abort_everywhere(self, scoped_id: str) -> None:
        """End a request, in this process and on other gateways."""
        self.streams.abort(scoped_id)
        await self._abort_at_schedulers([scoped_id])

    async def _abort_at_schedulers(self, scoped_ids: Sequence[str]) -> set[str]:
        clients = [client for client in self._directory.clients if client.is_connected]
        answers = await asyncio.gather(*(client.abort_requests(scoped_ids) for client in clients))
        return {scoped_id for aborted in answers for scoped_id in aborted}

    async def drain(self, timeout_s: float) -> None:
        """Refuse new streams and wait for the open ones. Streams still open after `timeout_s` end with UNAVAILABLE."""
        await self.streams.drain(timeout_s)

    def end_streams(self) -> None:
        """End all open streams with UNAVAILABLE."""
        self.streams.end_all()

    # -- embeddings and scores ----------------------------------------------------------------------------------------

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """One vector per input."""
        return await self._pooled.embed(request, _deadline(context))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """One score per pair of texts."""
        return await self._pooled.score(request, _deadline(context))

    @property
    def pooled(self) -> PooledCalls:
        """Embed and Score without a gRPC context, for HTTP."""
        return self._pooled

    # -- text ---------------------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context | None = None) -> pb.TokenizeResponse:
        """Token ids of a prompt."""
        check_tokenize(request.prompt)
        model = self._directory.find_text(request.model)
        note(model=model.name)
        return await self._prompts.tokenize(request, model)

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context | None = None
    ) -> pb.CountTokensResponse:
        """The number of tokens of a prompt."""
        asked = request.request
        validation.check_generate(asked, self._checks)
        model = self._directory.find(asked.model, asked.continuation.revision, asked.adapter)
        note(model=model.name)
        return pb.CountTokensResponse(prompt_tokens=await self._prompts.count(asked, model))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context | None = None) -> pb.DetokenizeResponse:
        """Text of token ids."""
        check_detokenize(request.ids)
        model = self._directory.find_text(request.model)
        note(model=model.name)
        return await self._prompts.detokenize(request, model)

    # -- models and status --------------------------------------------------------------------------------------------

    async def ListModels(self, request: pb.ListModelsRequest, context: Context | None = None) -> pb.ListModelsResponse:
        """All models."""
        models = self._directory.models()
        return pb.ListModelsResponse(models=[pb.Model(info=m.info, ready_workers=workers) for m, workers in models])

    async def GetModel(self, request: pb.GetModelRequest, context: Context | None = None) -> pb.GetModelResponse:
        """One model."""
        name = self._directory.find_text(request.model).name
        model, workers = next((m, w) for m, w in self._directory.models() if m.name == name)
        return pb.GetModelResponse(model=pb.Model(info=model.info, ready_workers=workers))

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
        schedulers = await asyncio.gather(*(client.get_status() for client in self._directory.clients))
        return pb.GetStatusResponse(schedulers=schedulers, open_streams=len(self.streams))
