"""Both clients may start before the gateway, and connect soon after it starts."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_client import AsyncClient, Client
from quire_client.demo import demo_model_dir

from tests.chart.cluster import PortProxy, Streams
from tests.processes.ports import free_port
from tests.processes.stack import Stack

SOON_S = 8.0  # with its default backoff, gRPC's synchronous stack needs ten seconds


async def test_clients_that_start_before_the_gateway_connect_soon(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with Stack(tmp_path) as stack, ThreadPoolExecutor(1) as pool:
        scheduler = stack.start_scheduler()
        gateway = stack.start_gateway(scheduler)
        gateway.kill()
        slow = loop.run_in_executor(pool, lambda: Client.connect(gateway.address, connect_timeout_s=60.0))
        quick = asyncio.create_task(AsyncClient.connect(gateway.address, connect_timeout_s=60.0))
        await asyncio.sleep(1.0)  # both have been refused by then
        gateway.start()
        async with await quick:
            reached_at = time.monotonic()
            with await slow:
                assert time.monotonic() - reached_at < SOON_S


async def test_connections_at_their_maximum_age_are_replaced_under_open_streams(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        sim = ("--executor", "sim", "--sim-step-ms", "20", "--num-blocks", "256")
        stack.start_worker(scheduler, demo_model_dir(), *sim)
        gateway = stack.start_gateway(scheduler, flags=("--max-connection-age-s", "0.5"))
        host, _, port = gateway.address.rpartition(":")
        connections: list[asyncio.StreamWriter] = []

        async def dial() -> Streams:
            streams = await asyncio.open_connection(host, int(port))
            connections.append(streams[1])
            return streams

        proxy, own_port = PortProxy(dial), free_port()
        async with await stack.connect(gateway):
            await proxy.start(host, own_port)
        async with await AsyncClient.connect(f"{host}:{own_port}", stall_timeout_s=None) as client:
            long = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=100, ignore_eos=True))
            async with asyncio.timeout(30.0):
                while len(connections) < 2:
                    await client.generate(token_ids=[4, 5], max_tokens=2, ignore_eos=True)
            result = await long
        await proxy.close()
    assert (result.usage.output_tokens, result.resumes) == (100, 0)
