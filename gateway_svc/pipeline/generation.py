"""Generate and Resume: a request is read, planned and submitted, and its answer is streamed, in this order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace

from quire.v1 import inference_pb2 as pb

from gateway_svc.answer.best_of import BestSamples
from gateway_svc.answer.open_streams import OpenStream, OpenStreams
from gateway_svc.answer.receipts import ReceiptSigner
from gateway_svc.answer.request_traces import GenerationTraces, RequestTrace
from gateway_svc.answer.resuming import Resumed, no_record, record_of, recorded
from gateway_svc.answer.session import SessionBase
from gateway_svc.answer.stream import GenerationStream
from gateway_svc.callers.caller import annotate, record_request_id, scoped
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.pipeline.old_answers import OldAnswerReader
from gateway_svc.pipeline.sessions import Sessions
from gateway_svc.records.recorder import OutputRecorder, Recording
from gateway_svc.request.field_errors import BYTES_PER_TOKEN, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import GenerationPlan, Planner
from gateway_svc.request.prompts.audio import AudioPart
from gateway_svc.request.prompts.readers import PromptReaders, check_prompt_size
from gateway_svc.request.validation import RequestLimits, check_generate, check_request_id, check_resume, sent_tokens
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.routes import Shadows
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.schedulers.submitter import Submission, Submitter
from request_fields.fields import LAST_PRIORITY
from request_fields.parameters import Grammar
from svc_common.errors import NotConfiguredError

Events = AsyncGenerator[pb.GenerateResponse, None]
NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request, and what belongs to it but is not part of its message."""

    request: pb.GenerateRequest
    deadline: float | None = None  # the client's deadline, on the loop's clock
    resumed: Resumed | None = None  # the request continues from its record
    notes: bytes = b""  # kept in its record
    trace: RequestTrace | None = None
    limits: RequestLimits | None = None  # in place of those of this gateway


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The tokens that a request computes. Beams send no output before their end: a search that is cancelled counts in
    full.
    """

    request: SchedulerRequest
    num_given: int  # prompt and known output; 0: another gateway computes the request
    num_known: int
    num_beams: int
    most: int  # with the largest output
    num_rows: int  # open samples or beams

    @classmethod
    def of(cls, plan: GenerationPlan, request: SchedulerRequest, *, is_read: bool) -> TokenCost:
        known, num_open = request.num_output_tokens, sum(sample.finish is None for sample in request.samples)
        num_given = len(plan.prompt.ids) + known if num_open and not is_read else 0
        beams = 0 if plan.sampling.beams is None else plan.sampling.beams.width
        num_left = (beams or len(request.samples)) * plan.sampling.stop.max_tokens - known
        return cls(request, num_given, known, beams, num_given + num_left, beams or num_open)

    def used(self) -> int:
        """The tokens computed so far."""
        if not self.num_beams:
            return self.num_given + self.request.num_output_tokens - self.num_known
        if not self.request.is_finished:
            return self.most
        return self.num_given + self.num_beams * max(len(sample.outputs) for sample in self.request.samples)


class GenerationPipeline:
    """Serves generations for gRPC and HTTP. All methods raise ServiceError."""

    def __init__(
        self,
        directory: ModelDirectory,
        admission: CallAdmission,
        prompts: PromptReaders,
        planner: Planner,
        submitter: Submitter,
        streams: OpenStreams,
        *,
        recorder: OutputRecorder | None = None,
        traces: GenerationTraces | None = None,
        signer: ReceiptSigner | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self.streams = streams
        self.traces = traces
        self._directory = directory
        self.limits = admission.requests
        self._admission = admission
        self._prompts = prompts
        self._lane = prompts.threads.requests
        self._planner = planner
        self._submitter = submitter
        self._recorder = recorder
        self._signer = signer
        self.shadows = shadows
        self.sessions = Sessions(admission, prompts, lambda: self.recorder.records)
        self._old_answers = OldAnswerReader(self._lane, lambda: self.recorder.records)

    def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None = None,
        resumed: Resumed | None = None,
        notes: bytes = b"",
        limits: RequestLimits | None = None,
    ) -> Events:
        """The events of one generation. To end it early, cancel the task or close the generator. `notes` are kept in
        the request's record. `limits` take the place of those of this gateway.
        """
        trace = None if self.traces is None else self.traces.begin(request)
        events = self._generate(GenerationCall(request, deadline, resumed, notes, trace, limits))
        return events if trace is None else trace.around(events)

    async def audio_parts(self, request: pb.GenerateRequest, max_s: float) -> tuple[ServedModel, list[AudioPart]]:
        """The model of a request, and its speech in parts that the model takes, of at most `max_s`."""
        model = self._admission.model(request, "", request.adapter)
        check_prompt_size(request, model)
        return model, await self._prompts.audio_parts(request.prompt.audio, model, max_s)

    async def _generate(self, call: GenerationCall) -> Events:
        request, resumed = call.request, call.resumed
        check_request_id(request.request_id)
        record_request_id(request.request_id)
        limits, is_new = call.limits or self._admission.requests, resumed is None
        grammar = await self._lane.run(request.sampling.ByteSize(), check_generate, request, limits, is_new=is_new)
        base, former_id, alias = None, "", None if resumed is None else resumed.record.content.alias
        if request.session_id and is_new:
            request, base, grammar = await self._continued(call)
            alias, former_id = base.alias, base.record.next_id
        model = self._admission.model(request, request.continuation.revision, request.adapter, alias=alias)
        resumes = request.HasField("continuation")
        with self._open(call, model, resumes=resumes) as stream:
            if base is None:
                prompt = await self._prompts.read(request, model, None if resumed is None else resumed.prompt_ids)
            else:
                prompt = await self.sessions.read_prompt(request, base, model)
            plan = await self._planner.plan(
                request,
                model,
                prompt,
                request_id=stream.request_id,
                grammar=grammar,
                cache_salt=self._admission.cache_salt(request.scheduling),
                replay=None if resumed is None else resumed.replay,
            )
            if former_id or request.draft_of or request.draft_token_ids or request.draft_text:
                plan = replace(plan, draft_token_ids=await self._old_answers.read(request, model, former_id))
            if prompt.inputs:
                stream.add_inputs(prompt.inputs)
            answer = await self._lane.run(4 * sum(map(len, plan.resume.outputs)), GenerationStream, plan, self._signer)
            submission = await self._submitter.prepare(
                plan, scoped_id=stream.scoped_id, resumes=resumes, deadline=call.deadline
            )
            if call.trace is not None:
                call.trace.on_prepared(submission.request)
            answer.report_known(submission.request)
            async with (
                self._counted(call, plan, submission.request),
                self._recording(call, request, plan, submission) as recording,
            ):
                stream.set_request(submission.request)
                if resumed is None or not resumed.follows:
                    submission.send()
                is_whole = is_new and not resumes and (base is None or request.prompt.HasField("chat"))
                if self.shadows is not None and model.alias and is_whole:
                    self.shadows.offer(model.alias, request)
                best = plan.resume.best_of
                source = submission.request if best is None else BestSamples(submission.request, plan, best)
                answer.begin(source, stream.meter, recording)
                while not answer.is_over:
                    last = None
                    for message in await answer.next_messages():
                        if last is not None:
                            yield last
                        last = message
                    if answer.is_over and recording is not None:  # its end may be continued at once
                        await self.recorder.finish(recording)
                    if last is not None:
                        yield last

    async def _continued(self, call: GenerationCall) -> tuple[pb.GenerateRequest, SessionBase, Grammar | None]:
        """A request with the values of its session, what it continues, and its grammar."""
        request, limits = pb.GenerateRequest(), self._admission.requests
        request.CopyFrom(call.request)
        base = await self.sessions.continued_by(request)
        grammar = await self._lane.run(request.sampling.ByteSize(), check_generate, request, limits, is_new=False)
        return request, base, grammar

    def _open(self, call: GenerationCall, model: ServedModel, *, resumes: bool) -> OpenStream:
        request = call.request
        stream = self.streams.open(request.request_id, request.ByteSize(), model.name, resumes=resumes)
        stream.meter.is_background = request.scheduling.priority == LAST_PRIORITY
        if call.trace is not None:
            call.trace.set_meter(stream.scoped_id, stream.meter)
        return stream

    def _counted(
        self, call: GenerationCall, plan: GenerationPlan, request: SchedulerRequest
    ) -> AbstractAsyncContextManager[None]:
        """Count what is computed against the limits of the caller's key: the prompt, the output that a continuation
        claims, which is computed like a prompt, and the output of all samples or beams.
        """
        if not self._admission.counts:
            return NOTHING
        cost = TokenCost.of(plan, request, is_read=call.resumed is not None and call.resumed.follows)
        return self._admission.counted(request.request_id, cost.most, cost.used, num_rows=cost.num_rows)

    def _recording(
        self, call: GenerationCall, request: pb.GenerateRequest, plan: GenerationPlan, submission: Submission
    ) -> AbstractAsyncContextManager[Recording | None]:
        """The record of a resumable request while it is open; None for other requests. `request`: with the values of
        the session that it continues.
        """
        if not request.resumable:
            return NOTHING
        return recorded(self.recorder, record_of(request, plan, call.notes), submission, call.resumed)

    async def count_tokens(self, request: pb.GenerateRequest) -> int:
        """The number of tokens of the prompt that a request would have."""
        check_generate(request, self._admission.requests)
        if request.session_id:
            raise invalid("session_id", "is set, but CountTokens counts whole prompts; leave the field unset")
        revision = request.continuation.revision
        model = self._directory.find(self._directory.routed(request, revision)[1], revision, request.adapter)
        annotate(model=model.name)
        async with self._admission.call(request.ByteSize() // BYTES_PER_TOKEN):
            return await self._prompts.count(request, model)

    # -- records ------------------------------------------------------------------------------------------------------

    @property
    def recorder(self) -> OutputRecorder:
        """Access to records. Raises NotConfiguredError if this gateway keeps none."""
        if self._recorder is None:
            raise NotConfiguredError(
                "this deployment keeps no request records, which resumable and stored answers need; start the gateways "
                "with --redis, or a single one with --record-memory, or send the request without resumable",
                field="resumable",
            )
        return self._recorder

    @property
    def keeps_records(self) -> bool:
        return self._recorder is not None

    async def resume(self, request: pb.ResumeRequest, *, deadline: float | None = None) -> Events:
        """Continue a request from its record, after the output that the client has."""
        check_resume(request)
        record_request_id(request.request_id)
        record = await self.recorder.records.load(scoped(request.request_id))
        if record is None:
            raise no_record(request.request_id)
        resumed = Resumed(record, sent_tokens(request.after, len(record.outputs)))
        async with aclosing(self.generate_again(resumed, deadline=deadline)) as events:
            async for event in events:
                yield event

    def generate_again(self, resumed: Resumed, *, deadline: float | None = None) -> Events:
        """The events of a request that continues from this record."""
        return self.generate(resumed.request, deadline=deadline, resumed=resumed)

    # -- aborts -------------------------------------------------------------------------------------------------------

    async def abort(self, scoped_ids: Sequence[str]) -> set[str]:
        """End requests, in this process directly and on other gateways through the schedulers. Returns those found."""
        found = {scoped_id for scoped_id in scoped_ids if self.streams.abort(scoped_id)}
        if elsewhere := [scoped_id for scoped_id in scoped_ids if scoped_id not in found]:
            found |= await self._abort_at_schedulers(elsewhere)
        return found

    async def abort_everywhere(self, scoped_id: str) -> None:
        """End a request in this process, and on other gateways in any case."""
        self.streams.abort(scoped_id)
        await self._abort_at_schedulers([scoped_id])

    async def _abort_at_schedulers(self, scoped_ids: Sequence[str]) -> set[str]:
        clients = [client for client in self._directory.clients if client.is_connected]
        answers = await asyncio.gather(*(client.abort_requests(scoped_ids) for client in clients))
        return {scoped_id for aborted in answers for scoped_id in aborted}
