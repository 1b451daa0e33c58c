"""Helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

REPEAT_S = 5.0  # longer than tasks need to clean up
SLICE_S = 0.005  # far below the least pause of a stream that its client notices


class Slices:
    """Divides a loop over many parts: `rest` after each part lets other tasks run if the slice is over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + SLICE_S

    async def rest(self) -> None:
        if self._loop.time() >= self._ends_at:
            await asyncio.sleep(0)
            self._ends_at = self._loop.time() + SLICE_S


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended. Their results and exceptions are ignored.

    A cancellation can be lost: if it arrives when a timeout inside the task ends, e.g. one of a Redis client, the task
    sees the timeout only. So it is repeated.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=REPEAT_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never read


async def one_ahead(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items, none of them None. The next one is made while the caller uses one."""

    async def make() -> T | None:
        return await anext(items, None)

    async with aclosing(items):
        coming = asyncio.create_task(make())
        try:
            while (item := await coming) is not None:
                coming = asyncio.create_task(make())
                yield item
        finally:
            await cancel(coming)
