"""Both clients may start before the gateway, and see it soon after it is there."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_client import AsyncClient, Client

from tests.processes.stack import Stack

SOON_S = 8.0  # gRPC's synchronous stack alone needs ten


async def test_clients_that_were_first_connect_soon(tmp_path: Path) -> None:
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
