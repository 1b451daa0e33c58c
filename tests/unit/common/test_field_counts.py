"""Messages with very many fields are refused before they are decoded; valid ones never are."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from quire.v1 import inference_pb2 as pb

from svc_common import calls
from svc_common.calls import (
    MAX_FIELDS,
    NUMBERS_PER_FIELD,
    ErrorInterceptor,
    TooManyFieldsError,
    check_field_count,
    layout_of,
)

GENERATE = layout_of(pb.GenerateRequest.DESCRIPTOR)


def generate(**prompt: Any) -> bytes:
    return pb.GenerateRequest(prompt=pb.Prompt(**prompt)).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        generate(text="x" * (4 << 20)),
        generate(tokens={"ids": range(1 << 20)}),
        generate(
            chat={"messages": [{"role": "tool", "content": "some text", "tool_call_id": "id", "name": "f"}] * 10_000}
        ),
        pb.GenerateRequest(
            prompt={"tokens": {"ids": range(1 << 20)}},
            continuation={"samples": [{"output_token_ids": range(1 << 16)}] * 15},
        ).SerializeToString(),
    ],
)
def test_the_largest_valid_requests_pass(data: bytes) -> None:
    check_field_count(data, GENERATE)


@pytest.mark.parametrize(
    "data",
    [
        generate(chat={"messages": [{}] * (2 * MAX_FIELDS)}),
        pb.GenerateRequest(stop={"stop": [""] * (2 * MAX_FIELDS)}).SerializeToString(),
        pb.GenerateRequest(continuation={"samples": [{}] * (2 * MAX_FIELDS)}).SerializeToString(),
        generate(tokens={"ids": [5] * (NUMBERS_PER_FIELD * MAX_FIELDS + NUMBERS_PER_FIELD)}),
        pb.GenerateRequest(sampling={"allowed_token_ids": [70_000] * 3_000_000}).SerializeToString(),
        b"\x1a\x00" * (2 * MAX_FIELDS),  # prompt, again and again
        b"\xf8\x7f\x00" * (2 * MAX_FIELDS),  # a field that the message does not have
        b"\xfb\x7f" * (2 * MAX_FIELDS),  # groups
    ],
)
def test_many_fields_are_refused_with_their_limit(data: bytes) -> None:
    with pytest.raises(TooManyFieldsError, match=f"it has {len(data)} bytes and more than {MAX_FIELDS} fields"):
        check_field_count(data, GENERATE)


def test_a_small_message_is_not_counted() -> None:
    data = generate(chat={"messages": [{}] * 25_000})
    assert len(data) < calls.SMALL_BYTES
    check_field_count(data, GENERATE)


@pytest.mark.parametrize("end", [b"\x1a", b"\x1a\xff", b"\x1a\xff\xff\xff\xff\x0f", b"\xff" * 100])
def test_malformed_data_is_left_to_the_decoder(end: bytes) -> None:
    data = generate(text="x" * 100_000) + end
    check_field_count(data, GENERATE)
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(data)


async def test_a_server_refuses_before_it_decodes() -> None:
    decoded = []

    async def handle(request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        decoded.append(request)
        return pb.AbortResponse()

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    handler = grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=pb.AbortRequest.FromString, response_serializer=pb.AbortResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Abort": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Service/Abort")
        with pytest.raises(grpc.aio.AioRpcError, match=r"request of test\.Service/Abort has too many fields") as caught:
            await call(b"\x0a\x00" * (2 * MAX_FIELDS), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not decoded
        await call(b"\x0a\x00" * 10_000, timeout=10)
    await server.stop(None)
    assert len(decoded) == 1
