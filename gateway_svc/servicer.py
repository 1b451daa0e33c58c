"""InferenceService: what clients call."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceServicer

from gateway_svc import validation
from gateway_svc.directory import ModelDirectory
from gateway_svc.models import ServedModel
from gateway_svc.prompts import PromptReader
from gateway_svc.scheduler_request import SchedulerRequest
from gateway_svc.stream import GenerationStream
from gateway_svc.wire import submit_from_plan
from svc_common.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, UnavailableError

log = logging.getLogger(__name__)

RETRY_FULL_S = 1.0
RETRY_DRAINING_S = 1.0
MAX_TOKENIZE_BYTES = 4 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class OpenStream:
    """One Generate call in progress; `request` is None until the prompt is tokenized."""

    def __init__(self) -> None:
        self.request: SchedulerRequest | None = None
        self.is_aborted = False

    def set_request(self, request: SchedulerRequest) -> None:
        self.request = request
        if self.is_aborted:
            request.abort()

    def abort(self) -> None:
        """End it with ABORTED."""
        self.is_aborted = True
        if self.request is not None:
            self.request.abort()


class InferenceServicer(InferenceServiceServicer):
    """Owns the open streams of this gateway. Errors are raised; the server's interceptor turns them into statuses."""

    def __init__(self, directory: ModelDirectory, prompts: PromptReader, *, max_streams: int) -> None:
        self._directory = directory
        self._prompts = prompts
        self._max_streams = max_streams
        self._streams: dict[str, OpenStream] = {}
        self._is_draining = False
        self._all_closed = asyncio.Event()

    # -- generation ---------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Validate, tokenize, submit, stream."""
        validation.check_generate(request)
        client, model = self._directory.find(request.model)
        with self._open_stream(request.request_id) as (request_id, stream):
            validation.check_prompt_size(request.prompt, model)
            generation, scheduler_request = await self._prepare(request, model, request_id)
            # Runs also when the client leaves while an event is being written.
            context.add_done_callback(lambda _: scheduler_request.release())  # type: ignore[arg-type]
            try:
                stream.set_request(scheduler_request)
                if not scheduler_request.is_over:
                    client.submit(scheduler_request)
                async for event in generation.events(scheduler_request):
                    yield event
            finally:
                scheduler_request.release()

    async def _prepare(
        self, request: pb.GenerateRequest, model: ServedModel, request_id: str
    ) -> tuple[GenerationStream, SchedulerRequest]:
        prompt_ids = await self._prompts.token_ids(request.prompt, model)
        plan = validation.plan_generation(
            request, model, prompt_ids, request_id=request_id, drawn_seed=secrets.randbits(64)
        )
        size = request.continuation.ByteSize()
        generation = await self._prompts.run(size, GenerationStream, plan)
        scheduler_request = SchedulerRequest(submit_from_plan(plan), plan.outputs, plan.finished)
        for finish in generation.ends:
            if finish is not None:
                scheduler_request.on_finished(finish)
        if scheduler_request.is_over:
            scheduler_request.on_accepted()
        return generation, scheduler_request

    @contextmanager
    def _open_stream(self, asked_id: str) -> Iterator[tuple[str, OpenStream]]:
        """A place among the open streams. Raises when draining, full, or when the id is in use."""
        if self._is_draining:
            raise UnavailableError("this gateway is shutting down; ask another", retry_after_s=RETRY_DRAINING_S)
        if len(self._streams) >= self._max_streams:
            raise OverloadedError(
                f"{self._max_streams} streams are open on this gateway, its limit (--max-streams); try again",
                retry_after_s=RETRY_FULL_S,
            )
        if asked_id in self._streams:
            words = f"request_id {asked_id!r} is in flight on this gateway; choose another or wait for its end"
            raise AlreadyExistsError(words, field="request_id")
        request_id = asked_id or f"gen-{secrets.token_hex(12)}"
        stream = self._streams[request_id] = OpenStream()
        try:
            yield request_id, stream
        finally:
            del self._streams[request_id]
            if not self._streams:
                self._all_closed.set()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests by id."""
        response = pb.AbortResponse()
        for request_id in dict.fromkeys(request.request_ids):
            stream = self._streams.get(request_id)
            if stream is None:
                response.unknown_ids.append(request_id)
                continue
            stream.abort()
            response.aborted_ids.append(request_id)
        return response

    async def drain(self, timeout_s: float) -> None:
        """Take no new streams and wait for the open ones; those still open then end with UNAVAILABLE."""
        self._is_draining = True
        self._all_closed.clear()
        if not self._streams:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            log.warning("%d streams are still open after %g s; they are ended", len(self._streams), timeout_s)
            self._end_streams()

    def _end_streams(self) -> None:
        words = "this gateway is shutting down; go on elsewhere with a continuation"
        for stream in self._streams.values():
            if stream.request is not None:
                stream.request.fail(UnavailableError(words, retry_after_s=RETRY_DRAINING_S))

    # -- text ---------------------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a prompt."""
        validation.check_prompt(request.prompt)
        model = self._directory.find_text(request.model)
        size = request.prompt.ByteSize()
        if size > MAX_TOKENIZE_BYTES:
            words = f"prompt has {size} bytes; Tokenize takes at most {MAX_TOKENIZE_BYTES}: send it in parts"
            raise InvalidRequestError(words, field="prompt")
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        ids = await self._prompts.token_ids(request.prompt, model, add_special_tokens=adds_special)
        validation.check_token_ids("prompt", ids, model)
        return pb.TokenizeResponse(ids=ids, max_model_len=model.info.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of token ids."""
        model = self._directory.find_text(request.model)
        tokenizer = model.require_tokenizer("ids")
        ids = list(request.ids)
        validation.check_token_ids("ids", ids, model)
        text = await self._prompts.run(
            4 * len(ids), tokenizer.decode, ids, skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    # -- facts --------------------------------------------------------------------------------------------------------

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """All models."""
        models = self._directory.models()
        return pb.ListModelsResponse(models=[pb.Model(info=m.info, ready_workers=workers) for m, workers in models])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """One model."""
        name = self._directory.find_text(request.model).name
        model, workers = next((m, w) for m, w in self._directory.models() if m.name == name)
        return pb.GetModelResponse(model=pb.Model(info=model.info, ready_workers=workers))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Every scheduler's own word, asked now; one that does not answer is told as not connected."""
        schedulers = await asyncio.gather(*(client.get_status() for client in self._directory.clients))
        return pb.GetStatusResponse(schedulers=schedulers, open_streams=len(self._streams))
