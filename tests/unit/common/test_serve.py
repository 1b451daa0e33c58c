"""The gRPC server of all services."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

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
