"""Converts a body of POST /v1/responses to a protobuf request. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, path_names, set_parameters
from gateway_svc.http.openai.bodies import body_of
from gateway_svc.http.openai.chat import TOOL_CHOICES, effort_variables
from gateway_svc.http.responses.events import HEAD_DEFAULTS
from gateway_svc.http.responses.items import items_of, messages_of
from gateway_svc.http.responses.tools import BUILT_IN, CUSTOM, FUNCTION, NAMESPACE, Tools, flat_name, found_in, tools_of
from gateway_svc.http.values import Json, flag, invalid, list_of, object_of, one_of, optional, shown, text

MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
NAMES = {
    "prompt.chat.tool_name": "tool_choice",
    "prompt.chat.messages": "input",
    "prompt.chat": "input",
    "resumable": "store",
    "sampling.json_schema": "text.format.schema",
    "sampling.json_object": "text.format",
}
LOGPROBS = "message.output_text.logprobs"  # a value of `include`
REPEATED = ("user", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A parsed body."""

    request: pb.GenerateRequest  # without request_id, instructions and the messages of the previous response
    instructions: str
    items: list[Json]  # the input
    head: Json  # fields of the response object that repeat the request
    previous_id: str
    store: bool | None  # None: store it if the gateway keeps records
    is_stream: bool
    is_background: bool
    truncates: bool  # leave out the oldest turns of a conversation that is too long
    ignored: tuple[str, ...]
    names: Mapping[str, str]  # field names in the body, by field path in GenerateRequest


def response_request(data: bytes) -> ResponseBody:
    """Parse a body. Raises InvalidRequestError."""
    body = body_of(data)
    request = pb.GenerateRequest(model=text(body, "model"))
    set_parameters(fields.RESPONSES, body, request)
    items = items_of(body.get("input"))
    request.output.parse_chat = True
    _set_logprobs(request, body.get("include"))
    chat = request.prompt.chat
    chat.messages.extend(messages_of(items))
    tools = _set_tools(chat, body, items)
    _set_format(request, body)
    _set_reasoning(chat, body)
    return ResponseBody(
        request=request,
        instructions=text(body, "instructions"),
        items=items,
        head=_head(body, request, items),
        previous_id=text(body, "previous_response_id"),
        store=None if body.get("store") is None else flag(body, "store", default=True),
        is_stream=flag(body, "stream", default=False),
        is_background=flag(body, "background", default=False),
        truncates=_truncation(body) == "auto",
        ignored=(*ignored_names(fields.RESPONSES, body), *tools.ignored),
        names={**NAMES, **tools.names, **path_names(fields.RESPONSES, body)},
    )


def _head(body: Mapping[str, Any], request: pb.GenerateRequest, items: Sequence[Json]) -> Json:
    """The fields that are known before the request starts. Clients require most of them."""
    sampling, stop = request.sampling, request.stop
    reasoning = body.get("reasoning") or {}
    return {
        "object": "response",
        "background": flag(body, "background", default=False),
        **HEAD_DEFAULTS,
        "instructions": body.get("instructions"),
        "max_output_tokens": stop.max_tokens if stop.HasField("max_tokens") else None,
        "max_tool_calls": None,
        "metadata": _metadata(body),
        "parallel_tool_calls": flag(body, "parallel_tool_calls", default=True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "temperature": sampling.temperature if sampling.HasField("temperature") else 1.0,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [*(body.get("tools") or ()), *(tool for _, found in found_in(items) for tool in found or ())],
        "top_logprobs": request.output.logprobs,
        "top_p": sampling.top_p if sampling.HasField("top_p") else 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": _truncation(body),
        **{name: text(body, name) or None for name in REPEATED},
    }


def _set_logprobs(request: pb.GenerateRequest, include: Any) -> None:
    """Log probabilities are returned if `include` names them or `top_logprobs` is set."""
    if LOGPROBS in (optional(list_of, "include", include) or ()):
        request.output.logprobs = request.output.logprobs
    elif not request.output.logprobs:
        request.output.ClearField("logprobs")


def _truncation(body: Mapping[str, Any]) -> str:
    return one_of("truncation", body.get("truncation") or "disabled", ("auto", "disabled"))


def _metadata(body: Mapping[str, Any]) -> Json:
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"is {shown(metadata)}; must be an object with at most {MAX_METADATA} strings")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE or len(key) > MAX_METADATA_KEY:
            words = f"must be a string of at most {MAX_METADATA_VALUE} characters, its name at most {MAX_METADATA_KEY}"
            raise invalid(f"metadata.{key[:MAX_METADATA_KEY]}", words)
    return metadata


def _set_tools(chat: pb.Chat, body: Mapping[str, Any], items: Sequence[Json]) -> Tools:
    """Set the tools and tool_choice."""
    tools, choice = tools_of(body.get("tools"), items), body.get("tool_choice")
    if choice == "required" and tools.ignored and not tools.given:
        raise invalid("tool_choice", f"is required, but {', '.join(tools.ignored)} is not served; send another tool")
    if tools.given:
        chat.tools_json = json.dumps(tools.given, ensure_ascii=False)
    _set_choice(chat, choice)
    if not flag(body, "parallel_tool_calls", default=True):
        chat.parallel_tool_calls = False
    return tools


def _set_choice(chat: pb.Chat, choice: Any) -> None:
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in (FUNCTION, CUSTOM) and isinstance(choice.get("name"), str):
        chat.tool_name = flat_name(str(choice.get(NAMESPACE) or ""), choice["name"])
    elif isinstance(kind, str) and kind in BUILT_IN:
        chat.tool_name = kind
    elif isinstance(choice, str) and choice in TOOL_CHOICES:
        chat.tool_choice = TOOL_CHOICES[choice]
    else:
        words = f'is {shown(choice)}; must be none, auto, required or {{"type": "function", "name": ...}}'
        raise invalid("tool_choice", words)


def _set_format(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    form = (optional(object_of, "text", body.get("text")) or {}).get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if one_of("text.format.type", kind, ("text", "json_schema", "json_object")) == "json_schema":
        schema = object_of("text.format.schema", form.get("schema"))
        request.sampling.json_schema = json.dumps(schema, ensure_ascii=False)
    elif kind == "json_object":
        request.sampling.json_object = True


def _set_reasoning(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    effort = (optional(object_of, "reasoning", body.get("reasoning")) or {}).get("effort")
    if variables := effort_variables("reasoning.effort", effort):
        chat.template_kwargs_json = json.dumps(variables)
