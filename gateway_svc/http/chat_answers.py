"""Parts of a chat answer as OpenAI's messages and deltas. Pure.

Reasoning is sent under both names that clients read, `reasoning` and `reasoning_content`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.v1 import inference_pb2 as pb

Json = dict[str, Any]


def delta_of(part: pb.AnswerPart) -> Json:
    """The delta of one part. The id and the name of a call are in its first delta only."""
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
        """Add new parts."""
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
