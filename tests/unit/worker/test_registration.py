"""Registration with schedulers that start, stop, refuse and freeze; one scheduler and several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.v1 import types_pb2

from svc_common.calls import ErrorInterceptor
from svc_common.errors import StaleEpochError, UnavailableError
from worker_svc import registration as registration_module
from worker_svc import schedulers as schedulers_module
from worker_svc.lifecycle import DRAINING, LOADING, READY, Lifecycle
from worker_svc.registration import Registration
from worker_svc.schedulers import count_workers, preference

HEARTBEAT_S = 0.05


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Accepts a worker, acknowledges its heartbeats and keeps all messages. `refusal` refuses it, `is_silent` hangs."""

    def __init__(self) -> None:
        self.heard: list[scheduler_pb2.RegisterRequest] = []
        self.num_streams = 0
        self.refusal = ""
        self.is_silent = False
        self.ends_when: int | None = None
        self.num_workers = self.num_earlier = 0  # counts reported to the worker
        self.model = self.revision = ""  # names of its workers
        self.health = health.aio.HealthServicer()
        self.num_open = 0
        self.kick = asyncio.Event()  # ends open streams

    async def Register(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        self.num_streams += 1
        self.num_open += 1
        try:
            async for response in self._answer(request_iterator):
                yield response
        finally:
            self.num_open -= 1

    async def _answer(self, requests: Any) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        accepted = scheduler_pb2.RegisterAccepted(heartbeat_interval_s=HEARTBEAT_S)
        answer = scheduler_pb2.RegisterResponse(accepted=accepted)
        async for request in requests:
            self.heard.append(request)
            if self.refusal and answer.HasField("heartbeat_ack"):  # like a scheduler: accepts first, then refuses
                raise StaleEpochError(self.refusal)
            if self.kick.is_set():
                self.kick.clear()
                raise UnavailableError("the lease ended; register again")
            if request.state == self.ends_when:
                return
            if not self.is_silent:
                yield answer
            acknowledgement = scheduler_pb2.HeartbeatAck(num_workers=self.num_workers, num_earlier=self.num_earlier)
            answer = scheduler_pb2.RegisterResponse(heartbeat_ack=acknowledgement)

    async def CountWorkers(self, request: Any, context: Any) -> scheduler_pb2.CountWorkersResponse:
        return scheduler_pb2.CountWorkersResponse(
            num_workers=self.num_workers, model=self.model, revision=self.revision
        )

    @property
    def states(self) -> list[int]:
        """The states that it received, without repetitions."""
        states = [request.state for request in self.heard]
        return [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


@asynccontextmanager
async def serve(scheduler: FakeScheduler, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    await scheduler.health.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(scheduler.health, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@dataclass
class Work:
    """An executor that only counts."""

    rows_used: int = 0
    num_orders: int = 0
    idle_s: float = 0.0
    is_stuck: bool = False
    released: list[str] = field(default_factory=list)

    def release(self, reason: str) -> None:
        self.released.append(reason)


def make_registration(ports: list[int], lifecycle: Lifecycle, **options: Any) -> Registration:
    return Registration(
        schedulers=[f"127.0.0.1:{port}" for port in ports],
        worker_id="w0",
        address_towards=lambda _: "127.0.0.1:1",
        worker_epoch=7,
        lifecycle=lifecycle,
        **{"work": Work()} | options,
    )


@asynccontextmanager
async def registered(port: int | list[int], lifecycle: Lifecycle, **options: Any) -> AsyncIterator[Registration]:
    registration = make_registration([port] if isinstance(port, int) else port, lifecycle, **options)
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


async def test_a_worker_reports_all_its_states() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port, registered(port, lifecycle) as registration:
        await until(lambda: registration.is_connected)
        lifecycle.set_progress(0.5)
        await until(lambda: scheduler.heard[-1].load_progress == 0.5)
        lifecycle.set_ready(scheduler_pb2.WorkerCapacity(num_blocks=9))
        await until(lambda: scheduler.heard[-1].state == READY)
        lifecycle.set_draining()
        assert await registration.acknowledged(DRAINING, 30)
    assert scheduler.states == [LOADING, READY, DRAINING]
    assert scheduler.num_streams == 1
    first, last = scheduler.heard[0], scheduler.heard[-1]
    assert (first.worker_id, first.address, first.worker_epoch) == ("w0", "127.0.0.1:1", 7)
    assert not first.HasField("capacity")
    assert last.capacity.num_blocks == 9


async def test_a_released_draining_worker_does_not_register_again() -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    scheduler.ends_when = DRAINING
    async with serve(scheduler) as port:
        registration = make_registration([port], lifecycle)
        running = asyncio.ensure_future(registration.run())
        await until(lambda: registration.is_connected)
        lifecycle.set_draining()
        await asyncio.wait_for(registration.acknowledged(DRAINING, 600), 30)
        await asyncio.wait_for(running, 30)
    assert scheduler.num_streams == 1


async def test_a_refusal_is_logged_once_and_retried_slowly(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    scheduler.refusal = "block_size is 8, the other workers have 16; start it with --block-size 16"
    async with serve(scheduler) as port, registered(port, lifecycle, refused_pause_s=0.05) as registration:
        await until(lambda: scheduler.num_streams >= 3)
        assert not registration.is_connected
        scheduler.refusal = ""
        await until(lambda: registration.is_connected)
    refusals = [record for record in caplog.records if "refuses this worker" in record.message]
    assert [(record.levelno, "--block-size 16" in record.message) for record in refusals] == [(logging.ERROR, True)]


async def test_a_silent_scheduler_gets_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(registration_module, "MIN_ACK_TIMEOUT_S", 0.2)
    scheduler, lifecycle = FakeScheduler(), Lifecycle()
    async with serve(scheduler) as port, registered(port, lifecycle) as registration:
        await until(lambda: registration.is_connected)
        scheduler.is_silent = True
        await until(lambda: scheduler.num_streams >= 2)
        scheduler.is_silent = False
        await until(lambda: registration.is_connected)


# -- several schedulers ------------------------------------------------------------------------------------------------


@dataclass
class Replicas:
    """Two schedulers in the worker's order of preference."""

    first: FakeScheduler
    second: FakeScheduler
    ports: list[int]

    def address(self, index: int) -> str:
        return f"127.0.0.1:{self.ports[index]}"


@asynccontextmanager
async def replicas() -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        schedulers = {}
        for _ in range(2):
            scheduler = FakeScheduler()
            schedulers[f"127.0.0.1:{await stack.enter_async_context(serve(scheduler))}"] = scheduler
        order = preference("w0", list(schedulers))
        ports = [int(address.rpartition(":")[2]) for address in order]
        yield Replicas(schedulers[order[0]], schedulers[order[1]], ports)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROBE_INTERVAL_S": 0.05, "STEADY_S": 0.0}.items():
        monkeypatch.setattr(registration_module, name, value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with a silent scheduler. In other tests a busy machine could seem silent."""
    for name in ("OPEN_TIMEOUT_S", "MIN_ACK_TIMEOUT_S"):
        monkeypatch.setattr(registration_module, name, 0.3)
    monkeypatch.setattr(schedulers_module, "PROBE_TIMEOUT_S", 0.3)


def test_each_worker_has_its_own_stable_order() -> None:
    schedulers = [f"s{i}:1" for i in range(3)]
    orders = {f"w{i}": preference(f"w{i}", schedulers) for i in range(300)}
    for scheduler in schedulers:
        assert 70 <= sum(order[0] == scheduler for order in orders.values()) <= 130
    for worker, order in orders.items():
        assert preference(worker, [*reversed(schedulers), "s0:1"]) == order
        assert [s for s in preference(worker, [*schedulers, "s3:1"]) if s != "s3:1"] == order


async def test_a_worker_leaves_a_frozen_scheduler_for_the_other_one(impatient: None) -> None:
    lifecycle = Lifecycle()
    lifecycle.set_ready(scheduler_pb2.WorkerCapacity(num_blocks=9))
    async with replicas() as r, registered(r.ports, lifecycle) as registration:
        await until(lambda: registration.is_connected)
        r.first.is_silent = True
        await until(lambda: registration.scheduler == r.address(1) and not r.first.num_open)
        assert (r.second.heard[0].state, r.second.heard[0].capacity.num_blocks) == (READY, 9)


async def test_a_refusing_scheduler_is_avoided_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with replicas() as r:
        r.first.refusal = "block_size is 8, the other workers have 16"
        async with registered(r.ports, Lifecycle()) as registration:
            await until(lambda: registration.scheduler == r.address(1))
            r.second.kick.set()
            await until(lambda: r.second.num_streams == 2 and registration.is_connected)
        assert r.first.num_streams == 1
    assert caplog.text.count("refuses this worker") == 1


async def test_a_scheduler_that_used_this_worker_is_retried_first(quick: None) -> None:
    work = Work()
    async with replicas() as r, registered(r.ports, Lifecycle(), work=work) as registration:
        await until(lambda: registration.is_connected)
        work.num_orders = 1
        r.first.kick.set()
        await until(lambda: r.first.num_streams == 2 and registration.is_connected)
        r.first.kick.set()  # the scheduler has not used the worker since
        await until(lambda: registration.scheduler == r.address(1))
        assert r.first.num_streams == 2


async def test_a_worker_moves_to_a_scheduler_that_has_two_workers_fewer(quick: None) -> None:
    work, lifecycle = Work(idle_s=99.0), Lifecycle()
    lifecycle.set_ready(scheduler_pb2.WorkerCapacity(num_blocks=9))
    async with replicas() as r, registered(r.ports, lifecycle, work=work) as registration:
        r.first.num_workers, r.first.num_earlier, r.first.ends_when = 3, 2, DRAINING
        r.second.num_workers = 2
        await heard_more(r.first)
        assert registration.scheduler == r.address(0)  # they differ by one
        r.first.num_earlier = 1
        await heard_more(r.first)
        r.second.num_workers = 1
        await heard_more(r.first)
        assert registration.scheduler == r.address(0)  # another worker moves
        r.first.num_earlier = 2
        await until(lambda: registration.scheduler == r.address(1) and not r.first.num_open)
        assert r.first.states == [READY, DRAINING]  # the scheduler moved its rows
        assert r.second.states == [READY]
        assert len(work.released) == 1
        r.first.num_workers, r.second.num_workers, r.second.num_earlier = 2, 2, 1
        await heard_more(r.second)
        assert registration.scheduler == r.address(1)


async def test_a_worker_does_not_move_to_a_scheduler_that_drains(quick: None) -> None:
    async with replicas() as r, registered(r.ports, Lifecycle(), work=Work(idle_s=99.0)) as registration:
        await r.second.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        r.first.num_workers, r.first.num_earlier = 3, 2
        await heard_more(r.first)
        assert registration.scheduler == r.address(0)
        await r.second.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await until(lambda: registration.scheduler == r.address(1))


async def heard_more(scheduler: FakeScheduler) -> None:
    """Wait for several heartbeats, and so for several probes of the other scheduler."""
    heard = len(scheduler.heard)
    await until(lambda: len(scheduler.heard) >= heard + 8)


async def test_unreachable_and_frozen_schedulers_report_no_number(impatient: None) -> None:
    async with serve(FakeScheduler()) as port:
        assert (await count_workers(f"127.0.0.1:{port}")).num_workers == 0
    assert await count_workers(f"127.0.0.1:{port}") is None
    frozen = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with frozen:
        assert await count_workers(f"127.0.0.1:{frozen.sockets[0].getsockname()[1]}") is None


def ready_with(revision: str) -> Lifecycle:
    lifecycle = Lifecycle()
    info = types_pb2.ModelInfo(model="m", revision=revision)
    lifecycle.set_ready(scheduler_pb2.WorkerCapacity(info=info))
    return lifecycle


async def test_a_worker_with_another_revision_than_another_schedulers_workers_is_not_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An empty scheduler would accept it, and requests would get tokens of two checkpoints."""
    async with replicas() as r:
        serving, empty = r.first, r.second
        serving.model, serving.revision, serving.refusal = "m", "r1", "this scheduler serves revision 'r1'"
        async with registered(r.ports, ready_with("r2")):
            await until(lambda: "serves revision 'r1' of model 'm', and this worker has 'r2'" in caplog.text)
        assert empty.heard == []


@pytest.mark.parametrize(("revision", "options"), [("r1", {}), ("r2", {"replaces_revision": True})])
async def test_a_worker_with_the_same_revision_or_a_replacing_one_is_ready(
    revision: str, options: dict[str, Any]
) -> None:
    async with replicas() as r:
        r.first.model, r.first.revision = r.second.model, r.second.revision = "m", "r1"
        async with registered(r.ports, ready_with(revision), **options):
            await until(lambda: any(request.state == READY for request in r.first.heard + r.second.heard))


async def test_schedulers_may_be_added_and_removed_while_the_worker_is_registered() -> None:
    first, second = FakeScheduler(), FakeScheduler()
    async with serve(second) as port_2, registered([], Lifecycle()) as registration:
        async with serve(first) as port_1:
            await asyncio.sleep(0.05)
            assert registration.scheduler is None  # it waits for a scheduler, and does not end
            registration.update([f"127.0.0.1:{port_1}"])
            await until(lambda: registration.is_connected)
            registration.update([f"127.0.0.1:{port_2}"])
            await asyncio.sleep(3 * HEARTBEAT_S)
            assert registration.scheduler == f"127.0.0.1:{port_1}"  # its session goes on
        await until(lambda: registration.scheduler == f"127.0.0.1:{port_2}")
        assert first.num_streams == 1
