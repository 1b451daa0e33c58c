"""Reads requests for analysis: a JSON object per line, with a `body` as in OpenAI's batches or a `request` of the SDK.

{"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": [...], "max_completion_tokens": 40}}
{"custom_id": "2", "request": {"prompt": "Once", "temperature": 0.8, "max_tokens": 40}, "expected": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_client.errors import QuireError
from quire_client.requests.generate import generate_request

INPUTS = ("prompt", "token_ids", "messages")
NEW_NAMES = {"max_completion_tokens": "max_tokens", "chat_template_kwargs": "template_kwargs"}
OWN = {"model", "logprobs", "top_logprobs", "prompt_logprobs", "logprobs_mode", "receipt", "resumable", "request_id"}
NO_EFFECT = {"stream", "stream_options", "user", "metadata", "store", "service_tier"}  # in a body


class AnalysisError(Exception):
    """A file cannot be used. The message has the file, the line and the reason."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request of a file."""

    name: str  # custom_id, else the number of its line
    line: Mapping[str, Any]
    input: Mapping[str, Any]  # one of INPUTS
    options: Mapping[str, Any]  # options of the SDK


def read_requests(path: Path) -> list[StoredRequest]:
    """All requests of a file. Raises AnalysisError for the first line that is none, and OSError."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found += [_parse(json.loads(line), str(number))] if line.strip() else []
        except (ValueError, TypeError, KeyError, QuireError) as error:
            raise AnalysisError(f"{path}, line {number}: {error}") from None
    if not found:
        raise AnalysisError(f"{path} has no requests")
    return found


def _parse(line: Any, name: str) -> StoredRequest:
    form = next((key for key in ("body", "request") if isinstance(line, dict) and isinstance(line.get(key), dict)), "")
    if not form:
        raise ValueError('must be an object with a "body" of OpenAI\'s batches or a "request" with options of the SDK')
    options = {key: value for key, value in line[form].items() if key not in OWN and value is not None}
    if form == "body":
        options = _of_body(options)
    asked = {key: options.pop(key) for key in INPUTS if key in options}
    if "session_id" in options:
        raise ValueError("session_id is set; send the whole prompt, because a session is that of one model")
    generate_request(asked.get("prompt"), asked.get("token_ids"), asked.get("messages"), options)  # checks them
    return StoredRequest(str(line.get("custom_id", name)), line, asked, options)


def _of_body(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {NEW_NAMES.get(key, key): value for key, value in body.items() if key not in NO_EFFECT}
    answer_format = options.pop("response_format", {"type": "text"})
    if answer_format["type"] == "json_schema":
        options["json_schema"] = answer_format["json_schema"]["schema"]
    elif answer_format["type"] == "json_object":
        options["json_object"] = True
    options["logit_bias"] = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    return options
