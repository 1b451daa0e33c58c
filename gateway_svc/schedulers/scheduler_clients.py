"""The connections to all schedulers, which may be added and removed while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway_svc.schedulers.scheduler_client import SchedulerClient, SchedulerEvents
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

PRUNE_INTERVAL_S = 5.0


class SchedulerClients:
    """Owns the clients and their tasks. `all` is one list for the life of the gateway, read by other parts.

    A client whose address is gone stays as long as its stream works: a scheduler that drains may be removed from DNS
    before its requests have ended.
    """

    def __init__(self, make_client: Callable[[str], SchedulerClient]) -> None:
        self.all: list[SchedulerClient] = []
        self.events: SchedulerEvents | None = None  # set before the first `update`
        self._make_client = make_client
        self._addresses: Sequence[str] = ()
        self._tasks: dict[SchedulerClient, asyncio.Task[None]] = {}

    def update(self, addresses: Sequence[str]) -> None:
        """These are the schedulers now: connect to new ones, remove those that are gone and not attached."""
        self._addresses = addresses
        known = {client.address for client in self.all}
        for address in addresses:
            if address not in known:
                self._add(address)
        self._remove_lost()

    async def run(self) -> None:
        """Remove clients that are detached after their address is gone, until cancelled; then end all clients."""
        try:
            while True:
                await asyncio.sleep(PRUNE_INTERVAL_S)
                self._remove_lost()
        finally:
            await cancel(*self._tasks.values())

    def _add(self, address: str) -> None:
        if self.events is None:
            raise RuntimeError("SchedulerClients.events is not set")
        client = self._make_client(address)
        client.events = self.events
        self.all.append(client)
        task = self._tasks[client] = asyncio.create_task(client.run())
        task.add_done_callback(lambda _: self._tasks.pop(client, None))

    def _remove_lost(self) -> None:
        gone = [c for c in self.all if c.address not in self._addresses and not c.is_connected]
        for client in gone:
            log.info("scheduler %s is gone", client.address)
            self.all.remove(client)
            self._tasks[client].cancel()
        if gone and self.events is not None:
            self.events.on_changed(gone[-1])
