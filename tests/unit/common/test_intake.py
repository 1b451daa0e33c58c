"""Requests are received within bounds: their number at the same time, their time, and the memory of the process."""

from __future__ import annotations

import asyncio
import gc
import gzip
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from svc_common import memory
from svc_common.calls import PROBES
from svc_common.calls import REFLECTION as REFLECTION_METHODS
from svc_common.errors import LateRequestError, UnauthenticatedError
from svc_common.memory import STRANGER_BYTES, Intake
from svc_common.serve import GrpcServer
from tests.hostile.http2 import Http2, frame_message

MESSAGE_BYTES = 4 << 20
REFLECTION = f"/{REFLECTION_METHODS}"
UNFINISHED = frame_message(bytes(MESSAGE_BYTES - 10), length=MESSAGE_BYTES)


class Reading:
    """Requests that arrive when the test says so."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.num_read = Counter[str]()
        self.may_end = asyncio.Event()
        self.tasks: list[asyncio.Task[str]] = []

    def start(self, sender: str, count: int) -> list[asyncio.Task[str]]:
        async def read() -> str:
            self.num_read[sender] += 1
            await self.may_end.wait()
            return sender

        tasks = [asyncio.create_task(self._intake.receive(sender, read)) for _ in range(count)]
        self.tasks += tasks
        return tasks


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_sender_and_all_senders_together_have_places() -> None:
    reading = Reading(Intake(max_receiving=8))
    for sender in "abcde":
        reading.start(sender, 5)
    await settle()
    assert reading.num_read == {"a": 2, "b": 2, "c": 2, "d": 2}
    reading.may_end.set()
    assert Counter(await asyncio.gather(*reading.tasks)) == dict.fromkeys("abcde", 5)


async def test_strangers_do_not_wait_and_the_oldest_loses_its_place() -> None:
    intake = Intake()
    intake.max_message_bytes = STRANGER_BYTES // 8
    reading = Reading(intake)
    tasks = reading.start("", 10)
    await settle()
    assert reading.num_read[""] == 10
    reading.may_end.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, LateRequestError) for end in ends] == [True, True] + [False] * 8


async def test_a_stranger_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STRANGER_TIMEOUT_S", 0.01)
    reading = Reading(Intake())
    (late,) = reading.start("", 1)
    with pytest.raises(LateRequestError, match=r"within 0\.01 s"):
        await late


async def test_a_late_request_ends_and_a_cancelled_one_stays_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REQUEST_TIMEOUT_S", 0.01)
    monkeypatch.setattr(memory, "CHECK_INTERVAL_S", 0.02)
    reading = Reading(Intake(max_receiving=4))
    late, waiting, cancelled = reading.start("a", 3)
    await settle()
    cancelled.cancel()
    ends = await asyncio.gather(late, waiting, cancelled, return_exceptions=True)
    assert [type(end) for end in ends] == [LateRequestError, LateRequestError, asyncio.CancelledError]


def _free_a_peak(has_calls: bool) -> None:
    limit = memory.MemoryLimit(None)
    before = memory.resident_bytes()
    blocks = [b"x" * 60_000 + bytes([number % 256]) for number in range(3_000)]
    del blocks[:-1]
    assert memory.resident_bytes() - before > 100 << 20
    if has_calls:
        assert limit.exceeded_by() is None
    else:
        memory.TRIM_INTERVAL_S = 0.01
        with suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(Intake(limit).keep_trimmed(), 1.0))
    assert memory.resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("has_calls", [True, False])
def test_memory_of_a_peak_is_returned_without_a_limit(has_calls: bool) -> None:
    """A block that is still in use keeps the freed ones before it in the process, unless they are trimmed. In a process
    of its own: in this one earlier tests may have left free memory.
    """
    process = multiprocessing.get_context("spawn").Process(target=_free_a_peak, args=(has_calls,))
    process.start()
    process.join()
    assert process.exitcode == 0


async def test_bombs_of_reflection_are_freed_without_a_garbage_collection() -> None:
    """60 messages of 16 KiB that decompress to 16 MiB took 2 GB until the next garbage collection."""
    server = GrpcServer(
        listen="127.0.0.1:0", service_names=["a.B"], max_receive_bytes=16 << 20, accepts_compression=True
    )
    address = await server.start()
    bomb = frame_message(gzip.compress(b"\x1a\x80\x80\x80\x04" + bytes(1 << 23)), flag=1)
    gc.collect()
    gc.disable()
    try:
        async with await Http2.open(address) as connection:
            await _bomb(connection, bomb)
            before = memory.resident_bytes()
            for _ in range(40):
                assert (await _bomb(connection, bomb)).code == "INVALID_ARGUMENT"
            assert memory.resident_bytes() - before < 100 << 20
    finally:
        gc.enable()
        await server.grpc.stop(None)


async def _bomb(connection: Http2, bomb: bytes) -> Any:
    path = f"{REFLECTION}v1.ServerReflection/ServerReflectionInfo"
    return await connection.call(path, bomb, (("grpc-encoding", "gzip"),))


# -- over HTTP/2 -------------------------------------------------------------------------------------------------------


async def admit(method: str, context: Any) -> str:
    key = dict(context.invocation_metadata()).get("authorization")
    if key is None and not method.startswith(PROBES):
        raise UnauthenticatedError("no key")
    return str(key or "")


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request[:1]

    server = GrpcServer(listen="127.0.0.1:0", service_names=["a.B"], admit=admit, max_receive_bytes=MESSAGE_BYTES)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    await server.start()
    yield server
    await server.grpc.stop(None)


async def held_bytes(connection: Http2, path: str, count: int, metadata: tuple[tuple[str, str], ...] = ()) -> int:
    """The bytes that a server has of calls whose messages never end, after a second. It may end some calls."""
    sent_of = {connection.begin(path, metadata): 0 for _ in range(count)}
    ends = {stream_id: connection.outcome(stream_id) for stream_id in sent_of}

    async def write(stream_id: int) -> None:
        for at in range(0, len(UNFINISHED), 1 << 14):
            await connection.write(stream_id, UNFINISHED[at : at + (1 << 14)])
            if ends[stream_id].done():
                return
            sent_of[stream_id] += 1 << 14

    await asyncio.wait([asyncio.create_task(write(stream_id)) for stream_id in sent_of], timeout=1.0)
    return sum(sent for stream_id, sent in sent_of.items() if not ends[stream_id].done())


@pytest.mark.parametrize(
    ("path", "metadata", "num_received"),
    [
        ("/a.B/Echo", (), 0),
        ("/a.B/Echo", (("authorization", "key"),), 16),
        (f"{REFLECTION}v1alpha.ServerReflection/ServerReflectionInfo", (), 0),
        (f"{REFLECTION}v1.ServerReflection/ServerReflectionInfo", (("authorization", "key"),), 16),
    ],
)
async def test_messages_that_never_end(
    server: GrpcServer, path: str, metadata: tuple[tuple[str, str], ...], num_received: int
) -> None:
    """A server without places received all 60, or 240 MiB."""
    async with await Http2.open(server.address) as connection:
        held = await held_bytes(connection, path, 60, metadata)
        assert held <= num_received * MESSAGE_BYTES + 60 * (96 << 10)
        async with await Http2.open(server.address) as other:
            own = (("authorization", "another key"),)
            assert (await other.call("/a.B/Echo", frame_message(b"x"), own)).code == "OK"
            assert (await other.call("/grpc.health.v1.Health/Check", frame_message(b""))).code == "OK"


async def test_probes_that_never_end_are_ended_soon(server: GrpcServer) -> None:
    async with await Http2.open(server.address) as connection:
        streams = [connection.begin(f"/{PROBES}Check", ()) for _ in range(20)]
        ends = [connection.outcome(stream_id) for stream_id in streams]
        for stream_id in streams:
            await connection.write(stream_id, UNFINISHED[: 1 << 15])
        async with asyncio.timeout(20.0):
            outcomes = await asyncio.gather(*ends)
    assert {outcome.code for outcome in outcomes} == {"DEADLINE_EXCEEDED"}


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_probes_have_few_places(server: GrpcServer, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """On the ports of all services: schedulers and workers take larger messages, so fewer at a time."""
    monkeypatch.setattr(memory, "STRANGER_BYTES", 4 * MESSAGE_BYTES)
    monkeypatch.setattr(memory, "STRANGER_TIMEOUT_S", 60.0)
    async with await Http2.open(server.address) as connection:
        held = await held_bytes(connection, f"/{PROBES}{method}", 30)
        assert held <= 4 * MESSAGE_BYTES
        assert (await connection.call(f"/{PROBES}Check", frame_message(b""))).code == "OK"


async def test_a_probe_has_a_name_only(server: GrpcServer) -> None:
    async with await Http2.open(server.address) as connection:
        outcome = await connection.call(f"/{PROBES}Check", frame_message(b"\x0a\x81\x20" + b"a" * 4097))
    assert outcome.code == "INVALID_ARGUMENT"
