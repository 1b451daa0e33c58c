"""Every call that a server takes, in the same steps: the caller is admitted, its request received, counted and decoded,
and the handler's errors become statuses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from svc_common.errors import InvalidRequestError, abort, shown_error
from svc_common.field_counts import MAX_FIELDS, MAX_STREAM_FIELDS, TooManyFieldsError, check_field_count, layout_of
from svc_common.memory import Intake

log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Both get the method without the first slash. `Admit` checks the caller before its request is received; it raises
# ServiceError, or returns the sender for `Intake`: empty for a caller that needs no credentials.
OnCall = Callable[[str, Context], None]
Admit = Callable[[str, Context], Awaitable[str]]
PROBES = "grpc.health.v1.Health/"
REFLECTION = "grpc.reflection."
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
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # by method: the last handler, and its wrapper

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
            deserialize = decoder(deserialize, method, is_streamed=is_streamed, max_bytes=limit)
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
        """The requests of an admitted call. Those of reflection have places, like single ones."""
        sender = await self._check_caller(method, context)
        return self._received_each(sender, context) if method.startswith(REFLECTION) else requests

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
                    return await behaviour(request, context)
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
