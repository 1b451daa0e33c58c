"""Small valid requests that could cost a gateway much: memory, its event loop, its threads.

To add one, add a row to REQUESTS (HTTP) or CALLS (gRPC). Each becomes an attack by a client with a key, beside good
streams that may neither pause nor change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from tests.hostile import http1
from tests.hostile.attacks import Attack, Size, insider
from tests.hostile.examples import INFERENCE, path_of
from tests.hostile.http2 import Http2, frame_message
from tests.hostile.target import Port

WITHIN_S = 20.0


class Request(NamedTuple):
    """A request over HTTP, sent `at_once` times. `body` makes a JSON value, or bytes."""

    name: str
    path: str
    body: Callable[[], Any]
    at_once: int = 1


class Call(NamedTuple):
    """A call of an RPC of InferenceService, made `at_once` times."""

    name: str
    method: str
    message: Callable[[], Message]
    at_once: int = 1


COMPLETIONS = "/v1/completions"
REQUESTS = (
    Request("many_samples", COMPLETIONS, lambda: {"prompt": "a", "n": 1_000_000}),
    Request("many_samples_ten_times", COMPLETIONS, lambda: {"prompt": "a", "n": 300_000}, at_once=10),
)
CALLS = (
    Call("many_samples", "Generate", lambda: pb.GenerateRequest(
        prompt=pb.Prompt(text="a"), sampling=types_pb2.SamplingParams(n=1_000_000)
    )),
)  # fmt: skip


def _request_attack(row: Request) -> Attack:
    async def attack(port: Port, size: Size) -> None:
        data = http1.post_json(row.path, row.body(), dict(insider(port)))
        await asyncio.gather(*(http1.exchange(port.address, data, within_s=WITHIN_S) for _ in range(row.at_once)))

    attack.__name__ = f"http_{row.name}"
    return attack


def _call_attack(row: Call) -> Attack:
    async def attack(port: Port, size: Size) -> None:
        data = frame_message(row.message().SerializeToString())
        path = path_of(INFERENCE.methods_by_name[row.method])
        with contextlib.suppress(OSError):
            async with await Http2.open(port.address) as connection:
                calls = (connection.call(path, data, insider(port), within_s=WITHIN_S) for _ in range(row.at_once))
                await asyncio.gather(*calls)

    attack.__name__ = row.name
    return attack


COSTLY_REQUESTS = tuple(map(_request_attack, REQUESTS))
COSTLY_CALLS = tuple(map(_call_attack, CALLS))


def costly_attacks_on(port: Port) -> tuple[Attack, ...]:
    """The attacks for a port for inference; none for other ports."""
    if INFERENCE in port.services:
        return COSTLY_CALLS
    return COSTLY_REQUESTS if port.name.endswith("/http") else ()
