"""Several gateway processes behind one port: connections are spread, Abort reaches every process, and killed
processes are restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from gateway_svc.process.processes import Child, Supervisor
from tests.processes.stack import POLL_S, ROOT, Service, Stack, wait_idle

NUM_PROCESSES = 3
PATIENCE_S = 20.0
LONG = 4000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("logs")) as stack:
        yield stack


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> Service:
    scheduler = stack.start_scheduler()
    sim = ("--executor", "sim", "--sim-step-ms", "5")
    stack.start_worker(scheduler, demo_model_dir(), *sim)
    gateway = stack.start_gateway(scheduler, flags=("--processes", str(NUM_PROCESSES)))
    gateway.wait_ready()
    return gateway


def children(gateway: Service) -> list[psutil.Process]:
    assert gateway.process is not None
    return psutil.Process(gateway.process.pid).children()


async def test_a_ready_gateway_serves_on_all_connections(gateway: Service) -> None:
    """The first test of this file: the gateway has just become ready."""
    seen: set[int] = set()
    async with asyncio.timeout(PATIENCE_S):
        while len(seen) < NUM_PROCESSES:
            connection = await Connection(gateway).open()
            assert (await connection.stub.ListModels(pb.ListModelsRequest())).models
            seen.add(connection.process.pid)
            await connection.channel.close()


def process_of(channel_port: int, gateway: Service) -> psutil.Process:
    """The gateway process that accepted the connection from this local port."""
    for child in children(gateway):
        if any(c.raddr and c.raddr.port == channel_port for c in child.net_connections("tcp")):
            return child
    raise AssertionError(f"no process of the gateway has a connection from port {channel_port}")


class Connection:
    """One HTTP/2 connection that is not shared, and the gateway process that accepted it."""

    def __init__(self, gateway: Service) -> None:
        before = _local_ports()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(gateway.address, options=options)
        self.stub = InferenceServiceStub(self.channel)
        self._gateway = gateway
        self._before = before

    async def open(self) -> Connection:
        await asyncio.wait_for(self.channel.channel_ready(), PATIENCE_S)
        port = int(self._gateway.address.rpartition(":")[2])
        (mine,) = _local_ports(port) - self._before
        self.process = process_of(mine, self._gateway)
        return self


def _local_ports(towards: int | None = None) -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in found if c.raddr and towards in (None, c.raddr.port)}


@contextlib.asynccontextmanager
async def connections_to_two(gateway: Service) -> AsyncIterator[tuple[Connection, Connection]]:
    """Two connections to different processes of the gateway."""
    opened = [await Connection(gateway).open()]
    async with asyncio.timeout(PATIENCE_S):
        while opened[-1].process.pid == opened[0].process.pid:
            opened.append(await Connection(gateway).open())
    yield opened[0], opened[-1]
    for connection in opened:
        await connection.channel.close()


def long_request(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        prompt=pb.Prompt(tokens=types.TokenIds(ids=[5, 6, 7])),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=LONG, ignore_eos=True),
    )


async def test_a_hanging_process_shows_in_the_health_of_the_others(gateway: Service) -> None:
    async with connections_to_two(gateway) as (one, other):
        watching = HealthStub(one.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        other.process.suspend()
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await one.stub.ListModels(pb.ListModelsRequest())).models  # it can still take requests
        other.process.resume()
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_abort_reaches_a_stream_of_another_process(stack: Stack, gateway: Service) -> None:
    async with connections_to_two(gateway) as (one, other):
        call = one.stub.Generate(long_request("mine"))
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).HasField("chunk")
        response = await other.stub.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]), timeout=PATIENCE_S)
        assert (list(response.aborted_ids), list(response.unknown_ids)) == (["mine"], ["unknown"])
        last = None
        while (event := await call.read()) is not grpc.aio.EOF:
            last = event
        assert last is not None
        assert last.finished.reason == types.FINISH_REASON_ABORTED
    async with await AsyncClient.connect(gateway.address) as client:
        await wait_idle(stack, client)


async def test_streams_of_a_killed_process_resume(gateway: Service) -> None:
    tokens = [5, 6, 7]
    async with await AsyncClient.connect(gateway.address) as client:
        alone = await client.generate(token_ids=tokens, max_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
        victims = {child.pid for child in children(gateway)}
        async with client.stream(token_ids=tokens, max_tokens=300, temperature=1.0, seed=3, ignore_eos=True) as stream:
            num_read = 0
            async for delta in stream:
                num_read += len(delta.token_ids)
                if num_read > 20 and victims:
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                    victims = set()
            result = await stream.result()
    assert result.token_ids == alone.token_ids
    assert result.resumes >= 1


async def test_dead_processes_are_restarted(gateway: Service) -> None:
    victim = children(gateway)[0].pid
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while len({child.pid for child in children(gateway)} - {victim}) < NUM_PROCESSES:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    async with await AsyncClient.connect(gateway.address) as client:
        assert (await client.generate(token_ids=[5], max_tokens=2, ignore_eos=True)).token_ids


def test_a_port_in_use_is_reported(gateway: Service) -> None:
    command = [
        sys.executable,
        "-m",
        "gateway_svc.service",
        "--listen",
        gateway.address,
        "--scheduler",
        "localhost:1",
    ]
    end = subprocess.run([*command, "--processes", "2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert end.returncode == 1
    assert f"cannot listen on {gateway.address}: Address already in use" in end.stderr


def test_a_process_that_fails_at_its_start_ends_the_gateway(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        metrics = f"127.0.0.1:{taken.getsockname()[1]}"
        # steady_s = 1e9: any exit counts as a failed start, however slow this machine is.
        imports = "from gateway_svc import service; from gateway_svc.process import processes"
        code = f"{imports}; processes.BACKOFF = processes.Backoff(0.2, 5.0, 1e9); service.main()"
        command = [sys.executable, "-c", code, "--listen", "127.0.0.1:0", "--scheduler", "localhost:1"]
        end = subprocess.run(
            [*command, "--processes", "2", "--metrics-listen", metrics],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert end.returncode == 1
    assert f"--metrics-listen: cannot listen on {metrics}" in end.stderr
    assert "process 0 failed to start (status 3)" in end.stderr


async def test_a_process_that_cannot_be_restarted_is_retried_while_the_others_run() -> None:
    commands = [
        ["/bin/sleep", "60"],
        ["/nowhere/sleep", "60"],
        ["/bin/sleep", "60"],
    ]  # commands of the first three starts
    victim, other = Child(0, commands.__getitem__), Child(1, lambda start: ["/bin/sleep", "60"])
    running = asyncio.create_task(Supervisor([victim, other]).run())
    try:
        await wait_alive(victim, num_starts=1)
        await wait_alive(other, num_starts=1)
        victim.signal(signal.SIGKILL)
        await wait_alive(victim, num_starts=3)
        assert is_alive(other)
        assert other.num_starts == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
    finally:
        running.cancel()
        for child in (victim, other):
            child.signal(signal.SIGKILL)


async def wait_alive(child: Child, *, num_starts: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while child.num_starts < num_starts or not is_alive(child):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def is_alive(child: Child) -> bool:
    return child.process is not None and child.process.returncode is None


async def test_a_process_that_cannot_be_started_at_all_ends_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    def no_process_ids(start: int) -> list[str]:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    assert await Supervisor([Child(0, no_process_ids)]).run() == 1
    assert "cannot start process 0: [Errno 11] Resource temporarily unavailable" in caplog.text


async def test_a_program_that_does_not_exist_ends_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    assert await Supervisor([Child(0, lambda start: ["/nowhere/sleep"])]).run() == 1
    assert "process 0 failed to start (status 1)" in caplog.text


async def test_sigterm_drains_all_processes(gateway: Service) -> None:
    """The last test of this file, because it ends the gateway."""
    pids = [child.pid for child in children(gateway)]
    async with (
        await AsyncClient.connect(gateway.address) as client,
        client.stream(token_ids=[9], max_tokens=100, ignore_eos=True, temperature=0.0) as stream,
    ):
        await anext(aiter(stream))
        gateway.signal(signal.SIGTERM)
        result = await stream.result()
    assert len(result.token_ids) == 100
    assert result.resumes == 0
    assert await asyncio.to_thread(gateway.wait) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
