"""Errors in OpenAI's format. Body, status and headers follow from the classes of svc_common/errors.py. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from svc_common.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    LateRequestError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip
MESSAGES = "/v1/messages"  # the endpoints of Anthropic's API
MESSAGE_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
CODES: dict[type[ServiceError], str] = {
    ContextLengthError: "context_length_exceeded",
    DeadlineError: "deadline_exceeded",
    UnauthenticatedError: "invalid_api_key",
    OverloadedError: "rate_limit_exceeded",
}
RETRY_AFTER_S = 1.0  # for retryable errors without their own delay
# Field path in the protocol -> field name in a body, for fields that are not in the table of parameters.
PROMPT_NAMES = {
    "prompt.chat.template_kwargs_json": "chat_template_kwargs", "prompt.chat.tools_json": "tools",
    "prompt.chat.tool_choice": "tool_choice", "prompt.chat.tool_name": "tool_choice",
    "prompt.chat.add_generation_prompt": "add_generation_prompt", "prompt.chat.messages": "messages",
    "prompt.chat": "messages", "prompt.text": "prompt", "prompt.tokens.ids": "prompt",
}  # fmt: skip


GRAMMAR_FAILED = "grammar: "  # how the message of a row begins whose grammar cannot be applied to its output


def error_of_sample(message: str) -> ServiceError:
    """The error of a sample that failed."""
    if message.startswith(GRAMMAR_FAILED):
        return InvalidRequestError(f"{message}; simplify the grammar or schema of the request")
    return ServiceError(message or "the server could not finish the answer; send the request again")


class BodyTooLargeError(InvalidRequestError):
    http_status = 413


class MethodNotAllowedError(InvalidRequestError):
    """`allowed`: the methods of the path."""

    http_status = 405

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


RETRYABLE = (OverloadedError, UnavailableError, LateRequestError)


def error_body(error: ServiceError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`{"error": {...}}`. `names`: field names in the body, by field path in GenerateRequest."""
    message, param = _renamed(error.message, error.field, {**PROMPT_NAMES, **(names or {})})
    if isinstance(error, ContextLengthError):  # clients match these words
        message = f"This model's maximum context length is {error.limit} tokens. However, {message}"
    kind = TYPES.get(error.http_status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": _code_of(error)}}


def error_body_of(path: str, error: ServiceError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The body of an error of an endpoint."""
    return message_error(error, names) if path.startswith(MESSAGES) else error_body(error, names)


def message_error(error: ServiceError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """An error in Anthropic's format."""
    found = error_body(error, names)["error"]
    return {"type": "error", "error": {"type": MESSAGE_TYPES.get(error.http_status, found["type"]), **_words(found)}}


def _words(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("message", "param", "code")}


def error_headers(error: ServiceError) -> dict[str, str]:
    """Headers that say whether and when a client should retry."""
    is_retryable = isinstance(error, RETRYABLE)
    headers = {"x-should-retry": "true" if is_retryable else "false"}
    if is_retryable:
        delay_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after-ms"] = str(math.ceil(1000 * delay_s))
        headers["retry-after"] = str(math.ceil(delay_s))
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = error.allowed
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def _code_of(error: ServiceError) -> str | None:
    if isinstance(error, NotFoundError) and error.field == "model":
        return "model_not_found"
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), None)


def _renamed(message: str, field: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Message and field with the body's names. Longer paths are replaced first: one path may be a prefix of another."""
    for path in sorted(names, key=len, reverse=True):
        message = message.replace(path, names[path])
        if field.startswith(path):
            field = names[path] + field.removeprefix(path)
    return message, field
