"""Registration against a scheduler that comes, goes, refuses and falls silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

from svc_common.errors import ErrorInterceptor, StaleEpochError
from svc_common.serve import open_channel
from worker_svc import registration as registration_module
from worker_svc.lifecycle import DRAINING, LOADING, READY, Lifecycle
from worker_svc.registration import Registration

HEARTBEAT_S = 0.05


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Accepts a worker, acknowledges its heartbeats and keeps all it heard. `refusal` refuses it, `is_silent` hangs."""

    def __init__(self) -> None:
        self.heard: list[scheduler_pb2.RegisterRequest] = []
        self.num_streams = 0
        self.refusal = ""
        self.is_silent = False
        self.ends_when: int | None = None

    async def Register(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        self.num_streams += 1
        accepted = scheduler_pb2.RegisterAccepted(heartbeat_interval_s=HEARTBEAT_S)
        answer = scheduler_pb2.RegisterResponse(accepted=accepted)
        async for request in request_iterator:
            self.heard.append(request)
            if self.refusal and answer.HasField("heartbeat_ack"):  # as a scheduler: accepted first, then refused
                raise StaleEpochError(self.refusal)
            if request.state == self.ends_when:
                return
            if not self.is_silent:
                yield answer
            answer = scheduler_pb2.RegisterResponse(heartbeat_ack=scheduler_pb2.HeartbeatAck())

    @property
    def states(self) -> list[int]:
        """What it heard, repetitions left out."""
        states = [request.state for request in self.heard]
        return [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


@asynccontextmanager
async def serve(scheduler: FakeScheduler, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def make_registration(channel: grpc.aio.Channel, lifecycle: Lifecycle, **options: Any) -> Registration:
    return Registration(
        channel=channel,
        scheduler="scheduler:1",
        worker_id="w0",
        address="127.0.0.1:1",
        worker_epoch=7,
        lifecycle=lifecycle,
        **options,
    )


@asynccontextmanager
async def registered(port: int, lifecycle: Lifecycle, **options: Any) -> AsyncIterator[Registration]:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        registration = make_registration(channel, lifecycle, **options)
        running = asyncio.ensure_future(registration.run())
        try:
            yield registration
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_worker_tells_its_whole_life() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port, registered(port, lifecycle) as registration:
        await until(lambda: registration.is_connected)
        lifecycle.set_progress(0.5)
        await until(lambda: scheduler.heard[-1].load_progress == 0.5)
        lifecycle.set_ready(scheduler_pb2.WorkerCapacity(num_blocks=9))
        await until(lambda: scheduler.heard[-1].state == READY)
        lifecycle.set_draining()
        assert await registration.told(DRAINING, 30)
    assert scheduler.states == [LOADING, READY, DRAINING]
    assert scheduler.num_streams == 1
    first, last = scheduler.heard[0], scheduler.heard[-1]
    assert (first.worker_id, first.address, first.worker_epoch) == ("w0", "127.0.0.1:1", 7)
    assert not first.HasField("capacity")
    assert last.capacity.num_blocks == 9


async def test_a_draining_worker_that_was_let_go_stays_away() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    scheduler.ends_when = DRAINING
    async with serve(scheduler) as port, open_channel(f"127.0.0.1:{port}") as channel:
        registration = make_registration(channel, lifecycle)
        running = asyncio.ensure_future(registration.run())
        await until(lambda: registration.is_connected)
        lifecycle.set_draining()
        await asyncio.wait_for(registration.told(DRAINING, 600), 30)
        await asyncio.wait_for(running, 30)
    assert scheduler.num_streams == 1


async def test_heartbeats_come_without_news() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port, registered(port, lifecycle):
        await until(lambda: len(scheduler.heard) >= 4)
    assert scheduler.num_streams == 1


async def test_a_worker_that_starts_first_waits_for_its_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port:
        pass
    async with registered(port, lifecycle) as registration:
        await until(lambda: "is not available" in caplog.text)
        assert not await registration.told(DRAINING, 30)  # nobody to tell: does not wait
        async with serve(scheduler, port):
            await until(lambda: registration.is_connected)
    assert caplog.text.count("is not available") <= 2  # once before it came, at most once when it left


async def test_a_restarted_scheduler_gets_the_registration_again() -> None:
    lifecycle = Lifecycle()
    lifecycle.set_ready(scheduler_pb2.WorkerCapacity(num_blocks=9))
    before, after = FakeScheduler(), FakeScheduler()
    async with serve(before) as port:
        pass
    async with registered(port, lifecycle):
        for scheduler in (before, after):
            async with serve(scheduler, port):
                await until(lambda heard=scheduler.heard: bool(heard))
    assert (after.heard[0].state, after.heard[0].capacity.num_blocks) == (READY, 9)


async def test_a_refusal_is_told_once_and_tried_again_slowly(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    scheduler.refusal = "block_size is 8, the other workers have 16; start it with --block-size 16"
    async with serve(scheduler) as port, registered(port, lifecycle, refused_pause_s=0.05) as registration:
        await until(lambda: scheduler.num_streams >= 3)
        assert not registration.is_connected
        scheduler.refusal = ""
        await until(lambda: registration.is_connected)
    refusals = [record for record in caplog.records if "refuses this worker" in record.message]
    assert [(record.levelno, "--block-size 16" in record.message) for record in refusals] == [(logging.ERROR, True)]


async def test_a_silent_scheduler_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(registration_module, "MIN_ACK_TIMEOUT_S", 0.2)
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port, registered(port, lifecycle) as registration:
        await until(lambda: registration.is_connected)
        scheduler.is_silent = True
        await until(lambda: scheduler.num_streams >= 2)
        scheduler.is_silent = False
        await until(lambda: registration.is_connected)
