"""KServe V2 (the Open Inference Protocol) with the tensors that clients of Triton send to its backends vLLM and
TensorRT-LLM: a text or token ids in, texts or token ids out (docs/grpc.md).
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from quire.foreign import kserve_pb2 as pb
from quire.foreign.kserve_pb2_grpc import GRPCInferenceServiceServicer
from quire.v1 import inference_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import FAILED
from gateway_svc.foreign.tensors import add_output, inputs_of
from gateway_svc.http.errors import error_of_sample
from gateway_svc.http.fields import COMPLETION
from gateway_svc.http.json_text import invalid, shown
from gateway_svc.http.openai.answers import FINISH_REASONS
from gateway_svc.http.openai.bodies import body_of, completion_of
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer, deadline_of
from request_fields.fields import BY_PATH, Kind
from svc_common.errors import NotFoundError, shown_error
from svc_common.observe.metrics import quire_version
from svc_common.tasks import cancel

Context = grpc.aio.ServicerContext[Any, Any]

STREAM_METHOD = "inference.GRPCInferenceService/ModelStreamInfer"
MAX_OPEN = 256  # requests of one stream that run at the same time; the next one is read when one has ended
VERSIONS = ("", "1")
FINAL = "triton_final_response"
# Fields of /v1/completions by the names that backends of Triton have for them.
NAMES = {
    "request_output_len": "max_tokens", "runtime_top_k": "top_k", "runtime_top_p": "top_p", "random_seed": "seed",
    "stop_words": "stop", "end_id": "stop_token_ids", "min_length": "min_tokens", "len_penalty": "length_penalty",
    "num_return_sequences": "n", "lora_name": "model", "streaming": "stream",
}  # fmt: skip
LISTS = {row.name for row in COMPLETION if row.path and BY_PATH[row.path].kind in (Kind.STRINGS, Kind.TOKEN_IDS)}
FLAGS = {row.name for row in COMPLETION if row.path and BY_PATH[row.path].kind is Kind.BOOL}
KNOWN = {row.name for row in COMPLETION} - {"prompt", "prompt_embeds", "echo", "suffix", "timeout"}
RETURNS = {  # inputs that ask for outputs
    "return_finish_reason": "finish_reason", "return_cumulative_logprob": "cumulative_logprob",
    "return_num_output_tokens": "num_output_tokens", "return_num_input_tokens": "num_input_tokens",
    "return_log_probs": "output_log_probs",
}  # fmt: skip
OWN = ("exclude_input_in_output", "input_lengths", "pad_id", "triton_enable_empty_final_response", *RETURNS)


@dataclass(slots=True)
class TensorSample:
    """The output of one sample that is not sent yet."""

    text: list[str] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    end: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)


# By output: its datatype, and a sample's value.
OUTPUTS: Mapping[str, tuple[str, Callable[[TensorSample], Any]]] = {
    "text_output": ("BYTES", lambda sample: "".join(sample.text)),
    "output_ids": ("INT32", lambda sample: sample.ids),
    "sequence_length": ("INT32", lambda sample: len(sample.ids)),
    "finish_reason": ("BYTES", lambda sample: FINISH_REASONS.get(sample.end.reason, "") if sample.end.reason else ""),
    "cumulative_logprob": ("FP32", lambda sample: sample.end.cumulative_logprob),
    "cum_log_probs": ("FP32", lambda sample: sample.end.cumulative_logprob),
    "output_log_probs": ("FP32", lambda sample: sample.logprobs),
    "num_output_tokens": ("UINT32", lambda sample: sample.end.usage.output_tokens),
    "num_input_tokens": ("UINT32", lambda sample: sample.end.usage.prompt_tokens),
}
LOGPROBS = {"cumulative_logprob", "cum_log_probs", "output_log_probs"}
INPUTS = {"text_input": ("BYTES", [1]), "input_ids": ("INT32", [-1]), "stream": ("BOOL", [1]),
          "sampling_parameters": ("BYTES", [1])}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request as Quire's own, and the form of its answer."""

    request: inference_pb2.GenerateRequest
    id: str
    is_stream: bool
    outputs: Sequence[str]
    first: TensorSample  # the text or ids that stand before the output of each sample
    has_empty_final: bool
    timeout_s: float


def call_of(request: pb.ModelInferRequest) -> InferCall:
    """Raises ServiceError."""
    if request.model_version not in VERSIONS:
        words = f"model_version is {shown(request.model_version)}; the only version is 1"
        raise NotFoundError(words, field="model_version", subject=request.model_version)
    given = dict(inputs_of(request))
    for name, parameter in request.parameters.items():
        given.setdefault(name, [getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")])
    prompt, first = _prompt_of(given)
    timeout_us = _one("timeout", given.pop("timeout", [0]))
    own = {name: _one(name, given.pop(name)) for name in OWN if name in given}
    outputs = [tensor.name for tensor in request.outputs] or [
        "text_output" if first.text else "output_ids",
        *(output for name, output in RETURNS.items() if own.get(name)),
    ]
    for name in outputs:
        if name not in OUTPUTS:
            raise invalid("outputs", f"has {shown(name)}; the outputs are {', '.join(OUTPUTS)}")
    body = _body_of(given)
    asked = completion_of({"model": request.model_name, **body, "prompt": "-"})
    if type(timeout_us) is not int or timeout_us < 0:
        raise invalid("timeout", f"is {shown(timeout_us)}; must be a number of microseconds")
    generation = asked.requests[0]
    generation.prompt.CopyFrom(prompt)
    generation.output.text = "text_output" in outputs
    generation.output.token_ids = not {"output_ids", "sequence_length"}.isdisjoint(outputs)
    if not LOGPROBS.isdisjoint(outputs) and not generation.output.HasField("logprobs"):
        generation.output.logprobs = 0
    return InferCall(
        generation,
        request.id,
        asked.is_stream,
        outputs,
        TensorSample() if own.get("exclude_input_in_output", True) else first,
        bool(own.get("triton_enable_empty_final_response")),
        timeout_us / 1e6,
    )


def _prompt_of(given: dict[str, Sequence[Any]]) -> tuple[inference_pb2.Prompt, TensorSample]:
    """The prompt, and the same as if it was output."""
    texts, ids = given.pop("text_input", None), given.pop("input_ids", None)
    if (texts is None) == (ids is None):
        raise invalid("inputs", "must have either text_input or input_ids")
    if ids is None:
        text = _one("text_input", texts or ())
        if not isinstance(text, str):
            raise invalid("text_input", "must have datatype BYTES")
        return inference_pb2.Prompt(text=text), TensorSample([text])
    length = _one("input_lengths", given.get("input_lengths", [len(ids)]))
    if type(length) is not int or not 0 < length <= len(ids):
        raise invalid("input_lengths", f"is {shown(length)}; must be from 1 to {len(ids)}, the number of input_ids")
    ids = ids[:length]
    try:
        return inference_pb2.Prompt(tokens=types.TokenIds(ids=ids)), TensorSample(ids=array("i", ids))
    except (TypeError, ValueError, OverflowError):
        raise invalid("input_ids", "must be integers from 0 to 2147483647") from None


def _one(name: str, values: Sequence[Any]) -> Any:
    """The value of a tensor that has one."""
    if len(values) != 1:
        raise invalid(name[:80], f"has {len(values)} values; must have one: send each prompt as a request")
    return values[0]


def _body_of(given: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """A body of /v1/completions from the other inputs and parameters, and from the object in sampling_parameters."""
    body: dict[str, Any] = {}
    settings = body_of(str(_one("sampling_parameters", given.pop("sampling_parameters", ["{}"]))).encode())
    for name in (*given, *settings):
        if NAMES.get(name, name) not in KNOWN:
            raise invalid(name[:80], "is no input or parameter that is served; leave it out")
    for name, values in given.items():
        own = NAMES.get(name, name)
        body[own] = [*body.get(own, ()), *values] if own in LISTS else _one(name, values)
    body |= {NAMES.get(name, name): value for name, value in settings.items()}
    if body.get("beam_width") == 1:  # clients of TensorRT-LLM send it always
        del body["beam_width"]
    for name in FLAGS & body.keys():  # vLLM's backend takes all values as texts
        body[name] = {"true": True, "false": False}.get(str(body[name]).lower(), body[name])
    return body


class KServeServicer(GRPCInferenceServiceServicer):
    """One method per RPC. `is_serving`: some model is ready."""

    def __init__(
        self, servicer: InferenceServicer, directory: ModelDirectory, lane: Lane, is_serving: Callable[[], bool]
    ) -> None:
        self._servicer = servicer
        self._directory = directory
        self._lane = lane
        self._is_serving = is_serving

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """The process answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Some model is ready."""
        return pb.ServerReadyResponse(ready=self._is_serving())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """The model has ready workers."""
        ready = any(model.info.model == request.name and model.ready_workers for model in self._directory.listed())
        return pb.ModelReadyResponse(ready=ready and request.version in VERSIONS)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name and version."""
        return pb.ServerMetadataResponse(name="quire", version=quire_version())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """The tensors of a model."""
        model = self._directory.find_text(request.name)
        response = pb.ModelMetadataResponse(name=request.name or model.name, versions=["1"], platform="quire")
        for name, (datatype, shape) in INPUTS.items():
            response.inputs.add(name=name, datatype=datatype, shape=shape)
        for name, (datatype, _) in OUTPUTS.items():
            response.outputs.add(name=name, datatype=datatype, shape=[-1])
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """One whole answer."""
        self._servicer.read_traceparent(context)
        call = await self._lane.run(request.ByteSize(), call_of, request)
        if call.is_stream:
            raise invalid("stream", "is true; call ModelStreamInfer")
        async with aclosing(self._answer(call, deadline_of(context))) as responses:
            return await anext(responses)

    async def ModelStreamInfer(  # type: ignore[override]  # it writes through its context
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Any number of requests at the same time. The error of one is its answer, and does not end the others."""
        room, writing = asyncio.Semaphore(MAX_OPEN), asyncio.Lock()
        tasks: set[asyncio.Task[None]] = set()

        def end(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            room.release()
            if not task.cancelled():
                task.exception()  # ignored: a write fails when the client has left, and `requests` ends too

        try:
            async for request in requests:
                await room.acquire()
                tasks.add(task := asyncio.create_task(self._stream(request, context, writing)))
                task.add_done_callback(end)
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)

    async def _stream(self, request: pb.ModelInferRequest, context: Context, writing: asyncio.Lock) -> None:
        self._servicer.read_traceparent(context)
        try:
            call = await self._lane.run(request.ByteSize(), call_of, request)
            async with aclosing(self._answer(call, deadline_of(context))) as responses:
                async for response in responses:
                    async with writing:
                        await context.write(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:
            shown = shown_error(STREAM_METHOD, error)
            failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
            words = f"[StatusCode.{shown.code.name}] {shown.message}"
            async with writing:
                await context.write(pb.ModelStreamInferResponse(error_message=words, infer_response=failed))

    async def _answer(self, call: InferCall, deadline: float | None) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The responses to one request. Raises ServiceError."""
        if call.timeout_s:
            own = asyncio.get_running_loop().time() + call.timeout_s
            deadline = min(own, deadline or math.inf)
        samples: list[TensorSample] = []
        accepted, num_open = inference_pb2.Accepted(), 0
        async with aclosing(self._servicer.generation.generate(call.request, deadline=deadline)) as events:
            async for event in events:
                if event.HasField("accepted"):
                    accepted, num_open = event.accepted, event.accepted.n
                    samples = [TensorSample([*call.first.text], call.first.ids[:]) for _ in range(num_open)]
                    continue
                num_open -= _add(samples, event)
                if call.is_stream:
                    yield _response(call, samples, accepted, is_final=not num_open and not call.has_empty_final)
                    samples = [TensorSample() for _ in samples]
        if not call.is_stream:
            yield _response(call, samples, accepted, is_final=not call.has_empty_final)
        if call.has_empty_final:
            yield _response(call, [], accepted, is_final=True)


def _add(samples: Sequence[TensorSample], event: inference_pb2.GenerateResponse) -> bool:
    """Add an event to its sample. Returns whether the sample has ended. Raises ServiceError if it has failed."""
    if event.HasField("finished"):
        if event.finished.reason in FAILED:
            raise error_of_sample(event.finished.message)
        samples[event.finished.index].end = event.finished
        return True
    if event.HasField("chunk"):
        sample = samples[event.chunk.index]
        sample.text.append(event.chunk.text)
        sample.ids.extend(event.chunk.token_ids)
        sample.logprobs.extend(event.chunk.logprobs.logprobs)
    return False


def _response(
    call: InferCall, samples: Sequence[TensorSample], accepted: inference_pb2.Accepted, *, is_final: bool
) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=accepted.model, model_version="1", id=call.id)
    response.parameters[FINAL].bool_param = is_final
    response.parameters["request_id"].string_param = accepted.request_id
    response.parameters["seed"].uint64_param = accepted.seed
    if samples:
        for name in call.outputs:
            datatype, value_of = OUTPUTS[name]
            add_output(response, name, datatype, [value_of(sample) for sample in samples])
    return response
