"""Every call that a server takes, in the same steps: the caller is admitted, its request received, counted and decoded,
and the handler's errors become statuses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from svc_common.errors import InvalidRequestError, abort, shown_error
from svc_common.memory import Intake

SMALL_BYTES = 64 << 10  # fields of smaller messages are not counted: they decode to 2 MB at most
MAX_FIELDS = 60_000  # above the largest valid request: a chat of 10,000 messages
MAX_STREAM_FIELDS = 1_000_000  # limit for a message in a stream between services: the requests of many clients
NUMBERS_PER_FIELD = 35  # packed numbers that count as one field: 2 million in a request
MAX_NUMBER_BYTES = 5  # size of a uint32
MAX_DEPTH = 100  # limit for messages in each other; the decoder refuses more


class TooManyFieldsError(ValueError):
    """The message has too many fields."""


# Field number -> layout of a message in which a few bytes can decode to many objects. Other fields are not searched.
Layout = Mapping[int, Any]
NUMBERS: Layout = {}  # stands for a packed field
CONTINUES = bytes(range(0x80, 0x100))  # bytes of a number besides its last one
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


@cache
def layout_of(descriptor: Descriptor) -> Layout:
    """The layout of a message, which may contain its own type."""
    return _layout_of(descriptor, {})


def _layout_of(descriptor: Descriptor, known: dict[str, dict[int, Any]]) -> Layout:
    layout = known.get(descriptor.full_name)
    if layout is None:
        layout = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None and _has_objects(field.message_type):
                layout[field.number] = _layout_of(field.message_type, known)
            elif field.is_packed:
                layout[field.number] = NUMBERS
    return layout


def _has_objects(descriptor: Descriptor) -> bool:
    return any(field.message_type is not None or field.is_repeated for field in descriptor.fields)


def check_field_count(data: bytes, layout: Layout, max_fields: int = MAX_FIELDS) -> None:
    """Raise TooManyFieldsError if a large message has more than `max_fields` fields. Malformed data passes.

    An empty repeated message takes 2 bytes on the wire but about 50 bytes decoded, and decoding blocks the event loop.
    Valid requests are large because of long texts and packed ids, not because of many fields. The ids of a packed field
    are counted too, many as one field: decoding 16 million takes a third of a second. A message between services may
    hold many requests, so it may have more fields.
    """
    if len(data) <= SMALL_BYTES:
        return
    try:
        left = _count(data, 0, len(data), layout, max_fields, 0)
    except IndexError:
        return  # truncated: the decoder reports it
    if left < 0:
        raise TooManyFieldsError(
            f"it has {len(data)} bytes and more than {max_fields} fields ({NUMBERS_PER_FIELD} packed numbers count as "
            "one); send fewer messages, strings or numbers, and use packed encoding for repeated numbers"
        )


def _count(data: bytes, position: int, end: int, layout: Layout, left: int, depth: int) -> int:
    """Count the fields of one message. Returns the number of fields that are still allowed; negative: too many."""
    while position < end and left >= 0:
        left -= 1
        tag, position = data[position], position + 1  # a varint of one byte, in most cases
        if tag & 0x80:
            tag, position = _varint(data, position - 1)
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            length, position = data[position], position + 1
            if length & 0x80:
                length, position = _varint(data, position - 1)
            inner = layout.get(tag >> 3)
            if inner is NUMBERS:
                left -= _count_numbers(data, position, length, left)
            elif inner is not None and depth < MAX_DEPTH:
                left = _count(data, position, min(end, position + length), inner, left, depth + 1)
            position += length
        elif wire_type == VARINT:
            _, position = _varint(data, position)
        else:
            position += {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)
    return left


def _count_numbers(data: bytes, position: int, length: int, left: int) -> int:
    """The numbers of a packed field, as fields. A payload that is certainly too long is not read."""
    if length > MAX_NUMBER_BYTES * NUMBERS_PER_FIELD * left:
        return left + 1
    return len(data[position : position + length].translate(None, CONTINUES)) // NUMBERS_PER_FIELD


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number and the position after it. Raises IndexError at the end of the data and for more than 10 bytes."""
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise IndexError("varint longer than 10 bytes")


log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Both get the method without the first slash. `Admit` checks the caller before its request is received; it raises
# ServiceError, or returns the sender for `Intake`: empty for a caller that needs no credentials.
OnCall = Callable[[str, Context], None]
Admit = Callable[[str, Context], Awaitable[str]]
Trailers = Callable[[], tuple[tuple[str, bytes], ...]]
PROBES = "grpc.health.v1.Health/"
REFLECTION = "grpc.reflection."
PUBLIC_STREAMS = (REFLECTION, "inference.")  # their requests are those of any client
MAX_PROBE_BYTES = 4096  # a message about health or reflection has a name in it
ANYONE = "anyone"  # the sender where callers are not checked


@dataclass(frozen=True, slots=True)
class RpcStats:
    """Counts of the RPCs that a server serves, by method (`quire.internal.v1.WorkerService/StepStream`)."""

    errors: Counter[tuple[str, str]] = field(default_factory=Counter)  # (method, code)
    received_bytes: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def counting_deserializer(self, deserialize: Any, method: str) -> Any:
        """`deserialize` that also counts the bytes."""
        num_bytes = self.received_bytes

        def convert(data: bytes) -> Any:
            num_bytes[method] += len(data)
            return data if deserialize is None else deserialize(data)

        return convert

    def counting_serializer(self, serialize: Any, method: str) -> Any:
        """`serialize` that also counts the bytes. What a handler has serialized itself stays as it is."""
        num_bytes = self.sent_bytes

        def convert(message: Any) -> Any:
            data = message if serialize is None or isinstance(message, bytes) else serialize(message)
            num_bytes[method] += len(data)
            return data

        return convert


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts a ServiceError to its status, and any other exception to INTERNAL and an error log. Counts in `stats`.

    A call takes these steps: `admit`, which checks the caller and returns the sender for `intake`; `on_call`, also if
    the caller is refused; then its request is received, and checked before it is decoded. `max_bytes`: limits of some
    methods, below the server's.

    All handlers are registered as if clients streamed requests, which clients do not see: gRPC would receive a single
    request before it calls the handler, also from a caller that is refused.
    """

    def __init__(
        self,
        stats: RpcStats | None = None,
        on_call: OnCall | None = None,
        max_bytes: Mapping[str, int] | None = None,
        admit: Admit | None = None,
        intake: Intake | None = None,
    ) -> None:
        self.stats = stats or RpcStats()
        self._on_call = on_call or (lambda method, context: None)
        self._max_bytes = max_bytes or {}
        self._admit = admit or _admit_all
        self._intake = intake or Intake()
        self._trailers: Trailers | None = None
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # by method: the last handler, and its wrapper

    def set_trailers(self, trailers: Trailers) -> None:
        """Send this metadata at the end of each call that succeeds."""
        self._trailers = trailers

    def _succeed(self, context: Any) -> None:
        if self._trailers is not None:
            context.set_trailing_metadata(self._trailers())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method.lstrip("/")
        last = self._wrapped.get(method)
        if last is None or last[0] is not handler:
            last = self._wrapped[method] = (handler, self._wrap(handler, method))
        return last[1]

    def _wrap(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        deserialize, is_streamed = handler.request_deserializer, handler.request_streaming
        if deserialize is not None:
            limit = MAX_PROBE_BYTES if method.startswith((PROBES, REFLECTION)) else self._max_bytes.get(method)
            is_of_service = is_streamed and not method.startswith(PUBLIC_STREAMS)
            deserialize = decoder(deserialize, method, is_streamed=is_of_service, max_bytes=limit)
        if is_streamed and deserialize is not None:
            deserialize = _logging(deserialize, method)
        serializers = {
            "request_deserializer": self.stats.counting_deserializer(deserialize, method),
            "response_serializer": self.stats.counting_serializer(handler.response_serializer, method),
        }
        begin = self._admitted if is_streamed else self._received
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(behaviour, begin, method), **serializers)
        return grpc.stream_unary_rpc_method_handler(self._unary(behaviour, begin, method), **serializers)

    async def _admitted(self, requests: Any, context: Any, method: str) -> Any:
        """The requests of an admitted call. Those that any client sends have places, like single ones."""
        sender = await self._check_caller(method, context)
        return self._received_each(sender, context) if method.startswith(PUBLIC_STREAMS) else requests

    async def _received_each(self, sender: str, context: Any) -> AsyncIterator[Any]:
        while (request := await self._intake.receive(sender, context.read)) is not grpc.aio.EOF:
            yield request

    async def _check_caller(self, method: str, context: Any) -> str:
        try:
            return await self._admit(method, context)
        finally:
            self._on_call(method, context)  # also for a refused call, and with its caller

    async def _received(self, requests: Any, context: Any, method: str) -> Any:
        """The single request of an admitted call."""
        sender = await self._check_caller(method, context)
        is_probe = method.startswith(PROBES)
        if not is_probe:
            self._intake.check_memory()
        request = await self._intake.receive("" if is_probe else sender, context.read)
        if request is grpc.aio.EOF:
            raise InvalidRequestError(f"the call of {method} has no request; send one message")
        return request

    def _unary(self, behaviour: Any, begin: Any, method: str) -> Any:
        async def call(requests: Any, context: Any) -> Any:
            with self._intake:
                try:
                    request = await begin(requests, context, method)
                    response = await behaviour(request, context)
                    self._succeed(context)
                    return response
                except Exception as error:
                    ending = self._end(context, method, error)
                    requests = request = context = None  # see _end
                    raise await ending from None

        return call

    def _streaming(self, behaviour: Any, begin: Any, method: str) -> Any:
        """A coroutine that writes the responses: an async generator around another costs time per response."""

        async def call(requests: Any, context: Any) -> None:
            with self._intake:
                try:
                    request = await begin(requests, context, method)
                    responses = behaviour(request, context)
                    if not hasattr(responses, "__aiter__"):
                        await responses  # a coroutine, which writes its responses through the context
                        self._succeed(context)
                        return
                except Exception as error:
                    ending = self._end(context, method, error)
                    requests = request = context = None  # see _end
                    raise await ending from None
                writing = self._write_all(responses, context, method)
                requests = request = responses = context = None  # see _end
                await writing

        return call

    async def _write_all(self, responses: Any, context: Any, method: str) -> None:
        """Write the responses of a handler, and close it, even if its client leaves. A write raises gRPC's errors."""
        try:
            while True:
                try:
                    response = await anext(responses)
                except StopAsyncIteration:
                    self._succeed(context)
                    return
                except Exception as error:
                    ending = self._end(context, method, error)
                    context = None  # see _end
                    raise await ending from None
                await context.write(response)
        finally:
            await responses.aclose()

    async def _end(
        self, context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception
    ) -> grpc.aio.AbortError:
        """Abort the call. Returns the exception that its handler must raise.

        gRPC's state of the call keeps this exception, and the frames in its traceback refer to that state. Only a
        garbage collection would free such a cycle with the request in it, and services collect rarely (`settle_gc`):
        refused requests of 16 MiB would fill the memory. So no frame and no exception keeps a request here.
        """
        if isinstance(error, grpc.aio.AbortError):
            return _without_frames(error)
        shown = shown_error(method, error)
        self.stats.errors[method, shown.code.name] += 1
        _without_frames(error)
        try:
            await abort(context, shown)
        except grpc.aio.AbortError as aborted:
            return _without_frames(aborted)


def _without_frames(error: E) -> E:
    """The exception without the tracebacks of itself and of the exceptions before it."""
    linked: BaseException | None = error
    while linked is not None and linked.__traceback__ is not None:
        linked.__traceback__ = None
        linked = linked.__cause__ or linked.__context__
    return error


async def first_of(requests: AsyncIterator[T], field: str) -> T:
    """The first message of a stream. Raises InvalidRequestError with its most important field if there is none."""
    first = await anext(requests, None)
    if first is None:
        raise InvalidRequestError("the stream has no message", field=field)
    return first


async def read_rest(requests: AsyncIterator[Any]) -> None:
    """Read the stream of a call that is refused to its end: a client that still writes gets an internal error of its
    own library instead of the refusal.
    """
    with suppress(Exception):
        async for _ in requests:
            pass


async def _admit_all(method: str, context: Context) -> str:
    return ANYONE


def _logging(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def convert(data: bytes) -> Any:
        try:
            return decode(data)
        except InvalidRequestError as error:
            log.warning("%s: a message cannot be decoded: %s", method, error.message)
            raise

    return convert


def decoder(
    deserialize: Any, method: str, *, is_streamed: bool = False, max_bytes: int | None = None
) -> Callable[[bytes], Any]:
    """`deserialize` with limits on bytes and fields. Raises InvalidRequestError.

    `is_streamed`: for messages of streams between services, which may have more fields.
    """
    max_fields = MAX_STREAM_FIELDS if is_streamed else MAX_FIELDS
    words = f"a message of {method}" if is_streamed else f"the request of {method}"
    # `__self__` of a generated FromString is the message class.
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
    layout = {} if descriptor is None else layout_of(descriptor)

    def decode(data: bytes) -> Any:
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidRequestError(f"{words} has {len(data)} bytes; at most {max_bytes} are allowed")
        try:
            check_field_count(data, layout, max_fields)
            return deserialize(data)
        except TooManyFieldsError as error:
            raise InvalidRequestError(f"{words} has too many fields: {error}") from None
        except DecodeError as error:
            raise InvalidRequestError(
                f"{words} is not a valid protobuf message, or a text in it is not UTF-8: {error}"
            ) from None

    return decode
