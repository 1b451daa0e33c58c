"""KServe V2, vLLM's engine protocol and load reports over real gRPC with a fake scheduler."""

from __future__ import annotations

import json
import struct
from typing import Any

import grpc
import pytest
from quire.foreign import kserve_pb2 as kserve
from quire.foreign.kserve_pb2_grpc import GRPCInferenceServiceStub

from gateway_svc.foreign.kserve import call_of
from svc_common.errors import InvalidRequestError, ServiceError
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, until
from tests.unit.gateway.tokenizer_kinds import byte_level

IDS = byte_level().encode("Hello wörld", add_special_tokens=False).ids
CODES = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?", "UINT32": "I"}


def infer(outputs: tuple[str, ...] = (), request_id: str = "", **tensors: tuple[str, list[Any]]) -> Any:
    """A request as tritonclient sends it: raw contents."""
    request = kserve.ModelInferRequest(model_name="demo", id=request_id)
    for name, (datatype, values) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        parts = [struct.pack("<I", len(v)) + v for v in values] if datatype == "BYTES" else []
        raw = b"".join(parts) if parts else struct.pack(f"<{len(values)}{CODES[datatype]}", *values)
        request.raw_input_contents.append(raw)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def values_of(response: kserve.ModelInferResponse) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            found[tensor.name] = raw[4:].decode() if tensor.shape == [1] else raw
        else:
            found[tensor.name] = list(memoryview(raw).cast(CODES[tensor.datatype]))
    return found


TEXT = {"text_input": ("BYTES", [b"hello"])}


async def test_parameters_of_tritons_backends() -> None:
    settings = {"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stop": "x"}
    own = call_of(infer(**TEXT, sampling_parameters=("BYTES", [json.dumps(settings).encode()]))).request
    assert (own.model, own.prompt.text, own.sampling.temperature) == ("demo", "hello", 0.5)
    assert (own.stop.max_tokens, own.stop.ignore_eos, list(own.stop.stop)) == (7, True, ["x"])
    tensors = {
        "input_ids": ("INT32", [5, 6, 7, 0]), "input_lengths": ("INT32", [3]), "request_output_len": ("INT32", [9]),
        "runtime_top_k": ("INT32", [4]), "random_seed": ("UINT64", [2**63]), "end_id": ("INT32", [3]),
        "stop_words": ("BYTES", [b"a", b"b"]), "beam_width": ("INT32", [1]), "streaming": ("BOOL", [True]),
        "return_log_probs": ("BOOL", [True]), "pad_id": ("INT32", [0]),
    }  # fmt: skip
    call = call_of(infer(**tensors))
    own = call.request
    assert (list(own.prompt.tokens.ids), own.stop.max_tokens, own.sampling.top_k) == ([5, 6, 7], 9, 4)
    assert (own.sampling.seed, list(own.stop.stop_token_ids), list(own.stop.stop)) == (2**63, [3], ["a", "b"])
    assert (call.is_stream, own.output.HasField("logprobs"), own.output.text) == (True, True, False)
    assert call.outputs == ["output_ids", "output_log_probs"]
    request = infer(**TEXT)
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["timeout"].int64_param = 2_000_000
    assert (call_of(request).request.stop.max_tokens, call_of(request).timeout_s) == (3, 2.0)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "must have either text_input or input_ids"),
        ({**TEXT, "input_ids": ("INT32", [1])}, "must have either"),
        ({"text_input": ("BYTES", [b"a", b"b"])}, "text_input has 2 values; must have one"),
        ({"text_input": ("INT32", [4])}, "text_input must have datatype BYTES"),
        ({"input_ids": ("INT32", [-1])}, "input_ids must be integers"),
        ({"input_ids": ("INT32", [1]), "input_lengths": ("INT32", [5])}, "input_lengths is 5; must be from 1 to 1"),
        ({**TEXT, "image": ("BYTES", [b"x"])}, "image is no input or parameter that is served"),
        ({**TEXT, "prompt_embeds": ("BYTES", [b"x"])}, "prompt_embeds is no input"),
        ({**TEXT, "sampling_parameters": ("BYTES", [b'{"prompt": "x"}'])}, "prompt is no input"),
        ({**TEXT, "sampling_parameters": ("BYTES", [b"[1]"])}, "must be a JSON object"),
        ({**TEXT, "top_p": ("FP32", [7.0])}, "top_p is 7; must be"),
        ({**TEXT, "timeout": ("BYTES", [b"x"])}, "timeout is 'x'; must be a number of microseconds"),
    ],
)
def test_wrong_inputs_are_named(tensors: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        call_of(infer(**tensors))


def test_tensors_that_contradict_themselves() -> None:
    cut = infer(**TEXT)
    cut.raw_input_contents[0] = b"\xff\xff\xff\xff"
    shaped = infer(**TEXT)
    shaped.inputs[0].shape[:] = [3]
    deep = infer(**TEXT)
    deep.inputs[0].shape[:] = [1 << 62] * 9
    missing = infer(**TEXT)
    missing.raw_input_contents.append(b"")
    halved = infer(input_ids=("INT32", [1]))
    halved.raw_input_contents[0] = b"\1\0"
    odd = infer(**TEXT)
    odd.inputs[0].datatype = "FP16"
    many = infer(**TEXT)
    many.raw_input_contents[0] = bytes(4 * 5000)
    for request in (cut, shaped, deep, missing, halved, odd, many, infer(**TEXT, outputs=("other",))):
        with pytest.raises(InvalidRequestError):
            call_of(request)
    versioned = infer(**TEXT)
    versioned.model_version = "7"
    with pytest.raises(ServiceError, match="the only version is 1"):
        call_of(versioned)


async def test_whole_answers_of_texts_and_ids(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(IDS)
    stub = GRPCInferenceServiceStub(gateway.channel)
    outputs = ("text_output", "finish_reason", "num_output_tokens", "output_ids", "sequence_length")
    response = await stub.ModelInfer(infer(outputs, "my id", **TEXT, exclude_input_in_output=("BOOL", [False])))
    assert (response.id, response.model_name, response.parameters["triton_final_response"].bool_param) == (
        "my id", "demo", True,
    )  # fmt: skip
    assert values_of(response) == {
        "text_output": "helloHello wörld", "finish_reason": "length", "num_output_tokens": [len(IDS)],
        "output_ids": IDS, "sequence_length": [len(IDS)],
    }  # fmt: skip
    two = await stub.ModelInfer(infer(("output_ids",), input_ids=("INT64", [5]), n=("INT32", [2])))
    assert (list(two.outputs[0].shape), values_of(two)["output_ids"]) == ([2, len(IDS)], 2 * IDS)
    typed = kserve.ModelInferRequest(model_name="demo")  # contents instead of raw contents
    typed.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    assert values_of(await stub.ModelInfer(typed)) == {"text_output": "Hello wörld"}
    assert (await stub.ModelReady(kserve.ModelReadyRequest(name="demo"))).ready
    assert not (await stub.ModelReady(kserve.ModelReadyRequest(name="other"))).ready
    with pytest.raises(grpc.aio.AioRpcError, match="call ModelStreamInfer"):
        await stub.ModelInfer(infer(**TEXT, stream=("BOOL", [True])))


async def test_an_error_ends_one_request_of_a_stream(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(IDS)
    call = GRPCInferenceServiceStub(gateway.channel).ModelStreamInfer()
    stream = ("BOOL", [True])
    for i in range(20):
        bad = {"top_p": ("FP32", [7.0])} if i % 2 else {}
        await call.write(infer((), str(i), **TEXT, stream=stream, **bad))
    await call.done_writing()
    texts, errors, finals = dict.fromkeys(map(str, range(0, 20, 2)), ""), set(), []
    async for response in call:
        answer = response.infer_response
        if response.error_message:
            assert response.error_message.startswith("[StatusCode.INVALID_ARGUMENT] top_p is 7")
            errors.add(answer.id)
            continue
        texts[answer.id] += values_of(answer)["text_output"]
        finals += [answer.id] * answer.parameters["triton_final_response"].bool_param
    assert texts == dict.fromkeys(texts, "Hello wörld")
    assert (sorted(finals), len(errors)) == (sorted(texts), 10)


async def test_an_undecodable_message_ends_the_stream(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await call.write(infer((), "0", **TEXT).SerializeToString())
    await until(lambda: len(scheduler.submits) == 1)
    await call.write(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message") as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: len(scheduler.cancels) == 1)
