"""Looking up prefixes that others published to Redis: for who only wants a hint, and wants it at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from prefix_index.index import PrefixSearch

log = logging.getLogger(__name__)

PING_TIMEOUT_S = 1.0


class RedisPrefixReader:
    """Reads the index. No method raises because of the server, none waits longer than `timeout_s`.

    While the server does not answer nobody asks it: one task pings it every `pause_s`. Raises ValueError for a URL
    that cannot be one.
    """

    def __init__(self, url: str, *, namespace: str = "quire", timeout_s: float = 0.02, pause_s: float = 1.0) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=PING_TIMEOUT_S,
            socket_connect_timeout=PING_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        self._search = PrefixSearch(self._redis, namespace)
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._is_up = False
        self._has_warned = False
        self._is_closed = False
        self.num_errors = 0  # calls that the server did not answer
        self._went_down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """The server answers."""
        return self._is_up

    def start(self) -> None:
        """Begin to speak with the server; called once, on the event loop."""
        self._task = asyncio.create_task(self._keep_up())

    async def lookup(self, digests: Sequence[bytes]) -> dict[int, int]:
        """For a chain of block digests: how many of the leading ones the best worker of each scheduler holds.

        Schedulers are named by their epoch, as in Welcome. Nobody holds any, or no answer in time: empty.
        """
        if not digests or not self._is_up:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await self._search.leading_blocks(digests)
                owners = await self._search.owners(held)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._on_problem(error)
            return {}
        best: dict[int, int] = {}
        for holder, epoch in owners.items():
            best[epoch] = max(best.get(epoch, 0), held[holder])
        return best

    async def close(self) -> None:
        """Stop asking."""
        self._is_closed = True  # the client swallows a cancellation that meets it while it connects
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
            except (RedisError, OSError, TimeoutError) as error:
                self._on_problem(error)
                await asyncio.sleep(self._pause_s)
                continue
            if not self._is_up:
                log.info("redis answers; replicas are chosen by cached prefixes")
            self._is_up = True
            self._went_down.clear()
            await self._went_down.wait()
            await asyncio.sleep(self._pause_s)

    def _on_problem(self, error: BaseException) -> None:
        self.num_errors += 1
        if self._is_up or not self._has_warned:
            log.warning("redis does not answer (%s); serving goes on without it", str(error) or type(error).__name__)
        self._is_up, self._has_warned = False, True
        self._went_down.set()
