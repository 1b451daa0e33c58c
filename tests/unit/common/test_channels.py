"""Streams between services: messages with too many fields or bytes end their own stream and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)

from svc_common.calls import MAX_STREAM_FIELDS
from svc_common.channels import ReceiveError, read_bundle
from svc_common.serve import GrpcServer, open_channel

SERVICE = "quire.internal.v1.SchedulerService"
BOMB = b"\x2a\x00" * (MAX_STREAM_FIELDS + 1)  # Deltas.finished, empty
TOO_MANY = b"\x1a" + bytes([0x82, 0x89, 0x7A]) + BOMB  # AttachResponse.deltas of len(BOMB) = 2,000,002 bytes
SUBMIT = pb.AttachRequest(submit=pb.Submit(request_id="r")).SerializeToString()


class Echo(SchedulerServiceServicer):
    """Answers each message of a stream."""

    def __init__(self) -> None:
        self.num_pieces = 4

    async def Attach(self, requests: AsyncIterator[pb.AttachRequest], context: Any) -> AsyncIterator[pb.AttachResponse]:
        async for _ in requests:
            yield pb.AttachResponse(heartbeat=pb.SchedulerHeartbeat())

    async def Register(
        self, requests: AsyncIterator[pb.RegisterRequest], context: Any
    ) -> AsyncIterator[pb.RegisterResponse]:
        async for _ in requests:
            yield pb.RegisterResponse(heartbeat_ack=pb.HeartbeatAck())

    async def GetBundle(self, request: pb.GetBundleRequest, context: Any) -> AsyncIterator[pb.GetBundleResponse]:
        while self.num_pieces:
            self.num_pieces -= 1
            yield pb.GetBundleResponse(data=request.digest)


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, grpc.aio.Channel]]:
    server = GrpcServer(listen="127.0.0.1:0", service_names=[SERVICE], max_bytes={f"{SERVICE}/Register": 1000})
    servicer = Echo()
    add_SchedulerServiceServicer_to_server(servicer, server.grpc)
    async with open_channel(await server.start()) as channel:
        yield servicer, channel
    await server.grpc.stop(None)


def raw_attach(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Attach")()


async def rest(call: Any) -> None:
    async with asyncio.timeout(30):
        while await call.read() is not grpc.aio.EOF:
            continue


def test_the_bomb_is_a_valid_message() -> None:
    assert len(pb.AttachResponse.FromString(TOO_MANY).deltas.finished) == MAX_STREAM_FIELDS + 1


async def test_a_message_with_too_many_fields_ends_its_own_stream_only(echo: Any) -> None:
    _, channel = echo
    good, bad = raw_attach(channel), raw_attach(channel)
    for call in (good, bad):
        await call.write(SUBMIT)
        await call.read()
    await bad.write(b"\x12" + bytes([0x82, 0x89, 0x7A]) + b"\x62\x00" * (MAX_STREAM_FIELDS + 1))  # bad_words_ids
    with pytest.raises(grpc.aio.AioRpcError, match=f"has too many fields: .* more than {MAX_STREAM_FIELDS}") as caught:
        await rest(bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await good.write(SUBMIT)
    await good.read()
    good.cancel()


async def test_large_messages_with_few_fields_pass(echo: Any) -> None:
    _, channel = echo
    call = raw_attach(channel)
    await call.write(pb.AttachRequest(submit=pb.Submit(prompt_token_ids=b"1234" * (4 << 20))).SerializeToString())
    assert pb.AttachResponse.FromString(await call.read()).HasField("heartbeat")
    call.cancel()


async def test_a_message_above_the_limit_of_its_method_is_refused(echo: Any) -> None:
    _, channel = echo
    call = SchedulerServiceStub(channel).Register()
    await call.write(pb.RegisterRequest(worker_id="w"))
    await call.read()
    await call.write(pb.RegisterRequest(worker_id="w" * 1000))
    with pytest.raises(grpc.aio.AioRpcError, match=r"has 1003 bytes; at most 1000 are allowed"):
        await call.read()


async def test_a_message_in_a_message_without_end_is_left_to_the_decoder(echo: Any) -> None:
    """AttachRequest contains batches of AttachRequest."""
    data, tag = SUBMIT, pb.AttachRequest(batch=pb.AttachBatch()).SerializeToString()[:1]
    for _ in range(60):
        data = b"\x0a" + _length(data) + data  # AttachBatch.messages
        data = tag + _length(data) + data
    data += b"\x7a" + _length(b"x" * 70_000) + b"x" * 70_000  # an unknown field, so that the fields are counted
    _, channel = echo
    call = raw_attach(channel)
    await call.write(data)
    with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message"):
        await rest(call)
    with pytest.raises(DecodeError):
        pb.AttachRequest.FromString(data)


def _length(data: bytes) -> bytes:
    size, out = len(data), b""
    while size > 0x7F:
        out, size = out + bytes([size & 0x7F | 0x80]), size >> 7
    return out + bytes([size])


async def test_a_client_does_not_decode_a_message_with_too_many_fields(caplog: pytest.LogCaptureFixture) -> None:
    async def attach(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield pb.AttachResponse(heartbeat=pb.SchedulerHeartbeat()).SerializeToString()
        yield TOO_MANY

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(attach)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Attach": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = SchedulerServiceStub(channel).Attach()
        assert isinstance(await call.read(), pb.AttachResponse)
        assert await call.read() is None
    assert "Attach has too many fields" in caplog.text
    await server.stop(None)


async def test_a_bundle_is_read_up_to_its_limit(echo: Any) -> None:
    servicer, channel = echo
    stub = SchedulerServiceStub(channel)
    request = pb.GetBundleRequest(digest=b"x" * 1000)
    assert await read_bundle(stub.GetBundle(request), 4000) == b"x" * 4000
    servicer.num_pieces = 1 << 30
    with pytest.raises(ReceiveError, match="more than 3999 bytes, the limit of --max-bundle-bytes"):
        await read_bundle(stub.GetBundle(request), 3999)
    with pytest.raises(ReceiveError, match="is empty or cannot be decoded"):
        await read_bundle(stub.GetBundle(pb.GetBundleRequest()), 4000)
    servicer.num_pieces = 0
