"""Converts chat messages of a body to protobuf messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http.fields import invalid, shown

ROLES = {"developer": "system"}  # OpenAI's role -> the protocol's; all other roles have the same name
# Fields of a message that would change the prompt but do not exist in the protocol.
UNSERVED = ("tool_calls", "function_call", "audio", "refusal")
KNOWN = ("role", "content", *UNSERVED)
TOOL_CHOICES = ("none", "auto")


def chat_of(body: Mapping[str, Any]) -> tuple[pb.Chat, list[str]]:
    """The conversation, and the names of ignored message fields. Raises InvalidRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    chat, ignored = pb.Chat(), dict[str, None]()
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid(f"messages[{i}]", f"is {shown(message)}; must be an object")
        chat.messages.append(_message_of(f"messages[{i}]", message))
        ignored |= {f"messages.{name}": None for name in message if name not in KNOWN}
    _set_template(chat, body)
    _set_tools(chat, body)
    return chat, list(ignored)


def _message_of(where: str, message: Mapping[str, Any]) -> pb.ChatMessage:
    for name in UNSERVED:
        if message.get(name):
            raise invalid(f"{where}.{name}", "is not served by this version; leave it unset")
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid(f"{where}.role", f"is {shown(role)}; must be a string")
    return pb.ChatMessage(role=ROLES.get(role, role), content=_text_of(f"{where}.content", message.get("content")))


def _text_of(where: str, content: Any) -> str:
    """The text of a message's content: a string, or text parts joined by line breaks (as in vLLM)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"is {shown(content)}; must be a string or a list of parts")
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(where, f"is {shown(part)}; must be an object")
    if part.get("type") != "text":
        raise invalid(f"{where}.type", f"is {shown(part.get('type'))}; must be 'text', the only supported type")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{where}.text", f"is {shown(part.get('text'))}; must be a string")
    return str(part["text"])


def _set_template(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    chat.continue_final_message = flag(body, "continue_final_message", default=False)
    adds = flag(body, "add_generation_prompt", default=not chat.continue_final_message)
    if adds is chat.continue_final_message:
        raise invalid(
            "add_generation_prompt",
            "must be the opposite of continue_final_message; remove add_generation_prompt to use that default",
        )
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise invalid("chat_template_kwargs", f"is {shown(kwargs)}; must be an object")
    if kwargs:
        chat.template_kwargs_json = json.dumps(kwargs, ensure_ascii=False)


def _set_tools(chat: pb.Chat, body: Mapping[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise invalid("tools", f"is {shown(tools)}; must be a list")
    if choice is not None and choice not in TOOL_CHOICES:
        raise invalid("tool_choice", f"is {shown(choice)}; must be 'none' or 'auto'")
    if tools and choice != "none":
        chat.tools_json = json.dumps(tools, ensure_ascii=False)


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean field of the body. Raises InvalidRequestError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, f"is {shown(value)}; must be true or false")
    return value
