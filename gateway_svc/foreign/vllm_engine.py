"""vLLM's engine protocol, as SMG, endpoint pickers and guidellm speak it: token ids in, token ids out. It names
no model, so the gateway must serve one (docs/grpc.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc
from quire.foreign import vllm_engine_pb2 as pb
from quire.foreign.vllm_engine_pb2_grpc import VllmEngineServicer
from quire.v1 import inference_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import FAILED
from gateway_svc.callers.caller import owner_name
from gateway_svc.foreign.loads import GatewayLoad
from gateway_svc.http.errors import error_of_sample
from gateway_svc.http.json_text import invalid
from gateway_svc.http.openai.answers import FINISH_REASONS
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer, deadline_of
from svc_common.errors import PermissionDeniedError
from svc_common.observe.metrics import quire_version

Context = grpc.aio.ServicerContext[Any, Any]

CHUNK_BYTES = 64 << 10
CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag", "json_object")


def generation_of(request: pb.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequestError. All parameters are set: the protocol's zeros are values, or stand for these."""
    if request.HasField("mm_inputs") or request.HasField("media_refs") or request.extra_mm_inputs:
        raise invalid("mm_inputs", "is set; images are served by quire.v1.InferenceService and over HTTP")
    params = request.sampling_params
    own = inference_pb2.GenerateRequest(request_id=_id(request.request_id))
    if request.HasField("text"):
        own.prompt.text = request.text
    else:
        own.prompt.tokens.ids.extend(request.tokenized.input_ids)
    sampling, stop, output = own.sampling, own.stop, own.output
    sampling.temperature = params.temperature if params.HasField("temperature") else 1.0
    sampling.top_p, sampling.repetition_penalty = params.top_p or 1.0, params.repetition_penalty or 1.0
    sampling.top_k, sampling.min_p, sampling.n = params.top_k, params.min_p, params.n or 1
    sampling.frequency_penalty, sampling.presence_penalty = params.frequency_penalty, params.presence_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed % (1 << 64)
    for token, bias in params.logit_bias.items():
        sampling.logit_bias[_count("logit_bias", token)] = bias
    if (constraint := params.WhichOneof("constraint")) in CONSTRAINTS:
        setattr(sampling, constraint, getattr(params, constraint))
    sampling.choice.extend(params.choice.choices)
    if params.HasField("max_tokens"):
        stop.max_tokens = params.max_tokens
    stop.min_tokens, stop.ignore_eos, stop.include_stop_in_output = (
        params.min_tokens, params.ignore_eos, params.include_stop_str_in_output,
    )  # fmt: skip
    stop.stop.extend(params.stop)
    stop.stop_token_ids.extend(params.stop_token_ids)
    output.text, output.skip_special_tokens = False, params.skip_special_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(output, name, _count(name, getattr(params, name)))
    if params.HasField("truncate_prompt_tokens"):
        own.truncate_prompt_tokens = _count("truncate_prompt_tokens", params.truncate_prompt_tokens)
    return own


def _id(request_id: str) -> str:
    """Its digest if Quire does not take the id: those of SMG have 70 characters."""
    return request_id and owner_name(request_id)


def _count(name: str, value: int) -> int:
    if value < 0:
        raise invalid(name, f"has {value}; must be 0 or more")
    return value


class VllmServicer(VllmEngineServicer):
    """One method per RPC. `shows_loads`: callers may see the load of all callers."""

    def __init__(
        self,
        servicer: InferenceServicer,
        directory: ModelDirectory,
        lane: Lane,
        *,
        is_serving: Callable[[], bool],
        shows_loads: bool,
    ) -> None:
        self._servicer = servicer
        self._directory = directory
        self._lane = lane
        self._is_serving = is_serving
        self._shows_loads = shows_loads
        self._archiving = asyncio.Lock()
        self._archive = b"", b""  # digest of the bundle, and its files: one copy for all calls

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Chunks of each sample, if they are asked for, and its end."""
        self._servicer.read_traceparent(context)
        own = await self._lane.run(request.ByteSize(), generation_of, request)
        answer = EngineAnswer(is_stream=request.stream)
        async with aclosing(self._servicer.generation.generate(own, deadline=deadline_of(context))) as events:
            async for event in events:
                if (response := answer.add(event)) is not None:
                    yield response

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """One vector."""
        prompt = inference_pb2.Prompt(tokens=types.TokenIds(ids=request.tokenized.input_ids))
        own = inference_pb2.EmbedRequest(request_id=_id(request.request_id), inputs=[prompt])
        (found,) = (await self._servicer.pooling.embed(own, deadline_of(context))).embeddings
        return pb.EmbedResponse(
            embedding=found.values, prompt_tokens=found.prompt_tokens, embedding_dim=len(found.values)
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the caller's requests."""
        ids = [_id(request_id) for request_id in request.request_ids]
        await self._servicer.Abort(inference_pb2.AbortRequest(request_ids=ids), context)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Whether the model is ready."""
        healthy = self._is_serving()
        return pb.HealthCheckResponse(healthy=healthy, message="" if healthy else "no model is ready")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """The model."""
        info = self._directory.find_text("").info
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = {n: getattr(info.default_sampling, n) for n in names if info.default_sampling.HasField(n)}  # type: ignore[arg-type]
        return pb.GetModelInfoResponse(
            model_path=info.model,
            served_model_name=info.model,
            is_generation=not info.is_encoder and (not info.HasField("pooling") or info.pooling.generates),
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """The engine behind the gateway, as if it was one."""
        info = self._directory.find_text("").info
        return pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=info.block_size,
            model_dtype=info.dtype,
            max_num_seqs=GatewayLoad.of(self._directory).num_rows,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """The load of all workers, as that of one rank."""
        if not self._shows_loads:
            raise PermissionDeniedError(
                "this gateway shows its load to operators only; start it with --grpc-compat loads"
            )
        load = GatewayLoad.of(self._directory)
        one = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            token_usage=load.kv_usage,
            max_running_requests=load.num_rows,
            num_waiting_uncached_tokens=min(load.pending_tokens, (1 << 31) - 1),
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=quire_version(), dp_rank_count=1, loads=[one])

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerChunk]:
        """The files of the model's bundle as a ZIP archive."""
        async with self._servicer.admission.call(), self._archiving:
            digest = self._directory.find_text("").info.bundle_digest
            if self._archive[0] != digest:
                bundle = await self._directory.schedulers_of("")[0].fetch_bundle()
                self._archive = digest, await asyncio.to_thread(_archive, bundle)
            data = self._archive[1]
        sha256 = hashlib.sha256(data).hexdigest()
        for at in range(0, len(data), CHUNK_BYTES):
            is_last = at + CHUNK_BYTES >= len(data)
            yield pb.GetTokenizerChunk(data=data[at : at + CHUNK_BYTES], sha256=sha256 if is_last else "")


def _archive(bundle: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as files:
        for file in types.ModelBundle.FromString(bundle).files:
            files.writestr(file.name, file.data)
    return archive.getvalue()


class EngineAnswer:
    """Events of a generation as responses."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._prompt_tokens = 0
        self._prompt_logprobs = pb.InputLogProbs()
        self._wholes: dict[int, pb.GenerateComplete] = {}  # by sample; of a stream without its tokens
        self._begun: set[int] = set()

    def add(self, event: inference_pb2.GenerateResponse) -> pb.GenerateResponse | None:
        """The response to send now. Raises ServiceError if a sample has failed."""
        if event.HasField("accepted"):
            self._prompt_tokens = event.accepted.prompt_tokens
        elif event.HasField("prompt_logprobs"):
            self._add_prompt(event.prompt_logprobs)
        elif event.HasField("finished"):
            return self._end(event.finished)
        elif event.HasField("chunk"):
            return self._chunk(event.chunk)
        return None

    def _add_prompt(self, event: inference_pb2.PromptLogprobs) -> None:
        found = self._prompt_logprobs
        if event.HasField("first_token_id"):
            found.token_ids.append(event.first_token_id)
            found.token_logprobs.add()
        found.token_ids.extend(event.token_ids)
        for logprob in event.logprobs.logprobs:
            found.token_logprobs.add(value=logprob)
        found.top_logprobs.extend(_tops(event.logprobs))

    def _chunk(self, event: inference_pb2.Chunk) -> pb.GenerateResponse | None:
        logprobs = pb.OutputLogProbs(
            token_logprobs=event.logprobs.logprobs,
            token_ids=event.token_ids if event.logprobs.logprobs else (),
            top_logprobs=_tops(event.logprobs),
        )
        if not self._is_stream:
            whole = self._wholes.setdefault(event.index, pb.GenerateComplete())
            whole.output_ids.extend(event.token_ids)
            whole.output_logprobs.MergeFrom(logprobs)
            return None
        count = len(event.token_ids)
        response = pb.GenerateResponse()
        chunk = response.chunk
        chunk.index, chunk.prompt_tokens, chunk.completion_tokens = event.index, self._prompt_tokens, count
        chunk.token_ids.extend(event.token_ids)
        if logprobs.token_ids:
            chunk.output_logprobs.CopyFrom(logprobs)
        if event.index not in self._begun and self._prompt_logprobs.token_ids:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
        self._begun.add(event.index)
        return response

    def _end(self, finished: inference_pb2.Finished) -> pb.GenerateResponse:
        if finished.reason in FAILED:
            raise error_of_sample(finished.message)
        whole = self._wholes.pop(finished.index, pb.GenerateComplete())
        whole.index = finished.index
        reason = FINISH_REASONS[finished.reason]
        whole.finish_reason = reason if reason in ("length", "abort") else "stop"
        whole.prompt_tokens, whole.cached_tokens = finished.usage.prompt_tokens, finished.usage.cached_tokens
        whole.completion_tokens = finished.usage.output_tokens
        if self._prompt_logprobs.token_ids:
            whole.input_logprobs.CopyFrom(self._prompt_logprobs)
        if finished.HasField("stop_token_id"):
            whole.matched_token_id = finished.stop_token_id
        elif finished.HasField("stop"):
            whole.matched_stop_str = finished.stop
        return pb.GenerateResponse(complete=whole)


def _tops(logprobs: inference_pb2.Logprobs) -> Sequence[pb.TopLogProbs]:
    """The most likely tokens of each position."""
    if not logprobs.top_token_ids:
        return ()
    k = len(logprobs.top_token_ids) // len(logprobs.logprobs)
    ids, values = logprobs.top_token_ids, logprobs.top_logprobs
    return [pb.TopLogProbs(values=values[at : at + k], token_ids=ids[at : at + k]) for at in range(0, len(ids), k)]
