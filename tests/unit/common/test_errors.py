"""Errors on the wire: a message of any length and in any script keeps its code, its text and its field."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo
from google.rpc.status_pb2 import Status

from svc_common.calls import ErrorInterceptor
from svc_common.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    status_metadata,
)

METHOD = "/test.Service/Refuse"


async def refuse(request: bytes, context: Any) -> bytes:
    """Complain with the words of the request."""
    raise InvalidRequestError(request.decode("utf-8", "surrogatepass"), field="prompt")


@pytest.fixture
async def refusing() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def refused(channel: grpc.aio.Channel, message: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(METHOD)(message.encode("utf-8", "surrogatepass"), timeout=10)
    return caught.value


@pytest.mark.parametrize("character", ["x", "é", "中", "😀", "%", "\n", "\x7f", "\ud800"])
async def test_a_long_message_keeps_its_code_and_its_start(refusing: grpc.aio.Channel, character: str) -> None:
    for _ in range(10):  # between 8 and 16 KB of metadata gRPC refuses some and accepts others
        error = await refused(refusing, "no: " + 3000 * character)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    shown = error.details()
    assert shown is not None
    assert len(shown) > 250
    assert set(shown.removeprefix("no: ")) == {character if character.isprintable() or character < "\x80" else "?"}
    status, bad_request = Status(), BadRequest()
    status.ParseFromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    assert status.message == shown
    assert status.details[0].Unpack(bad_request)
    assert [(v.field, v.description) for v in bad_request.field_violations] == [("prompt", shown)]


@pytest.mark.parametrize("message", ["", "n is 0; write 1 to 16", 100 * "中文"])
async def test_a_short_message_arrives_complete(refusing: grpc.aio.Channel, message: str) -> None:
    assert (await refused(refusing, message)).details() == message


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (ServiceError("a bug"), "INTERNAL", None),
        (ContextLengthError("long", field="prompt", limit=5), "CONTEXT_LENGTH", None),
        (NotFoundError("no", field="model", subject="m"), "NOT_FOUND", ("model", "m")),
        (OverloadedError("full", retry_after_s=1), "OVERLOADED", None),
        (OverloadedError("full", retry_after_s=1, subject="owner:a"), "OVERLOADED", "owner:a"),
    ],
)
def test_details_that_programs_switch_on(error: ServiceError, reason: str, detail: Any) -> None:
    status = Status.FromString(dict(status_metadata(error))["grpc-status-details-bin"])  # type: ignore[arg-type]
    found: dict[type[Any], Any] = {}
    for kind in (ErrorInfo, ResourceInfo, QuotaFailure):
        for packed in status.details:
            message = kind()
            if packed.Unpack(message):
                found[kind] = message
    assert (found.pop(ErrorInfo)) == ErrorInfo(reason=reason, domain="quire.dev")
    shown = [(m.resource_type, m.resource_name) for kind, m in found.items() if kind is ResourceInfo]
    shown += [m.violations[0].subject for kind, m in found.items() if kind is QuotaFailure]
    assert shown == [detail] * (detail is not None)


async def test_a_stream_handler_may_be_a_coroutine() -> None:
    """It writes through its context instead of yielding, as some of grpc's own servicers do."""

    async def count(request: bytes, context: Any) -> None:
        for i in range(3):
            await context.write(b"%d" % i)
        raise InvalidRequestError("no more", field="prompt")

    interceptor = ErrorInterceptor()
    server = grpc.aio.server(interceptors=[interceptor])
    handlers = {"Refuse": grpc.unary_stream_rpc_method_handler(count)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(METHOD)(b"", timeout=10)
        received = [await call.read() for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError, match="no more") as caught:
            await call.read()
    await server.stop(None)
    assert received == [b"0", b"1", b"2"]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(interceptor.stats.errors.values()) == 1


async def test_a_handler_is_closed_when_its_client_leaves_during_a_write(caplog: pytest.LogCaptureFixture) -> None:
    closed, handlers = asyncio.Event(), []

    async def flood() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)  # more than the windows hold, so that a write blocks
        finally:
            closed.set()

    def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        handlers.append(flood())  # a garbage collection must not be what closes it
        return handlers[-1]

    interceptor = ErrorInterceptor()
    server = grpc.aio.server(interceptors=[interceptor])
    methods = {"Refuse": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(METHOD)(b"", timeout=60)
        assert len(await call.read()) == 1 << 20
        call.cancel()
        async with asyncio.timeout(30.0):
            await closed.wait()
    await server.stop(None)
    assert not interceptor.stats.errors
    assert not [record for record in caplog.records if record.name == "svc_common.errors"]


async def test_an_undecodable_message_of_a_stream_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def echo(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    handlers = {"Refuse": grpc.stream_stream_rpc_method_handler(echo, request_deserializer=Status.FromString)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(METHOD)(timeout=10)
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message") as caught:
            await call.read()
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [record.exc_info for record in caplog.records if "cannot be decoded" in record.message] == [None]
    assert "Traceback" not in caplog.text


class Large:
    """Stands for a large request; `alive` has the ones that are still in memory."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, data: bytes) -> None:
        Large.alive.add(self)


def undecodable(data: bytes) -> Large:
    large = Large(data)
    raise InvalidRequestError(f"{large} is no message")


async def refuse_one(request: Any, context: Any) -> bytes:
    raise InvalidRequestError("no")


async def refuse_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
    raise InvalidRequestError("no")
    yield b""


@pytest.fixture
def rare_collections() -> Iterator[None]:
    """The services call `settle_gc` too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("rare_collections")
@pytest.mark.parametrize("decode", [Large, undecodable])
@pytest.mark.parametrize("behaviour", [refuse_one, refuse_stream])
async def test_a_refused_request_is_freed_without_a_garbage_collection(behaviour: Any, decode: Any) -> None:
    """100 refused requests of 16 MiB used to take 1.6 GB until the next garbage collection."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    is_unary = behaviour is refuse_one
    make = grpc.unary_unary_rpc_method_handler if is_unary else grpc.unary_stream_rpc_method_handler
    handlers = {"Refuse": make(behaviour, request_deserializer=decode)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_stream(METHOD)(b"", timeout=10).read()
    await server.stop(None)
    for _ in range(500):  # the server frees the last request after its answer
        if not Large.alive:
            break
        await asyncio.sleep(0.01)
    assert not Large.alive
    assert not [kept for kept in gc.get_objects() if type(kept) is grpc.aio.AbortError]
