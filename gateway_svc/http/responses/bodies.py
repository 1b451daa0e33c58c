"""Converts a body of POST /v1/responses to a protobuf request. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, path_names, set_parameters
from gateway_svc.http.json_text import Json, flag, invalid, list_of, object_of, one_of, optional, shown, text, text_at
from gateway_svc.http.openai.bodies import body_of
from gateway_svc.http.openai.chat import TOOL_CHOICES, effort_variables, image_part, set_parts
from gateway_svc.http.responses.events import HEAD_DEFAULTS, MESSAGE, REASONING, item_id
from gateway_svc.http.responses.tools import (
    ADDITIONAL,
    BUILT_IN,
    CUSTOM,
    FUNCTION,
    KINDS,
    NAMESPACE,
    OUTPUTS,
    Tools,
    arguments_of,
    flat_name,
    found_in,
    output_of,
    tools_of,
)

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
MAX_ITEMS = 10_000


def items_of(value: Any) -> list[Json]:
    """The items of an `input`: a string is one user message. Raises InvalidRequestError."""
    if isinstance(value, str):
        return [{"type": MESSAGE, "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list) or not value:
        raise invalid("input", f"is {shown(value)}; must be a string or a list of at least one item")
    if len(value) > MAX_ITEMS:
        raise invalid("input", f"has {len(value)} items; at most {MAX_ITEMS} are allowed")
    return [_item_of(f"input[{i}]", item) for i, item in enumerate(value)]


def with_ids(response_id: str, items: Sequence[Json]) -> list[Json]:
    """The items with ids, as the endpoint input_items returns them."""
    return [{"id": item_id(response_id, MESSAGE, f"input/{i}"), **item} for i, item in enumerate(items)]


def messages_of(items: Sequence[Json], where: str = "input") -> list[pb.ChatMessage]:
    """The chat messages of items. Raises InvalidRequestError."""
    messages: list[pb.ChatMessage] = []
    for i, item in enumerate(items):
        _add(messages, f"{where}[{i}]", item)
    return messages


def _item_of(where: str, value: Any) -> Json:
    item = object_of(where, value)
    if item.get("type", MESSAGE) != MESSAGE:
        return item
    one_of(f"{where}.role", item.get("role"), ROLES)
    content = item.get("content")
    if isinstance(content, str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        content = [{"type": part, "text": content}]
    return {**item, "type": MESSAGE, "content": content}


def _add(messages: list[pb.ChatMessage], where: str, item: Json) -> None:
    """Append an item. Reasoning, text and calls of one turn become one assistant message."""
    kind = item.get("type")
    kind = kind if isinstance(kind, str) else ""
    if kind == MESSAGE and item["role"] != "assistant":
        messages.append(pb.ChatMessage(role=item["role"]))
        _set_content(messages[-1], f"{where}.content", item["content"])
    elif kind == MESSAGE:
        turn = _turn(messages, is_taken=lambda last: bool(last.content or last.tool_calls))
        turn.content = _text_of(f"{where}.content", item["content"])
    elif kind == REASONING:
        _turn(messages, is_taken=lambda last: True).reasoning = _reasoning_of(where, item)
    elif kind in KINDS:
        call = _turn(messages, is_taken=lambda last: False).tool_calls.add()
        namespace = text_at(where, item, NAMESPACE) if item.get(NAMESPACE) else ""
        name = text_at(where, item, "name") if KINDS[kind].text else KINDS[kind].tool
        call.id, call.name = text_at(where, item, "call_id"), flat_name(namespace, name)
        call.arguments = arguments_of(where, item)
    elif kind in OUTPUTS:
        call_id = "call_id" if "call_id" in item or kind != "local_shell_call_output" else "id"
        messages.append(pb.ChatMessage(role="tool", tool_call_id=text_at(where, item, call_id)))
        _set_content(messages[-1], f"{where}.output", output_of(where, item))
    elif kind != ADDITIONAL:
        known = (MESSAGE, REASONING, *KINDS, *OUTPUTS, ADDITIONAL)
        raise invalid(f"{where}.type", f"is {shown(item.get('type'))}; must be one of {', '.join(known)}")


def _turn(messages: list[pb.ChatMessage], is_taken: Callable[[pb.ChatMessage], bool]) -> pb.ChatMessage:
    """The assistant message at the end. A new one is added if there is none or `is_taken` is true for it."""
    if not messages or messages[-1].role != "assistant" or is_taken(messages[-1]):
        messages.append(pb.ChatMessage(role="assistant"))
    return messages[-1]


def _reasoning_of(where: str, item: Json) -> str:
    """The text of reasoning, or its summary if there is no text. Encrypted reasoning of other servers has neither."""
    return _text_of(f"{where}.content", item.get("content") or item.get("summary") or [])


def _set_content(message: pb.ChatMessage, where: str, parts: Any) -> None:
    """The content of a message that may have images."""
    if not isinstance(parts, list):
        message.content = _text_of(where, parts)
        return
    set_parts(message, [part_of(f"{where}[{i}]", part) for i, part in enumerate(parts)])


def part_of(where: str, part: Any) -> pb.ContentPart:
    """A text or an image. Raises InvalidRequestError."""
    if not isinstance(part, Mapping) or part.get("type") != "input_image":
        return pb.ContentPart(text=_part_text(where, part))
    if part.get("file_id"):
        raise invalid(f"{where}.file_id", "is set, but there are no files; send image_url with a data: URL")
    return image_part(f"{where}.image_url", part.get("image_url"))


def _text_of(where: str, parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise invalid(where, f"is {shown(parts)}; must be a string or a list of parts")
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(parts))


def _part_text(where: str, part: Any) -> str:
    if object_of(where, part).get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if part.get("type") == "input_json" and isinstance(part.get("data"), dict | list):
        return json.dumps(part["data"], ensure_ascii=False, separators=(",", ":"))
    if part.get("type") not in TEXT_PARTS:
        words = f"is {shown(part.get('type'))}; must be one of {', '.join(TEXT_PARTS)}, or input_image of a user"
        raise invalid(f"{where}.type", words)
    return text_at(where, part, "text")


MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
NAMES = {
    "prompt.chat.tool_name": "tool_choice", "prompt.chat.messages": "input", "prompt.chat": "input",
    "resumable": "store", "sampling.json_schema": "text.format.schema", "sampling.json_object": "text.format",
}  # fmt: skip
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
        "metadata": metadata_of(body),
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


def metadata_of(body: Mapping[str, Any]) -> Json:
    """The field `metadata` of a body, checked."""
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
