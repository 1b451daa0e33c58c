"""Converts chat messages of a body to protobuf messages, and parts of an answer to its message. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http.json_text import Json, flag, invalid, list_of, object_of, one_of, optional, shown, text, text_at

# Fields of a message that would change the prompt but do not exist in the protocol.
UNSERVED = ("function_call", "audio")
KNOWN = (
    *("role", "content", "refusal", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"),
    *UNSERVED,
)
TEXT_PARTS = ("text", "refusal")  # types of parts, whose text has the name of the type
WITHOUT_MEANING = ("annotations",)  # fields of answers; ignored if empty
TOOL_CHOICES = {"none": pb.TOOL_CHOICE_NONE, "auto": pb.TOOL_CHOICE_AUTO, "required": pb.TOOL_CHOICE_REQUIRED}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def chat_of(body: Mapping[str, Any]) -> tuple[pb.Chat, list[str]]:
    """The conversation, and the names of ignored message fields. Raises InvalidRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    chat, ignored = pb.Chat(), dict[str, None]()
    for i, message in enumerate(messages):
        _add_message(chat.messages.add(), f"messages[{i}]", object_of(f"messages[{i}]", message))
        ignored |= {f"messages.{name}": None for name, value in message.items() if _is_ignored(name, value)}
    _set_template(chat, body)
    _set_tools(chat, body)
    return chat, list(ignored)


def _is_ignored(name: str, value: Any) -> bool:
    return name not in KNOWN and (bool(value) or name not in WITHOUT_MEANING)


def _add_message(message: pb.ChatMessage, where: str, body: Mapping[str, Any]) -> None:
    for name in UNSERVED:
        if body.get(name):
            raise invalid(f"{where}.{name}", "is not served by this version; leave it unset")
    message.role = text_at(where, body, "role")
    _set_content(message, f"{where}.content", body.get("content"))
    message.content = message.content or text(body, "refusal", where)
    message.tool_call_id = text(body, "tool_call_id", where)
    message.name = text(body, "name", where)
    message.reasoning = text(body, "reasoning", where) or text(body, "reasoning_content", where) or message.reasoning
    for i, call in enumerate(optional(list_of, f"{where}.tool_calls", body.get("tool_calls")) or ()):
        _add_call(message.tool_calls.add(), f"{where}.tool_calls[{i}]", call)


def _add_call(message: pb.ToolCall, where: str, call: Any) -> None:
    if object_of(where, call).get("type", "function") != "function":
        raise invalid(f"{where}.type", f"is {shown(call['type'])}; must be 'function', the only supported type")
    function = object_of(f"{where}.function", call.get("function"))
    message.id = text(call, "id", where)
    message.name = text(function, "name", f"{where}.function")
    message.arguments = text(function, "arguments", f"{where}.function")


def _set_content(message: pb.ChatMessage, where: str, content: Any) -> None:
    """A string, or a list of parts. Texts without an image are joined by line breaks (as in vLLM)."""
    if content is None:
        return
    if isinstance(content, str):
        message.content = content
        return
    if not isinstance(content, list):
        raise invalid(where, f"is {shown(content)}; must be a string or a list of parts")
    thoughts = [i for i, part in enumerate(content) if isinstance(part, dict) and part.get("type") == "thinking"]
    message.reasoning = "\n".join(text(content[i], "thinking", f"{where}[{i}]") for i in thoughts)
    set_parts(message, [_part_of(f"{where}[{i}]", part) for i, part in enumerate(content) if i not in thoughts])


def set_parts(message: pb.ChatMessage, parts: Sequence[pb.ContentPart]) -> None:
    """The content of a message: its parts if one is an image, else their text."""
    if any(part.HasField("image") for part in parts):
        message.parts.extend(parts)
    else:
        message.content = "\n".join(part.text for part in parts)


def _part_of(where: str, part: Any) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if object_of(where, part).get("type") == "image_url":
        image = part.get("image_url")
        return image_part(f"{where}.image_url", image.get("url") if isinstance(image, dict) else image)
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        words = f"is {shown(kind)}; must be {', '.join(map(repr, TEXT_PARTS))}, 'thinking' or 'image_url'"
        raise invalid(f"{where}.type", words)
    return pb.ContentPart(text=text_at(where, part, kind))


def image_part(where: str, url: Any) -> pb.ContentPart:
    """The image of a data URL: data:image/png;base64,... Raises InvalidRequestError; nothing is fetched."""
    if not isinstance(url, str):
        raise invalid(where, f"is {shown(url)}; must be a URL that begins with data:")
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        raise invalid(where, f"is {shown(url)}; images are not fetched: send a URL that begins with data:image/")
    if not comma or not head.endswith(";base64"):
        raise invalid(where, f"begins with {shown(head)}; must be data:image/TYPE;base64, and the image in base64")
    try:
        return pb.ContentPart(image=base64.b64decode(data, validate=True))
    except ValueError as error:
        raise invalid(where, f"is not base64: {error}") from None


def _set_template(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    chat.continue_final_message = flag(body, "continue_final_message", default=False)
    adds = flag(body, "add_generation_prompt", default=not chat.continue_final_message)
    if adds and chat.continue_final_message:
        raise invalid("add_generation_prompt", "is true with continue_final_message; set only one of them")
    if not (adds or chat.continue_final_message):
        chat.add_generation_prompt = False
    chat.chat_template = text(body, "chat_template")
    if "{" in chat.chat_template:
        raise invalid(
            "chat_template", "must be the name of a template of the model or of --chat-template, not a template itself"
        )
    kwargs = optional(object_of, "chat_template_kwargs", body.get("chat_template_kwargs"))
    if kwargs := {**effort_variables("reasoning_effort", body.get("reasoning_effort")), **(kwargs or {})}:
        chat.template_kwargs_json = json.dumps(kwargs, ensure_ascii=False)


def effort_variables(name: str, effort: Any) -> dict[str, Any]:
    """An effort as variables of templates; `none` disables reasoning if the template supports that."""
    if effort is None:
        return {}
    off = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": one_of(name, effort, EFFORTS), **off}


def _set_tools(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    tools, choice = optional(list_of, "tools", body.get("tools")), body.get("tool_choice")
    if tools:
        chat.tools_json = json.dumps(tools, ensure_ascii=False)
    if isinstance(choice, dict):
        chat.tool_name = _chosen_name(choice)
    elif choice is not None:
        if not isinstance(choice, str) or choice not in TOOL_CHOICES:
            raise invalid("tool_choice", f"is {shown(choice)}; must be none, auto, required or an object with a name")
        chat.tool_choice = TOOL_CHOICES[choice]
    if not flag(body, "parallel_tool_calls", default=True):
        chat.parallel_tool_calls = False


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str) or not name:
        raise invalid("tool_choice", 'must be {"type": "function", "function": {"name": ...}} to name a tool')
    return name


# -- answers ----------------------------------------------------------------------------------------------------------


def delta_of(part: pb.AnswerPart) -> Json:
    """The delta of one part. The id and the name of a call are in its first delta only.

    Reasoning has both names that clients read.
    """
    if part.HasField("content"):
        return {"content": part.content}
    if part.HasField("reasoning"):
        return {"reasoning": part.reasoning, "reasoning_content": part.reasoning}
    call = part.tool_call
    if part.offset:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    function = {"name": call.name, "arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}


class MessageBuilder:
    """The message of a whole answer, from its parts."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, tuple[pb.ToolCallPart, list[str]]] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def add(self, parts: Iterable[pb.AnswerPart]) -> None:
        for part in parts:
            if part.HasField("content"):
                self._content.append(part.content)
            elif part.HasField("reasoning"):
                self._reasoning.append(part.reasoning)
            else:
                call = part.tool_call
                self._calls.setdefault(call.index, (call, []))[1].append(call.arguments)

    def message(self) -> Json:
        """The message. Its content is null if it has tool calls only."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [_call(first, "".join(arguments)) for first, arguments in self._calls.values()]
        return {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
            "annotations": [],
            **({"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


def _call(first: pb.ToolCallPart, arguments: str) -> Json:
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}}
