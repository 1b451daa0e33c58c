"""Errors that a client may see, with their gRPC codes and HTTP statuses.

    QuireError                  INTERNAL             500  a bug in the service
      InvalidRequestError       INVALID_ARGUMENT     400  the caller's mistake: field, value, limit
        ContextLengthError      INVALID_ARGUMENT     400  prompt and output exceed the model's length
      NotFoundError             NOT_FOUND            404  no such model or request
      AlreadyExistsError        ALREADY_EXISTS       409  the request id is in flight
      OverloadedError           RESOURCE_EXHAUSTED   429  a limit is reached; carries a retry delay
      UnavailableError          UNAVAILABLE          503  no process can serve the request now
      DeadlineError             DEADLINE_EXCEEDED    408  the time limit that the client set has passed
      TakenOverError            ABORTED              409  the same request continues in another stream
      UnauthenticatedError      UNAUTHENTICATED      401  no API key or token, or an unknown one
      PermissionDeniedError     PERMISSION_DENIED    403  the caller is known and may not make this call
      NotConfiguredError        FAILED_PRECONDITION  400  the deployment lacks a part that the request needs
      UnimplementedError        UNIMPLEMENTED        400  a call that is not served (clients retry a 501)
      StaleEpochError           FAILED_PRECONDITION  503  a fence: another scheduler owns this worker now

Handlers raise these errors. `ErrorInterceptor` converts them to statuses with google.rpc details.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from svc_common.field_counts import MAX_FIELDS, MAX_STREAM_FIELDS, TooManyFieldsError, check_field_count, layout_of

log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)

# gRPC refuses trailing metadata of more than 8 KB in total. The message is in it three times: once in grpc-message,
# where an escaped byte takes three bytes, and twice in the details, as base64.
MAX_TRAILER_BYTES = 6000
IN_DETAILS = 2 * 4 / 3
TRAILER_BYTES = [(1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3) + IN_DETAILS for byte in range(256)]


class QuireError(Exception):
    """Base of all errors that a client may see. `field` is the invalid request field, if any."""

    code = grpc.StatusCode.INTERNAL
    http_status = 500

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = _shortened(message)
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(QuireError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class ContextLengthError(InvalidRequestError):
    """`limit`: most tokens of prompt and output together."""

    def __init__(self, message: str, *, field: str, limit: int) -> None:
        super().__init__(message, field=field)
        self.limit = limit


class NotFoundError(QuireError):
    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class AlreadyExistsError(QuireError):
    code = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409


class OverloadedError(QuireError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class UnavailableError(QuireError):
    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineError(QuireError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 408


class TakenOverError(QuireError):
    code = grpc.StatusCode.ABORTED
    http_status = 409


class AbortedError(QuireError):
    code = grpc.StatusCode.ABORTED
    http_status = 409


class UnauthenticatedError(QuireError):
    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionDeniedError(QuireError):
    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class UnimplementedError(QuireError):
    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400


class NotConfiguredError(QuireError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400


class StaleEpochError(QuireError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 503


BY_CODE: dict[int, type[QuireError]] = {
    kind.code.value[0]: kind
    for kind in (
        QuireError,
        InvalidRequestError,
        NotFoundError,
        AlreadyExistsError,
        OverloadedError,
        UnavailableError,
        DeadlineError,
        TakenOverError,
        UnimplementedError,
        StaleEpochError,
    )
}


def error_from_code(code: int, message: str, *, field: str = "", retry_after_s: float | None = None) -> QuireError:
    """The error of another service, from the number of its gRPC status code."""
    return BY_CODE.get(code, QuireError)(message, field=field, retry_after_s=retry_after_s)


def status_metadata(error: QuireError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of an error: google.rpc details, and the retry pushback that gRPC clients understand."""
    status = Status(code=error.code.value[0], message=error.message)
    if error.field:
        _pack(status, BadRequest(field_violations=[{"field": error.field, "description": error.message}]))
    metadata: list[tuple[str, str | bytes]] = []
    if error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(int(error.retry_after_s * 1000))
        _pack(status, retry)
        metadata.append(("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000))))
    if status.details:
        metadata.append(("grpc-status-details-bin", status.SerializeToString()))
    return tuple(metadata)


def _shortened(message: str) -> str:
    """The longest prefix of the message that fits into the trailing metadata."""
    text = message.encode("utf-8", "replace")
    sizes = list(accumulate(TRAILER_BYTES[byte] for byte in text[:MAX_TRAILER_BYTES]))
    return text[: bisect_right(sizes, MAX_TRAILER_BYTES)].decode("utf-8", "ignore")


def _pack(status: Status, detail: Any) -> None:
    packed = AnyProto()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """End the call with the error's code, message and details."""
    await context.abort(error.code, error.message, trailing_metadata=status_metadata(error))


OnCall = Callable[[str, "grpc.aio.ServicerContext[Any, Any]"], None]  # the method, without the first slash
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for type checkers only


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
        """`serialize` that also counts the bytes."""
        num_bytes = self.sent_bytes

        def convert(message: Any) -> Any:
            data = message if serialize is None else serialize(message)
            num_bytes[method] += len(data)
            return data

        return convert


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts a QuireError to its status, and any other exception to INTERNAL and an error log. Counts in `stats`.

    Checks the size of requests before they are decoded. `max_bytes`: limits of some methods, below the server's.
    `on_call` is called at the start of each call, also if its request is refused or cannot be decoded.
    """

    def __init__(
        self,
        stats: RpcStats | None = None,
        on_call: OnCall | None = None,
        max_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.stats = stats or RpcStats()
        self._on_call = on_call or (lambda method, context: None)
        self._max_bytes = max_bytes or {}
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
        deserialize, is_streamed = handler.request_deserializer, handler.request_streaming
        serializers = {
            "request_deserializer": self.stats.counting_deserializer(
                None if deserialize is None else self._decoder(handler, method), method
            ),
            "response_serializer": self.stats.counting_serializer(handler.response_serializer, method),
        }
        if is_streamed and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream, method), **serializers)
        if is_streamed:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method), **serializers)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream, method), **serializers)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **serializers)

    def _decoder(self, handler: Handler, method: str) -> Callable[[bytes], Any]:
        """Iterating over the requests of a stream raises the errors of its decoder, so only single requests need
        `_tolerant`.
        """
        is_streamed = handler.request_streaming
        decode = decoder(
            handler.request_deserializer, method, is_streamed=is_streamed, max_bytes=self._max_bytes.get(method)
        )
        return _logging(decode, method) if is_streamed else _tolerant(decode)

    def _unary(self, behaviour: Any, method: str) -> Any:
        async def call(request: Any, context: Any) -> Any:
            self._on_call(method, context)
            try:
                if isinstance(request, _Undecodable):
                    request.refuse()
                return await behaviour(request, context)
            except Exception as error:
                ending = self._end(context, method, error)
                request = context = None  # see _end
                raise await ending from None

        return call

    def _streaming(self, behaviour: Any, method: str) -> Any:
        """A coroutine that writes the responses: an async generator around another costs time per response."""

        async def call(request: Any, context: Any) -> None:
            self._on_call(method, context)
            try:
                if isinstance(request, _Undecodable):
                    request.refuse()
                responses = behaviour(request, context)
                if not hasattr(responses, "__aiter__"):
                    await responses  # a coroutine, which writes its responses through the context
                    return
            except Exception as error:
                ending = self._end(context, method, error)
                request = context = None  # see _end
                raise await ending from None
            writing = self._write_all(responses, context, method)
            request = responses = context = None  # see _end
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


class _Undecodable:
    """Replaces a request that is not a valid message. An exception in the deserializer would give UNKNOWN."""

    def __init__(self, error: InvalidRequestError) -> None:
        self._error = error

    def refuse(self) -> NoReturn:
        raise self._error


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def convert(data: bytes) -> Any:
        try:
            return decode(data)
        except InvalidRequestError as error:
            return _Undecodable(error)

    return convert


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


def shown_error(method: str, error: Exception) -> QuireError:
    """The error that a client gets: a QuireError unchanged; anything else becomes INTERNAL and an error log."""
    if isinstance(error, QuireError):
        return error
    log.error("%s failed", method, exc_info=error)
    return QuireError(f"internal error in {method}: {type(error).__name__}; see the server's log")
