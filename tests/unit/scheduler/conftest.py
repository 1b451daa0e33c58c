"""A scheduler in the test's own event loop, with toy workers and gateways that stop with the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from quire.internal.v1 import scheduler_pb2_grpc

from scheduler_svc.flags import make_parser
from scheduler_svc.service import build
from scheduler_svc.servicer import SERVICE_NAME, SchedulerParts, SchedulerServicer
from svc_common.config import parse
from svc_common.observe.inspection import Inspector
from svc_common.security.trust import Trust
from svc_common.serve import GrpcServer
from tests.unit.scheduler.toy_worker import ToyGateway, ToyWorker


@dataclass
class Stack:
    """One scheduler on a free port; `worker()` and `gateway()` add toys to it."""

    parts: SchedulerParts
    address: str
    cleanup: AsyncExitStack

    async def worker(self, worker_id: str = "w0", **options: Any) -> ToyWorker:
        worker = ToyWorker(self.address, worker_id, **options)
        self.cleanup.push_async_callback(worker.stop)
        return await worker.start()

    async def gateway(self) -> ToyGateway:
        gateway = ToyGateway(self.address)
        self.cleanup.push_async_callback(gateway.close)
        return await gateway.hello()


MakeStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def make_stack() -> AsyncIterator[MakeStack]:
    """`await make_stack("--max-waiting", "4")` serves a scheduler with these flags."""
    async with AsyncExitStack() as cleanup:

        async def make(*flags: str) -> Stack:
            # A toy worker's steps take no time: with bursts a request would end before the test can act on it.
            args = parse(make_parser(), ["--burst-ms", "0", *flags])
            parts = build(args, Trust("scheduler"))
            server = GrpcServer(listen="127.0.0.1:0", service_names=[SERVICE_NAME])
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
                SchedulerServicer(parts, Trust("scheduler"), Inspector("scheduler", "test", "", lambda: b"")),
                server.grpc,
            )
            address = await server.start()
            task = asyncio.create_task(parts.step_loop.run())

            async def stop() -> None:
                parts.gateways.close()
                await parts.pool.close()
                await server.grpc.stop(0.5)
                parts.step_loop.stop()
                await task
                await parts.index.close()

            cleanup.push_async_callback(stop)
            return Stack(parts, address, cleanup)

        yield make
