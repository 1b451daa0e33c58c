"""Schedulers that are added and removed while a gateway runs."""

from __future__ import annotations

import asyncio

import pytest

from gateway_svc.request.models import BundleCache
from gateway_svc.schedulers import directory
from gateway_svc.schedulers.directory import SchedulerClients
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from svc_common.serve import open_channel
from svc_common.tasks import cancel
from tests.processes.ports import free_port


class Client(SchedulerClient):
    """A client that does not connect."""

    async def run(self) -> None:
        await asyncio.Event().wait()


def make_clients() -> SchedulerClients:
    bundles = BundleCache()
    clients = SchedulerClients(
        lambda address: Client(address, gateway_id="test", bundles=bundles, open_channel=open_channel)
    )
    clients.events = Dispatcher(clients.all, patience_s=1.0)
    return clients


async def test_clients_follow_the_addresses() -> None:
    clients = make_clients()
    first, second = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    clients.update([first])
    (kept,) = clients.all
    clients.update([first, second])
    assert [client.address for client in clients.all] == [first, second]
    assert clients.all[0] is kept
    clients.update([second])
    assert [client.address for client in clients.all] == [second]
    running = asyncio.ensure_future(clients.run())
    await asyncio.sleep(0)
    await cancel(running)


async def test_an_attached_scheduler_stays_until_its_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PRUNE_INTERVAL_S", 0.01)
    clients = make_clients()
    clients.update([f"127.0.0.1:{free_port()}"])
    (client,) = clients.all
    client.is_connected = True
    clients.update([])
    running = asyncio.ensure_future(clients.run())
    await asyncio.sleep(0.05)
    assert clients.all == [client]
    client.is_connected = False
    async with asyncio.timeout(60):
        while clients.all:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await cancel(running)
