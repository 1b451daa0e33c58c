"""Merges the events of several generations into one stream, and limits its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.v1 import inference_pb2 as pb

from svc_common.errors import DeadlineError
from svc_common.tasks import cancel

Events = AsyncGenerator[pb.GenerateResponse, None]
Numbered = AsyncGenerator[tuple[int, pb.GenerateResponse], None]
STARTED_AT_ONCE = 4
MAX_QUEUED = 64  # number of events that wait for a slow reader; further tokens wait in the journals


async def merged(streams: Sequence[Events]) -> Numbered:
    """Yields every event with the index of its stream. Nothing is yielded before every stream has its first event, so
    that a refused stream raises before any output. Raises the exceptions of the streams. Closing it closes all streams.
    """
    try:
        if len(streams) == 1:
            async for alone in streams[0]:
                yield 0, alone
            return
        for first in enumerate(await _first_events(streams)):
            yield first
        queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]] = asyncio.Queue(MAX_QUEUED)
        pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
        try:
            num_open = len(streams)
            while num_open:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            await cancel(*pumps)
    finally:
        for stream in streams:
            await stream.aclose()


async def within(timeout_s: float, events: Numbered) -> Numbered:
    """The events of a stream. Raises DeadlineError when `timeout_s` has passed since the first call."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(events):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineError(
                    f"timeout is {timeout_s:g} s, and the answer is not complete", field="timeout"
                ) from None
            yield event


async def _first_events(streams: Sequence[Events]) -> list[pb.GenerateResponse]:
    """Starts the streams in slices: planning a thousand requests takes longer than a pause of other streams may."""
    tasks: list[asyncio.Future[pb.GenerateResponse]] = []
    try:
        for number, stream in enumerate(streams, start=1):
            tasks.append(asyncio.ensure_future(anext(stream)))
            if not number % STARTED_AT_ONCE:
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def _pump(
    index: int, stream: Events, queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]]
) -> None:
    try:
        async for event in stream:
            await queue.put((index, event))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
