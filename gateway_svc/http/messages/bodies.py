"""Converts bodies of POST /v1/messages to protobuf requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, path_names, set_parameters
from gateway_svc.http.json_text import Json, flag, invalid, list_of, object_of, one_of, optional, shown, text, text_at
from gateway_svc.http.openai.bodies import body_of
from gateway_svc.http.openai.chat import EFFORTS, TOOL_CHOICES, image_part, set_parts
from request_fields.fields import MAX_UINT32

ROLES = ("user", "assistant", "system")
CHOICES = {**TOOL_CHOICES, "any": pb.TOOL_CHOICE_REQUIRED}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
NAMES = {
    "prompt.chat.tool_name": "tool_choice",
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "sampling.json_schema": "output_config.format.schema",
}


@dataclass(frozen=True, slots=True)
class MessagesBody:
    """A parsed body."""

    request: pb.GenerateRequest  # without request_id
    is_stream: bool
    ignored: tuple[str, ...]
    names: Mapping[str, str]  # field names in the body, by field path in GenerateRequest


def messages_request(data: bytes) -> MessagesBody:
    """Parse a body of /v1/messages. Raises InvalidRequestError."""
    body = body_of(data)
    if body.get("max_tokens") is None:
        raise invalid("max_tokens", "is not set; send the maximum number of output tokens")
    return _parsed(body, fields.MESSAGES)


def count_request(data: bytes) -> MessagesBody:
    """Parse a body of /v1/messages/count_tokens. Raises InvalidRequestError."""
    return _parsed(body_of(data), fields.COUNT_TOKENS)


def _parsed(body: Mapping[str, Any], rows: tuple[fields.BodyField, ...]) -> MessagesBody:
    request = pb.GenerateRequest(model=text(body, "model"))
    set_parameters(rows, body, request)
    request.output.parse_chat = True
    request.output.token_ids = False
    chat = request.prompt.chat
    _add_system(chat, body.get("system"))
    _add_messages(chat, body.get("messages"))
    ignored, names = _set_tools(chat, body.get("tools"))
    _set_choice(chat, body.get("tool_choice"))
    _set_variables(chat, body)
    _set_format(request, body)
    return MessagesBody(
        request=request,
        is_stream=flag(body, "stream", default=False),
        ignored=(*ignored_names(rows, body), *ignored),
        names={**NAMES, **names, **path_names(rows, body)},
    )


# -- messages ---------------------------------------------------------------------------------------------------------


def _add_system(chat: pb.Chat, system: Any) -> None:
    if system:
        parts = [_user_part(where, block) for where, block in _blocks("system", system)]
        set_parts(chat.messages.add(role="system"), parts)


def _add_messages(chat: pb.Chat, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    for i, message in enumerate(messages):
        role = one_of(f"messages[{i}].role", object_of(f"messages[{i}]", message).get("role"), ROLES)
        blocks = _blocks(f"messages[{i}].content", message.get("content"))
        if role == "assistant":
            _add_turn(chat.messages.add(role=role), blocks)
        else:
            _add_user(chat, role, blocks)
    last = chat.messages[-1]
    if last.role == "assistant" and last.content and not last.tool_calls:  # the answer continues it
        chat.continue_final_message, chat.add_generation_prompt = True, False


def _blocks(where: str, content: Any) -> Iterator[tuple[str, Json]]:
    """Place and value of each block of a content; a string is one block of text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, f"is {shown(content)}; must be a string or a list of blocks")
    for i, block in enumerate(content):
        yield f"{where}[{i}]", object_of(f"{where}[{i}]", block)


def _add_user(chat: pb.Chat, role: str, blocks: Iterator[tuple[str, Json]]) -> None:
    """A message for each result of a tool, then one with the other blocks."""
    parts, num_before = list[pb.ContentPart](), len(chat.messages)
    for where, block in blocks:
        if block.get("type") == "tool_result":
            result = chat.messages.add(role="tool", tool_call_id=text_at(where, block, "tool_use_id"))
            inner = _blocks(f"{where}.content", block.get("content") or "")
            set_parts(result, [_user_part(place, one) for place, one in inner])
        else:
            parts.append(_user_part(where, block))
    if parts or len(chat.messages) == num_before:
        set_parts(chat.messages.add(role=role), parts)


def _user_part(where: str, block: Json) -> pb.ContentPart:
    kind = block.get("type")
    if kind == "text":
        return pb.ContentPart(text=text_at(where, block, "text"))
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{text(source, 'media_type', where)};base64,{text_at(where, source, 'data')}"
        return image_part(f"{where}.source", url)
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return pb.ContentPart(text=text_at(f"{where}.source", source, "data"))
    raise invalid(
        f"{where}.type", f"is {shown(kind)}; must be text, image, tool_result, or document with a text source"
    )


def _add_turn(message: pb.ChatMessage, blocks: Iterator[tuple[str, Json]]) -> None:
    """A message of the assistant."""
    texts, thoughts = [], []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_at(where, block, "text"))
        elif kind == "thinking":
            thoughts.append(text_at(where, block, "thinking"))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            name, call_id = text_at(where, block, "name"), text_at(where, block, "id")
            message.tool_calls.add(id=call_id, name=name, arguments=arguments)
        elif kind != "redacted_thinking":  # which has no text
            raise invalid(f"{where}.type", f"is {shown(kind)}; must be text, thinking or tool_use")
    message.content, message.reasoning = "\n".join(texts), "\n".join(thoughts)


# -- tools, thinking, format ------------------------------------------------------------------------------------------


def _set_tools(chat: pb.Chat, tools: Any) -> tuple[list[str], dict[str, str]]:
    """Set the tools of the client. Returns the types of other tools, which are ignored, and field names in the body."""
    functions, ignored, names = list[Json](), dict[str, None](), dict[str, str]()
    for i, tool in enumerate(optional(list_of, "tools", tools) or ()):
        if object_of(f"tools[{i}]", tool).get("type") not in (None, "custom"):
            ignored[f"tools.{tool['type']}"] = None
            continue
        path = f"prompt.chat.tools_json[{len(functions)}].function"
        names |= {path: f"tools[{i}]", f"{path}.parameters": f"tools[{i}].input_schema"}
        own = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        functions.append({"type": "function", "function": {**own, "parameters": tool.get("input_schema")}})
    if functions:
        chat.tools_json = json.dumps(functions, ensure_ascii=False)
    return list(ignored), names


def _set_choice(chat: pb.Chat, choice: Any) -> None:
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        chat.tool_name = choice["name"]
    elif isinstance(kind, str) and kind in CHOICES:
        chat.tool_choice = CHOICES[kind]
    else:
        raise invalid("tool_choice", 'must have a type: auto, any, none, or {"type": "tool", "name": ...}')
    if flag(choice, "disable_parallel_tool_use", default=False):
        chat.parallel_tool_calls = False


def _set_variables(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    """Set the variables of templates for `thinking` and the effort. They are also a thinking budget."""
    variables: Json = {}
    thinking = optional(object_of, "thinking", body.get("thinking"))
    if thinking:
        kind = one_of("thinking.type", thinking.get("type"), THINKING)
        variables["enable_thinking"] = THINKING[kind]
        budget = thinking.get("budget_tokens") if THINKING[kind] else 0
        if budget is not None:
            if type(budget) is not int or not 0 <= budget <= MAX_UINT32:
                words = f"is {shown(budget)}; must be a number of tokens from 0 to {MAX_UINT32}"
                raise invalid("thinking.budget_tokens", words)
            variables["thinking_budget"] = budget
    effort = (optional(object_of, "output_config", body.get("output_config")) or {}).get("effort")
    if effort is not None:
        one_of("output_config.effort", effort, (*EFFORTS, "max"))
        variables["reasoning_effort"] = EFFORTS[-1] if effort == "max" else effort
    if variables:
        chat.template_kwargs_json = json.dumps(variables)


def _set_format(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    """The schema of the answer, from `output_config` or from `output_format`, its earlier name."""
    given = (optional(object_of, "output_config", body.get("output_config")) or {}).get("format")
    name, form = ("output_config.format", given) if given else ("output_format", body.get("output_format"))
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise invalid(name, 'must be {"type": "json_schema", "schema": {...}}')
    request.sampling.json_schema = json.dumps(form["schema"], ensure_ascii=False)
