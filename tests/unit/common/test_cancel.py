"""Tasks end when they are cancelled."""

from __future__ import annotations

import asyncio

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
