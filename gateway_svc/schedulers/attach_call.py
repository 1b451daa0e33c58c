"""The Attach call of grpc.aio: writing to it, and a cancellation that it swallows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from quire.internal.v1 import scheduler_pb2 as pb

AttachCall = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


# A batch ends with the message that reaches this size, so a batch is at most this much larger than a single message.
BATCH_BYTES = 256 << 10
BATCH_GAP_S = 0.002


async def write(call: AttachCall, outbox: asyncio.Queue[pb.AttachRequest], takes_batches: Callable[[], bool]) -> None:
    """Write the messages of the outbox. A message that follows another within BATCH_GAP_S waits, and all that wait go
    out as one batch: on an idle system no message waits, under load there are fewer.
    """
    while True:
        message = await outbox.get()
        if not takes_batches():
            await call.write(message)
            continue
        await call.write(message if outbox.empty() else batch_of(message, outbox))
        await asyncio.sleep(BATCH_GAP_S)


def batch_of(first: pb.AttachRequest, outbox: asyncio.Queue[pb.AttachRequest]) -> pb.AttachRequest:
    """A batch of the first message and those that wait in the outbox."""
    messages, size = [first], first.ByteSize()
    while size < BATCH_BYTES and not outbox.empty():
        messages.append(outbox.get_nowait())
        size += messages[-1].ByteSize()
    return pb.AttachRequest(batch=pb.AttachBatch(messages=messages))


def raise_if_cancelled() -> None:
    """Raise a CancelledError that grpc.aio has swallowed.

    grpc.aio passes the cancellation of a reading task on to its call. If the call ends by itself at the same moment,
    the task gets the call's error instead, which looks like a broken connection.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
