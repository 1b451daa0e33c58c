"""The Attach call of grpc.aio: writing to it, and a cancellation that it swallows."""

from __future__ import annotations

import asyncio

import grpc
from quire.internal.v1 import scheduler_pb2 as pb

AttachCall = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


async def write(call: AttachCall, outbox: asyncio.Queue[pb.AttachRequest]) -> None:
    while True:
        await call.write(await outbox.get())


def raise_if_cancelled() -> None:
    """Raise a CancelledError that grpc.aio has swallowed.

    grpc.aio passes the cancellation of a reading task on to its call. If the call ends by itself at the same moment,
    the task gets the call's error instead, which looks like a broken connection.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
