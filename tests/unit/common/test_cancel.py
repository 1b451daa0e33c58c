"""Tasks end when they are cancelled, and make the next item before it is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from svc_common import tasks


async def test_a_lost_cancellation_is_repeated(monkeypatch):
    monkeypatch.setattr(tasks, "REPEAT_S", 0.01)
    seen = []

    async def loses_the_first() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(1)
                if len(seen) > 1:
                    raise

    task = asyncio.create_task(loses_the_first())
    await asyncio.sleep(0)
    await tasks.cancel(task)
    assert task.cancelled()
    assert len(seen) == 2


async def test_the_next_item_is_made_while_one_is_used():
    made, wanted = [], asyncio.Semaphore(0)

    async def items() -> AsyncGenerator[int, None]:
        try:
            for number in range(1, 4):
                made.append(number)
                wanted.release()
                yield number
            raise ValueError("after the last one")
        finally:
            made.append(0)

    taken = tasks.one_ahead(items())
    assert await anext(taken) == 1
    await wanted.acquire()
    await wanted.acquire()
    assert made == [1, 2]
    assert [await anext(taken), await anext(taken)] == [2, 3]
    with pytest.raises(ValueError, match="after the last one"):
        await anext(taken)
    made.clear()
    taken = tasks.one_ahead(items())
    await anext(taken)
    await taken.aclose()
    assert made[-1] == 0
