"""Errors that a client may see, with their gRPC codes and HTTP statuses.

    ServiceError                  INTERNAL             500  a bug in the service
      InvalidRequestError       INVALID_ARGUMENT     400  the caller's mistake: field, value, limit
        ContextLengthError      INVALID_ARGUMENT     400  prompt and output exceed the model's length
      NotFoundError             NOT_FOUND            404  no such model or request
      AlreadyExistsError        ALREADY_EXISTS       409  the request id is in flight
      OverloadedError           RESOURCE_EXHAUSTED   429  a limit is reached; carries a retry delay
      UnavailableError          UNAVAILABLE          503  no process can serve the request now
      DeadlineError             DEADLINE_EXCEEDED    408  the time limit that the client set has passed
        LateRequestError        DEADLINE_EXCEEDED    408  the request did not arrive in time; may be retried
      TakenOverError            ABORTED              409  the same request continues in another stream
      UnauthenticatedError      UNAUTHENTICATED      401  no API key or token, or an unknown one
      PermissionDeniedError     PERMISSION_DENIED    403  the caller is known and may not make this call
      NotConfiguredError        FAILED_PRECONDITION  400  the deployment lacks a part that the request needs
      UnimplementedError        UNIMPLEMENTED        400  a call that is not served (clients retry a 501)
      StaleEpochError           FAILED_PRECONDITION  503  a fence: another scheduler owns this worker now

Handlers raise these errors. `ErrorInterceptor` (calls.py) converts them to statuses with google.rpc details: ErrorInfo
always, with the name of the class as its reason, such as CONTEXT_LENGTH.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from itertools import accumulate
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

log = logging.getLogger(__name__)

# gRPC refuses trailing metadata of more than 8 KB in total. The message is in it three times: once in grpc-message,
# where an escaped byte takes three bytes, and twice in the details, as base64.
MAX_TRAILER_BYTES = 6000
IN_DETAILS = 2 * 4 / 3
DOMAIN = "quire.dev"  # ErrorInfo: whose reasons these are
MAX_SUBJECT_CHARS = 200
TRAILER_BYTES = [(1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3) + IN_DETAILS for byte in range(256)]


class ServiceError(Exception):
    """Base of all errors that a client may see. `field` is the invalid request field, if any. `subject`: the name that
    was not found, or the owner whose limit is reached.
    """

    code = grpc.StatusCode.INTERNAL
    http_status = 500

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None, subject: str = "") -> None:
        super().__init__(message)
        self.subject = subject[:MAX_SUBJECT_CHARS]
        self.message = _shortened(message)
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(ServiceError):
    code, http_status = grpc.StatusCode.INVALID_ARGUMENT, 400


class ContextLengthError(InvalidRequestError):
    """`limit`: most tokens of prompt and output together."""

    def __init__(self, message: str, *, field: str, limit: int) -> None:
        super().__init__(message, field=field)
        self.limit = limit


class NotFoundError(ServiceError):
    code, http_status = grpc.StatusCode.NOT_FOUND, 404


class AlreadyExistsError(ServiceError):
    code, http_status = grpc.StatusCode.ALREADY_EXISTS, 409


class OverloadedError(ServiceError):
    code, http_status = grpc.StatusCode.RESOURCE_EXHAUSTED, 429


class UnavailableError(ServiceError):
    code, http_status = grpc.StatusCode.UNAVAILABLE, 503


class RecordsUnavailableError(UnavailableError):
    """The storage of request records cannot be used now."""


class DeadlineError(ServiceError):
    code, http_status = grpc.StatusCode.DEADLINE_EXCEEDED, 408


class LateRequestError(DeadlineError):
    """The request itself did not arrive in time."""


class TakenOverError(ServiceError):
    code, http_status = grpc.StatusCode.ABORTED, 409


class AbortedError(ServiceError):
    code, http_status = grpc.StatusCode.ABORTED, 409


class UnauthenticatedError(ServiceError):
    code, http_status = grpc.StatusCode.UNAUTHENTICATED, 401


class PermissionDeniedError(ServiceError):
    code, http_status = grpc.StatusCode.PERMISSION_DENIED, 403


class UnimplementedError(ServiceError):
    code, http_status = grpc.StatusCode.UNIMPLEMENTED, 400


class NotConfiguredError(ServiceError):
    code, http_status = grpc.StatusCode.FAILED_PRECONDITION, 400


class StaleEpochError(ServiceError):
    code, http_status = grpc.StatusCode.FAILED_PRECONDITION, 503


BY_CODE: dict[int, type[ServiceError]] = {
    kind.code.value[0]: kind
    for kind in (
        ServiceError,
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


def error_from_code(code: int, message: str, *, field: str = "", retry_after_s: float | None = None) -> ServiceError:
    """The error of another service, from the number of its gRPC status code."""
    return BY_CODE.get(code, ServiceError)(message, field=field, retry_after_s=retry_after_s)


def error_of_call(error: Any, words: str) -> ServiceError:
    """The error with which a call to another service has failed, with its field. `words` come before its message."""
    found = ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            found = _field_of(value)
    return error_from_code(error.code().value[0], f"{words}{error.details()}", field=found)


def _field_of(details: bytes) -> str:
    for detail in Status.FromString(details).details:
        request = BadRequest()
        if detail.Unpack(request) and request.field_violations:
            return str(request.field_violations[0].field)
    return ""


def status_metadata(error: ServiceError) -> tuple[tuple[str, str | bytes], ...]:
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
    if error.subject and isinstance(error, NotFoundError):
        _pack(status, ResourceInfo(resource_type=error.field, resource_name=error.subject))
    if error.subject and isinstance(error, OverloadedError):
        _pack(status, QuotaFailure(violations=[{"subject": error.subject}]))
    _pack(status, ErrorInfo(reason=_reason(type(error)), domain=DOMAIN))
    metadata.append(("grpc-status-details-bin", status.SerializeToString()))
    return tuple(metadata)


def _reason(kind: type[ServiceError]) -> str:
    """The name of the error, such as CONTEXT_LENGTH."""
    name = "Internal" if kind is ServiceError else kind.__name__.removesuffix("Error")
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _shortened(message: str) -> str:
    """The longest prefix of the message that fits into the trailing metadata."""
    text = message.encode("utf-8", "replace")
    sizes = list(accumulate(TRAILER_BYTES[byte] for byte in text[:MAX_TRAILER_BYTES]))
    return text[: bisect_right(sizes, MAX_TRAILER_BYTES)].decode("utf-8", "ignore")


def _pack(status: Status, detail: Any) -> None:
    packed = AnyProto()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End the call with the error's code, message and details."""
    await context.abort(error.code, error.message, trailing_metadata=status_metadata(error))


def shown_error(method: str, error: Exception) -> ServiceError:
    """The error that a client gets: a ServiceError unchanged; anything else becomes INTERNAL and an error log."""
    if isinstance(error, ServiceError):
        return error
    log.error("%s failed", method, exc_info=error)
    return ServiceError(f"internal error in {method}: {type(error).__name__}; see the server's log")
