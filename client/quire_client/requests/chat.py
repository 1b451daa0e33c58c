"""Builds the chat of a request from messages and options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from quire.v1 import inference_pb2 as pb

from quire_client.errors import invalid
from quire_client.inputs import Image, encoded_image
from quire_client.types import Message, ToolCall

MessageLike = Message | Mapping[str, Any] | tuple[str, str]
Messages = str | Iterable[MessageLike]

MAX_CHARS_SHOWN = 80
TOOL_CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"}
IGNORED_KEYS = {"refusal", "annotations", "audio", "function_call"}  # in OpenAI's answers; they must be empty


class ChatOptions(TypedDict, total=False):
    """Inputs of a chat template in addition to the messages."""

    template_kwargs: Mapping[str, Any]  # extra variables, e.g. {"enable_thinking": True}
    tools: Sequence[Mapping[str, Any]]  # OpenAI's form: {"type": "function", "function": {...}}
    tool_choice: str | Mapping[str, Any]  # auto, none, required, the name of a tool, or OpenAI's object with the name
    parallel_tool_calls: bool  # default True; False: at most one call
    chat_template: str  # name of a template of the model or the gateway
    continue_final_message: bool  # continue the last message instead of starting an answer
    add_generation_prompt: bool  # default True


def fill_chat(chat: pb.Chat, messages: Messages, options: Mapping[str, Any]) -> None:
    """Set a chat from messages and ChatOptions. Raises InvalidRequest."""
    chat.SetInParent()
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping | bytes):
        shown = repr(messages)[:MAX_CHARS_SHOWN]
        raise invalid("messages", f"messages must be a str (one user message) or a list of messages; got {shown}")
    for message in [Message("user", messages)] if isinstance(messages, str) else messages:
        try:
            _fill_message(chat.messages.add(), _as_message(message))
        except UnicodeEncodeError as error:
            raise invalid(
                "messages", f"messages: not valid Unicode at character {error.start}: {error.reason}"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            shown = repr(message)[:MAX_CHARS_SHOWN]
            raise invalid("messages", f"messages: {shown} is not a valid message: {error}") from None
    if options.get("template_kwargs"):
        chat.template_kwargs_json = json.dumps(options["template_kwargs"])
    if options.get("tools"):
        chat.tools_json = json.dumps(options["tools"])
    _set_tool_choice(chat, options.get("tool_choice"))
    if options.get("chat_template"):
        chat.chat_template = options["chat_template"]
    chat.continue_final_message = bool(options.get("continue_final_message", False))
    for name in ("parallel_tool_calls", "add_generation_prompt"):
        if options.get(name) is not None:
            setattr(chat, name, bool(options[name]))


def _set_tool_choice(chat: pb.Chat, choice: str | Mapping[str, Any] | None) -> None:
    if choice is None:
        return
    if isinstance(choice, Mapping):
        choice = dict(choice.get("function") or {}).get("name") or ""
        chat.tool_name = choice
    elif choice in TOOL_CHOICES:
        chat.tool_choice = TOOL_CHOICES[choice]
    else:
        chat.tool_name = choice
    if not choice:
        raise invalid("tool_choice", "tool_choice must be auto, none, required, or the name of a tool")


def _fill_message(entry: pb.ChatMessage, message: Message) -> None:
    entry.role, entry.content = message.role, message.content
    for part in message.parts:
        entry.parts.append(pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(image=part.data))
    entry.tool_call_id, entry.name, entry.reasoning = message.tool_call_id, message.name, message.reasoning
    for call in message.tool_calls:
        entry.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def _as_message(message: MessageLike) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, tuple) and len(message) == 2:
        return Message(*message)
    unknown = _missing(message) if isinstance(message, Mapping) else {"type"}
    if isinstance(message, Mapping):
        unknown |= {key for key in set(message) - MESSAGE_KEYS if key not in IGNORED_KEYS or message[key]}
    if unknown or not isinstance(message, Mapping):
        raise invalid(
            "messages",
            'a message must be {"role": ..., "content": ...} (also tool_calls, tool_call_id, name, reasoning), a pair '
            f"or a Message; got {message!r}",
        )
    parts = _parts(message.get("content"))
    return Message(
        role=message["role"],
        content="" if parts else _text(message.get("content")),
        parts=parts,
        tool_calls=tuple(_as_call(call) for call in message.get("tool_calls") or ()),
        tool_call_id=message.get("tool_call_id") or "",
        name=message.get("name") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
    )


def _missing(message: Mapping[str, Any]) -> set[str]:
    """Required keys that the message does not have; a message with tool calls needs no content."""
    return {"role", *(() if message.get("tool_calls") else ("content",))} - set(message)


def _text(content: Any) -> str:
    """A string, or OpenAI's parts of type text, joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(_part(part)) for part in content)


def _parts(content: Any) -> tuple[str | Image, ...]:
    """OpenAI's parts, if one of them is an image."""
    if content is None or isinstance(content, str):
        return ()
    parts = tuple(_part(part) for part in content)
    return parts if any(isinstance(part, Image) for part in parts) else ()


def read_image(image: Image | bytes | str | PathLike[str], option: str) -> Image:
    """An image from bytes, a path or a data: URL. Raises InvalidRequest."""
    try:
        return Image.of(image)
    except (OSError, TypeError, ValueError) as error:
        raise invalid(option, f"{option}: the image cannot be read: {error}") from None


def _part(part: Any) -> str | Image:
    if isinstance(part, str | Image):
        return part
    image = encoded_image(part)
    if image is not None:
        return read_image(image, "messages")
    if part.get("type") != "text":
        raise invalid("messages", f"messages: content of type {part.get('type')!r} is not supported; use text or image")
    return str(part["text"])


def _as_call(call: Any) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") or {}
    return ToolCall(call.get("id") or "", function.get("name") or "", function.get("arguments") or "")
