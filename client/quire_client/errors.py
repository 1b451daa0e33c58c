"""All exceptions of the SDK.

QuireError                the base: code, message, request_id, details
  ConnectionFailed        UNAVAILABLE          no server answers, or no server can run the request now; safe to retry
  DeadlineExceeded        DEADLINE_EXCEEDED    timeout_s has passed
  Cancelled               CANCELLED            this client or the server cancelled the call
  InvalidRequest          INVALID_ARGUMENT     the request is wrong: field_violations has field and limit
  ModelNotFound           NOT_FOUND            no such model
    RequestNotFound       NOT_FOUND            no record of a request to resume, or of a session
  NotConfigured           FAILED_PRECONDITION  the deployment does not have what the request needs, e.g. Redis
  AlreadyExists           ALREADY_EXISTS       another open request has this request_id
  Overloaded              RESOURCE_EXHAUSTED   a limit is reached: retry after retry_after_s
  Unauthenticated         UNAUTHENTICATED      the API key is missing or wrong
  PermissionDenied        PERMISSION_DENIED    the API key does not allow this call
  Unimplemented           UNIMPLEMENTED        a field or call that this server does not support
  InternalError           INTERNAL and others  a bug in the server
    GenerationFailed      a sample ended with ERROR; `result` has the output so far
    UnexpectedOutput      the output does not match `response_model`; `result` has it
    StreamCorrupted       DATA_LOSS            events are missing, repeated, changed or out of order
      StreamEndedEarly    DATA_LOSS            the stream ended before all samples had finished
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from request_fields.fields import FIELDS

if TYPE_CHECKING:
    from quire_client.types import GenerateResult, PartialSample

M = TypeVar("M", bound=Message)

# A gRPC server that stops ends open calls with CANCELLED and no message; an intended cancel has a message.
SERVER_GONE = "the server cancelled the call without a message; it is probably shutting down"
# The error of a connection that breaks during a call: one of these codes, and a message of gRPC (not of the server).
TRANSPORT_CODES = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})
TRANSPORT_WORDS = (
    "rst_stream", "internal error from core", "connection reset", "connection aborted", "connection closed",
    "stream removed", "stream closed", "socket closed", "broken pipe", "transport closed", "endpoint closing", "goaway",
    "keepalive watchdog", "ping timeout", "unexpected <class 'asyncio.exceptions.cancellederror'>",
)  # fmt: skip
# The SDK's names of the protocol's fields
OPTIONS = {field.path: field.option for field in FIELDS} | {
    "prompt.text": "prompt",
    "prompt.tokens": "token_ids",
    "prompt.tokens.ids": "token_ids",
    "prompt.chat": "messages",
    "prompt.chat.messages": "messages",
    "prompt.chat.tools_json": "tools",
    "prompt.chat.template_kwargs_json": "template_kwargs",
}
PATH = re.compile(rf"(?<![-\w])({'|'.join(sorted(map(re.escape, OPTIONS), key=len, reverse=True))})(?![-\w]|\.\w)")
DETAIL_NAMES = ("BadRequest", "RetryInfo", "ErrorInfo", "QuotaFailure", "ResourceInfo")
DETAILS: Mapping[str, type[Message]] = {f"google.rpc.{name}": getattr(error_details_pb2, name) for name in DETAIL_NAMES}
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid request field and the reason."""

    field: str
    description: str


class QuireError(Exception):
    """Base of all errors. `details` has the fields of the google.rpc details, by the type's name.

    `partial`: the output of each sample received before a generation failed; empty if none was received.
    `wire_message`: the gateway's message with the protocol's names of fields (`sampling.temperature`); `message` and
    `field_violations` have the SDK's names of options (`temperature`).
    """

    code = grpc.StatusCode.UNKNOWN
    partial: tuple[PartialSample, ...] = ()
    wire_message = ""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        request_id: str = "",
        details: dict[str, dict[str, Any]] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.request_id = request_id
        self.details = details or {}
        self.field_violations = field_violations
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[QuireError], args: tuple[Any, ...], fields: dict[str, Any]) -> QuireError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConnectionFailed(QuireError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(QuireError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(QuireError):
    code = grpc.StatusCode.CANCELLED


class InvalidRequest(QuireError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class ModelNotFound(QuireError):
    code = grpc.StatusCode.NOT_FOUND


class RequestNotFound(ModelNotFound):
    """Retrying does not help: the record has expired, was deleted, or belongs to another API key."""


class NotConfigured(QuireError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class AlreadyExists(QuireError):
    code = grpc.StatusCode.ALREADY_EXISTS


class Overloaded(QuireError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unauthenticated(QuireError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(QuireError):
    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(QuireError):
    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(QuireError):
    code = grpc.StatusCode.INTERNAL


class StreamCorrupted(InternalError):
    code = grpc.StatusCode.DATA_LOSS


class StreamEndedEarly(StreamCorrupted):
    """The server closed the stream without an error before it was complete."""


class GenerationFailed(InternalError):
    """A sample ended with ERROR. `result` has all samples with their tokens so far."""

    def __init__(self, message: str, *, result: GenerateResult) -> None:
        super().__init__(message, request_id=result.request_id)
        self.result = result


class UnexpectedOutput(InternalError):
    """The output is not JSON of the `response_model`, e.g. because max_tokens ended it. `result` has the output."""

    def __init__(self, message: str, *, result: GenerateResult) -> None:
        super().__init__(message, request_id=result.request_id)
        self.result = result


KINDS: tuple[type[QuireError], ...] = (
    ConnectionFailed, DeadlineExceeded, Cancelled, InvalidRequest, ModelNotFound, NotConfigured, AlreadyExists,
    Overloaded, Unauthenticated, PermissionDenied, Unimplemented, InternalError,
)  # fmt: skip
BY_CODE = {kind.code: kind for kind in KINDS} | {grpc.StatusCode.OUT_OF_RANGE: InvalidRequest}


def error_from_rpc(error: grpc.RpcError, request_id: str = "") -> QuireError:
    """The typed error of a failed call, with its google.rpc details decoded. Never raises."""
    code = _call(error, "code", grpc.StatusCode.UNKNOWN)
    message = _call(error, "details", "") or code.name
    if code is grpc.StatusCode.CANCELLED and message == code.name:
        code, message = grpc.StatusCode.UNAVAILABLE, SERVER_GONE
    if _is_dead_connection(code, message):
        code, message = grpc.StatusCode.UNAVAILABLE, f"the connection broke ({code.name}: {message})"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline exceeded" in message.lower():  # words of gRPC
        message = "timeout_s has passed before the answer was complete"
    metadata = {str(key): value for key, value in _call(error, "trailing_metadata", None) or ()}
    details = _status_details(metadata.get(DETAILS_KEY, b""))
    violations = _field_violations(details.get(error_details_pb2.BadRequest))
    retry_after_s = _retry_delay_s(details.get(error_details_pb2.RetryInfo))
    if retry_after_s is None:
        retry_after_s = _pushback_s(metadata.get(PUSHBACK_KEY))
    kind = BY_CODE.get(code, InternalError)
    if kind is ModelNotFound and any(
        violation.field in ("request_id", "session_id", "draft_of") for violation in violations
    ):
        kind = RequestNotFound
    found = kind(
        renamed(message, OPTIONS),
        code=code,
        request_id=request_id,
        details={kind.DESCRIPTOR.full_name: _fields_of(message) for kind, message in details.items()},
        field_violations=violations,
        retry_after_s=retry_after_s,
    )
    found.wire_message = message
    return found


def renamed(message: str, names: Mapping[str, str]) -> str:
    """The message with other names for the protocol's fields, the keys of `names`."""
    return PATH.sub(lambda found: names.get(found[0], found[0]), message)


def gateway_hangs(stall_timeout_s: float | None, request_id: str) -> ConnectionFailed:
    """The error of a stream whose gateway sends nothing and answers no health check."""
    message = f"the gateway has sent nothing for {stall_timeout_s or 0:g} s and does not answer health checks"
    return ConnectionFailed(message, request_id=request_id)


def unanswered(error: QuireError) -> QuireError | None:
    """The error of a health check without an answer; None if a server sent any answer."""
    if isinstance(error, DeadlineExceeded):
        return ConnectionFailed(f"no answer in time: {error.message}")
    return error if isinstance(error, ConnectionFailed | Cancelled) else None


def client_closed() -> Cancelled:
    """The error of a call on a closed client."""
    return Cancelled("the client is closed")


def _is_dead_connection(code: grpc.StatusCode, message: str) -> bool:
    if code is grpc.StatusCode.UNKNOWN and message == code.name:
        return True  # no trailers: the server process ended during the call
    words = message.lower()
    return code in TRANSPORT_CODES and any(word in words for word in TRANSPORT_WORDS)


def invalid(field: str, message: str) -> InvalidRequest:
    """An invalid argument, detected before anything is sent."""
    return InvalidRequest(message, field_violations=(FieldViolation(field, message),))


def _call(error: grpc.RpcError, name: str, default: Any) -> Any:
    method = getattr(error, name, None)
    value = method() if callable(method) else None
    return default if value is None else value


def _status_details(data: bytes) -> dict[type[Message], Any]:
    """The details of a google.rpc.Status by type. Details of unknown types are left out."""
    entries = {entry.type_url.rpartition("/")[2]: entry.value for entry in _parsed(status_pb2.Status, data).details}
    return {kind: _parsed(kind, entries[name]) for name, kind in DETAILS.items() if name in entries}


def _fields_of(message: Message) -> dict[str, Any]:
    """The fields as plain values; none if a value is invalid, e.g. a duration out of range."""
    try:
        found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    except (ValueError, json_format.Error):
        return {}
    return found


def _field_violations(details: Any) -> tuple[FieldViolation, ...]:
    found = details.field_violations if details else ()
    return tuple(FieldViolation(renamed(one.field, OPTIONS), renamed(one.description, OPTIONS)) for one in found)


def _retry_delay_s(details: Any) -> float | None:
    if details is None:
        return None
    delay = details.retry_delay
    return float(delay.seconds + delay.nanos * 1e-9)


def _parsed(kind: type[M], data: bytes) -> M:
    """The message; an empty one if the bytes are invalid: error details must not cause a second error."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return kind()


def _pushback_s(value: str | bytes | None) -> float | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return int(text) / 1000 if text and text.isdigit() else None
