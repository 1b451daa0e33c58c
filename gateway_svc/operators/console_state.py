"""The state that the console shows: the status of all schedulers and the blocks of their workers, as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from operator import itemgetter

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb

from gateway_svc.operators.scheduler_calls import get_history, get_pools
from gateway_svc.schedulers.directory import ModelDirectory
from svc_common.observe.metrics import quire_version

MIN_INTERVAL_S = 0.2
Key = frozenset[str] | str  # workers, or a request
MAX_ERRORS = 50  # pairs of method and code, the most frequent ones
MAX_POOLS = 8  # limit for one page, unless it asks for no workers


class ConsoleState:
    """Owns the newest states. Schedulers are asked once per MIN_INTERVAL_S for all pages that show the same workers."""

    def __init__(
        self,
        status: Callable[[], Awaitable[pb.GetStatusResponse]],
        directory: ModelDirectory,
        errors: Mapping[tuple[str, str], int],
    ) -> None:
        self._errors = errors  # of the gateway's calls, by method and code
        self._status = status
        self._directory = directory
        self._newest: dict[Key, tuple[float, bytes]] = {}
        self._reading = asyncio.Lock()

    async def newest(self, worker_ids: Iterable[str] = ()) -> bytes:
        """The state as JSON, at most MIN_INTERVAL_S old, with the pools of these workers or of the first ones. Field
        names are those of the protocol.
        """
        wanted = frozenset(islice(worker_ids, MAX_POOLS))
        return await self._kept(wanted, lambda: self._read(wanted))

    async def history(self, request_id: str = "") -> bytes:
        """Events and ended requests of all schedulers, or one request with its stages, as JSON."""
        return await self._kept(request_id, lambda: self._read_history(request_id))

    async def _kept(self, key: Key, read: Callable[[], Awaitable[object]]) -> bytes:
        async with self._reading:
            now = time.monotonic()
            self._newest = {key: made for key, made in self._newest.items() if now - made[0] < MIN_INTERVAL_S}
            if key not in self._newest:
                self._newest[key] = now, json.dumps(await read(), separators=(",", ":")).encode()
            return self._newest[key][1]

    async def _read_history(self, request_id: str) -> object:
        clients = self._directory.clients
        found = await asyncio.gather(*(get_history(client, request_id) for client in clients))
        return [{"address": client.address, **_plain(past)} for client, past in zip(clients, found, strict=True)]

    async def _read(self, worker_ids: frozenset[str]) -> object:
        clients = self._directory.clients
        status, pools = await asyncio.gather(
            self._status(), asyncio.gather(*(get_pools(client, worker_ids) for client in clients))
        )
        schedulers = [
            {**_plain(scheduler), **_plain(state)} for scheduler, state in zip(status.schedulers, pools, strict=True)
        ]
        return {
            "version": quire_version(),
            "time": time.time(),
            "open_streams": status.open_streams,
            "pinned_sessions": status.pinned_sessions if status.HasField("pinned_sessions") else None,
            "pins_by_owner": [_plain(pins) for pins in status.pins_by_owner],
            "errors": sorted(([*call, count] for call, count in self._errors.items()), key=itemgetter(2))[-MAX_ERRORS:],
            "schedulers": schedulers,
        }


def _plain(message: Message) -> dict[str, object]:
    """The fields of a message. 64-bit numbers are strings and bytes are base64, as in protobuf's JSON format."""
    fields: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields
