"""The state that the console shows: the status of all schedulers and the blocks of their workers, as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb

from gateway_svc.operators.scheduler_calls import get_pools
from gateway_svc.schedulers.directory import ModelDirectory
from svc_common.observe.metrics import quire_version

MIN_INTERVAL_S = 0.2


class ConsoleState:
    """Owns the newest state. However many pages are open, schedulers are asked at most once per MIN_INTERVAL_S."""

    def __init__(self, status: Callable[[], Awaitable[pb.GetStatusResponse]], directory: ModelDirectory) -> None:
        self._status = status
        self._directory = directory
        self._newest = b""
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def newest(self) -> bytes:
        """The state as JSON, at most MIN_INTERVAL_S old. Field names are those of the protocol."""
        async with self._reading:
            now = time.monotonic()
            if self._read_at is None or now - self._read_at >= MIN_INTERVAL_S:
                self._newest, self._read_at = await self._read(), now
            return self._newest

    async def _read(self) -> bytes:
        clients = self._directory.clients
        status, pools = await asyncio.gather(self._status(), asyncio.gather(*(get_pools(client) for client in clients)))
        schedulers = [
            {**_plain(scheduler), **_plain(state)} for scheduler, state in zip(status.schedulers, pools, strict=True)
        ]
        state = {
            "version": quire_version(),
            "time": time.time(),
            "open_streams": status.open_streams,
            "schedulers": schedulers,
        }
        return json.dumps(state, separators=(",", ":")).encode()


def _plain(message: Message) -> dict[str, object]:
    """The fields of a message. 64-bit numbers are strings and bytes are base64, as in protobuf's JSON format."""
    fields: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields
