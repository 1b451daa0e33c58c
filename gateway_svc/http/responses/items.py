"""Items of a conversation (input of a request, or output of an earlier response) as chat messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http.openai.chat import image_part, set_parts
from gateway_svc.http.responses.events import MESSAGE, REASONING, item_id
from gateway_svc.http.responses.tools import ADDITIONAL, KINDS, NAMESPACE, OUTPUTS, arguments_of, flat_name, output_of
from gateway_svc.http.values import Json, invalid, object_of, one_of, shown, text_at

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
    set_parts(message, [_part_of(f"{where}[{i}]", part) for i, part in enumerate(parts)])


def _part_of(where: str, part: Any) -> pb.ContentPart:
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
    if part.get("type") not in TEXT_PARTS:
        words = f"is {shown(part.get('type'))}; must be one of {', '.join(TEXT_PARTS)}, or input_image of a user"
        raise invalid(f"{where}.type", words)
    return text_at(where, part, "text")
