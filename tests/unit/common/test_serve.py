"""The gRPC server of all services."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from svc_common.security.trust import Trust
from svc_common.serve import GrpcServer, open_channel


async def test_the_server_waits_for_the_next_call_with_one_task() -> None:
    """A task per registered method would make every call more expensive."""
    server = GrpcServer(listen="127.0.0.1:0", service_names=["a.B"])
    before = asyncio.all_tasks()
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        accepting = [task for task in asyncio.all_tasks() - before if "._request_" in repr(task)]
        assert len(accepting) == 1, accepting
    finally:
        await server.grpc.stop(None)


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_channels_between_services_use_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = GrpcServer(listen="127.0.0.1:0", service_names=["a.B"])
    address = await server.start()
    try:
        for channel in (open_channel(address), Trust("gateway").open_channel(address, "scheduler")):
            async with channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.grpc.stop(None)


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_reflection_has_both_of_its_names(package: str) -> None:
    server = GrpcServer(listen="127.0.0.1:0", service_names=["a.B"])
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(
                f"/{package}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = reflection_pb2.ServerReflectionRequest
            own = asked(file_containing_symbol=f"{package}.ServerReflection")
            answer, file = [one async for one in call(iter([asked(list_services="*"), own]))]
        (found,) = file.file_descriptor_response.file_descriptor_proto
        assert descriptor_pb2.FileDescriptorProto.FromString(found).package == package
        assert {"a.B", f"{package}.ServerReflection"} <= {one.name for one in answer.list_services_response.service}
    finally:
        await server.grpc.stop(None)
