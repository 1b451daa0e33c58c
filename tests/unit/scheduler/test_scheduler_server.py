"""The scheduler as a process: health, flags, signals, and the effect of a bug."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.flags import make_parser
from scheduler_svc.service import SchedulerProcess, build
from scheduler_svc.servicer import SERVICE_NAME
from svc_common.config import parse
from svc_common.security.trust import Trust
from tests.processes.ports import free_port
from tests.unit.scheduler.fakes import until
from tests.unit.scheduler.toy_worker import ToyGateway, ToyWorker, expected_tokens


@asynccontextmanager
async def scheduler_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A scheduler on a free port that is SERVING."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "scheduler_svc.service", "--listen", address, *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        await wait_serving(address)
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def wait_serving(address: str, service: str = "") -> None:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(30):
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service=service)
        response = await check(request, wait_for_ready=True)
        while response.status != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
            response = await check(request)


async def run_command(*flags: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "scheduler_svc.service", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, (out + err).decode()


async def test_drains_on_sigterm() -> None:
    async with scheduler_process() as (process, address):
        await wait_serving(address, SERVICE_NAME)
        worker, gateway = ToyWorker(address), await ToyGateway(address).hello()
        await worker.start()
        await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers, 30)
        await gateway.submit(1, [1, 2, 3], max_tokens=30)
        await until(lambda: len(gateway.tokens.get((1, 0), ())) > 3)
        worker.gate.clear()
        process.send_signal(signal.SIGTERM)
        await refused_soon(gateway)
        await until(lambda: gateway.welcomes[-1].ready_workers == 0)  # gateways leave
        worker.gate.set()
        await until(lambda: (1, 0) in gateway.finished)
        assert gateway.tokens[1, 0] == expected_tokens([1, 2, 3], 30)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        await gateway.close()
        await worker.stop()


async def refused_soon(gateway: ToyGateway) -> None:
    """Wait until new requests get UNAVAILABLE with a retry delay, because the signal has arrived."""
    for handle in range(2, 1000):
        await gateway.submit(handle, [handle], max_tokens=1)
        await until(lambda handle=handle: handle in gateway.replies)  # type: ignore[misc]
        refusal = gateway.replies[handle]
        if refusal is not None:
            assert refusal.code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert refusal.retry_after_ms
            return
        await gateway.cancel(handle)
    raise AssertionError("never refused")


async def test_a_second_signal_stops_the_process_at_once() -> None:
    async with scheduler_process("--drain-timeout-s", "60") as (process, address):
        worker, gateway = ToyWorker(address), await ToyGateway(address).hello()
        await worker.start()
        await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers, 30)
        worker.gate.clear()
        await gateway.submit(1, [1, 2, 3])
        await until(lambda: gateway.replies)
        process.send_signal(signal.SIGTERM)
        await refused_soon(gateway)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        await gateway.close()
        await worker.stop()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--listen", "nowhere"), "--listen"),
        (("--max-waiting", "0"), "--max-waiting"),
        (("--watermark", "2"), "--watermark"),
        (("--max-waiting-tokens", "0"), "--max-waiting-tokens"),
        (("--gateway-heartbeat-s", "-1"), "--gateway-heartbeat-s"),
        (("--redis", "http://x"), "redis://"),
        (("--heartbeat-timeout-s", "nan"), "--heartbeat-timeout-s"),
    ],
)
async def test_an_invalid_setting_stops_the_start(flags: tuple[str, ...], shown: str) -> None:
    code, text = await run_command(*flags)
    assert code == 2
    assert shown in text


@pytest.mark.parametrize("url", ["redis://:s3cret@cache:notaport/0", "redis://:s3cret/x@cache", "http://:s3cret@cache"])
def test_a_malformed_redis_url_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"--redis '[a-z]+://\*\*\*@cache.*write redis://") as caught:
        build(parse(make_parser(), ["--redis", url]), Trust("scheduler"))
    assert "s3cret" not in str(caught.value)


async def test_a_bug_in_the_step_loop_ends_the_process_with_a_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr("scheduler_svc.service.settle_gc", lambda: None)
    args = parse(make_parser(), ["--listen", "127.0.0.1:0", "--drain-timeout-s", "60"])
    trust = Trust("scheduler")
    parts = build(args, trust)
    parts.step_loop._post(broken)
    assert await asyncio.wait_for(SchedulerProcess(args, parts, trust).run(), 10) == 1
    assert "planted" in caplog.text
