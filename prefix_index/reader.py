"""The gateway's side of the prefix index in Redis: quick lookups of the prefixes that schedulers have published."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from prefix_index.search import PrefixSearch
from svc_common.redis.connect import call_errors, connect, warn_of_eviction
from svc_common.redis.server import Availability, RedisServer

PING_TIMEOUT_S = 1.0


class RedisPrefixReader:
    """Reads the index. No method raises when the server fails, and no method waits longer than `timeout_s`.

    While the server does not answer, the only calls are the pings of one task, every `pause_s`. Raises ValueError for a
    malformed URL.
    """

    def __init__(
        self,
        server: RedisServer | str,
        *,
        namespace: str = "quire",
        timeout_s: float = 0.02,
        pause_s: float = 1.0,
    ) -> None:
        self._redis = connect(server, PING_TIMEOUT_S)
        self._server = Availability("replicas are chosen by cached prefixes")
        self._search = PrefixSearch(self._redis, namespace)
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._is_closed = False
        self._went_down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the server answers."""
        return self._server.is_up

    @property
    def num_errors(self) -> int:
        """Number of calls that the server did not answer."""
        return self._server.num_errors

    def start(self) -> None:
        """Start the task that calls the server. Call it once, on the event loop."""
        self._task = asyncio.create_task(self._keep_up())

    async def lookup(self, digests: Sequence[bytes]) -> dict[int, int]:
        """For a chain of block digests, the number of leading digests that the best worker of each scheduler holds.

        The keys are the schedulers' epochs, as in Welcome. Empty if no worker holds any, or if no answer came in time.
        """
        if not digests or not self.is_up:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await self._search.leading_blocks(digests)
                owners = await self._search.owners(held)
        except call_errors(ValueError) as error:
            self._on_error(error)
            return {}
        best: dict[int, int] = {}
        for holder, epoch in owners.items():
            best[epoch] = max(best.get(epoch, 0), held[holder])
        return best

    async def close(self) -> None:
        """End the background task and the connection."""
        self._is_closed = True  # the client swallows a cancellation that reaches it while it connects
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._redis.aclose()

    async def _keep_up(self) -> None:
        while not self._is_closed:
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self._redis.ping()
                    if not self.is_up:
                        await warn_of_eviction(self._redis)
            except call_errors() as error:
                self._on_error(error)
                await asyncio.sleep(self._pause_s)
                continue
            self._server.came_up()
            self._went_down.clear()
            await self._went_down.wait()
            await asyncio.sleep(self._pause_s)

    def _on_error(self, error: BaseException) -> None:
        self._server.went_down(error)
        self._went_down.set()
