"""Addresses of schedulers: `host:port`, or `dns:///name:port` for all addresses of a name.

    names = SchedulerNames(["dns:///schedulers.team.svc:50052"], on_change)
    names.start()          # calls `on_change` with the addresses that need no lookup
    await names.run()      # calls it whenever the addresses change

A name is looked up again every few seconds, so schedulers may be added and removed while the service runs. A failed
lookup keeps the addresses of the last one: a failure of DNS must not look like a loss of all schedulers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from svc_common.config import NAME_SCHEME

log = logging.getLogger(__name__)

LOOKUP_INTERVAL_S = 5.0
MIN_LOOKUP_INTERVAL_S = 0.5

Lookup = Callable[[str, int], Awaitable[list[str]]]


async def lookup(host: str, port: int) -> list[str]:
    """The IPv4 addresses of a name, else its IPv6 addresses: a host with both has one process. Raises OSError."""
    found = await asyncio.to_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = {ipaddress.ip_address(str(sockaddr[0])) for *_, sockaddr in found}
    version = min((address.version for address in addresses), default=4)
    return [_target(address, port) for address in sorted(a for a in addresses if a.version == version)]


def _target(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class SchedulerNames:
    """Looks up the names among the values of --scheduler. `on_change` runs on the event loop."""

    def __init__(
        self,
        schedulers: Sequence[str],
        on_change: Callable[[Sequence[str]], None],
        *,
        lookup: Lookup = lookup,
        interval_s: float = LOOKUP_INTERVAL_S,
    ) -> None:
        self._fixed = [scheduler for scheduler in schedulers if not scheduler.startswith(NAME_SCHEME)]
        self._names = [
            scheduler.removeprefix(NAME_SCHEME) for scheduler in schedulers if scheduler.startswith(NAME_SCHEME)
        ]
        self._on_change = on_change
        self._lookup = lookup
        self._interval_s = interval_s
        self._found: dict[str, list[str]] = {}  # addresses by name, of the last lookup that succeeded
        self._problems: dict[str, str] = {}
        self._hurry = asyncio.Event()
        self._announced: list[str] | None = None

    def start(self) -> None:
        """Report the addresses that need no lookup."""
        if self._fixed:
            self._announce()

    def hurry(self) -> None:
        """Look the names up soon, because no known scheduler is available."""
        self._hurry.set()

    async def run(self) -> None:
        """Report the addresses until cancelled. Without names it ends at once."""
        while self._names:
            for name in self._names:
                await self._look_up(name)
            self._announce()
            await asyncio.sleep(MIN_LOOKUP_INTERVAL_S)
            await self._wait()

    async def _look_up(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            self._found[name] = await self._lookup(host.strip("[]"), int(port))
        except OSError as error:
            self._record_problem(name, error.strerror or str(error))
            return
        if self._problems.pop(name, None):
            log.info("scheduler name %s is found again", name)

    def _record_problem(self, name: str, problem: str) -> None:
        if self._problems.get(name) != problem:
            kept = "keeping its last addresses" if self._found.get(name) else "waiting for its first address"
            log.warning("scheduler name %s cannot be looked up (%s); %s", name, problem, kept)
        self._problems[name] = problem

    def _announce(self) -> None:
        addresses = list(dict.fromkeys([*self._fixed, *(a for found in self._found.values() for a in found)]))
        if addresses == self._announced:
            return
        if self._names:
            log.info("schedulers: %s", ", ".join(addresses) or "none yet")
        self._announced = addresses
        self._on_change(addresses)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s * random.uniform(0.75, 1.25)):
                await self._hurry.wait()
        except TimeoutError:
            return
        self._hurry.clear()
