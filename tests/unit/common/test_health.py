"""Check and Watch of a server, with grpc's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.serve import GrpcServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer(listen="127.0.0.1:0", service_names=["a.B"])
    await server.start()
    yield server
    await server.grpc.stop(None)


@pytest.fixture
async def stub(server: GrpcServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def watch(stub: Any, service: str = "") -> Any:
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30)


async def test_a_watcher_that_leaves_does_not_end_the_others(server: GrpcServer, stub: Any) -> None:
    leaving, staying = watch(stub), watch(stub)
    for call in (leaving, staying):
        assert (await call.read()).status == NOT_SERVING
    leaving.cancel()
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    server.set_serving(True)
    assert (await staying.read()).status == SERVING


async def test_list_has_the_status_of_every_service(server: GrpcServer) -> None:
    server.set_serving(True)
    message = descriptor_pb2.DescriptorProto(name="HealthListResponse")
    message.field.add(name="statuses", number=1, label=3, type=11, type_name=".test.list.HealthListResponse.Entry")
    entry = message.nested_type.add(name="Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".grpc.health.v1.HealthCheckResponse")
    file = descriptor_pb2.FileDescriptorProto(
        name="list.proto", package="test.list", syntax="proto3", dependency=[health_pb2.DESCRIPTOR.name]
    )
    file.message_type.append(message)
    pool = descriptor_pool.Default()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("test.list.HealthListResponse"))
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await channel.unary_unary("/grpc.health.v1.Health/List", response_deserializer=kind.FromString)(b"")
    statuses = {name: one.status for name, one in answer.statuses.items()}
    assert statuses == dict.fromkeys(("", "a.B", "grpc.health.v1.Health"), SERVING)


async def test_the_stop_ends_watch_streams_after_not_serving(server: GrpcServer, stub: Any) -> None:
    server.set_serving(True)
    call = watch(stub)
    assert (await call.read()).status == SERVING
    is_drained = asyncio.Event()
    stopped = asyncio.create_task(server.run_until_stopped(is_drained.wait, grace_s=600))
    server.stopping.set()
    assert (await call.read()).status == NOT_SERVING
    is_drained.set()
    assert await call.read() is grpc.aio.EOF
    async with asyncio.timeout(30):
        await stopped


async def test_compressed_requests_are_refused_between_our_services(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="x" * 10_000), compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
