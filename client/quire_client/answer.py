"""Assembles the parts of a parsed chat answer. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.v1 import inference_pb2 as pb

from quire_client.types import ToolCall, ToolCallDelta


class PartError(ValueError):
    """A part does not continue the answer received so far."""


@dataclass(slots=True)
class _AnswerItem:
    kind: str  # reasoning, content or tool_call
    call_id: str = ""
    name: str = ""
    start: int = 0  # bytes of the item before `texts`
    texts: list[str] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class NewParts:
    """The new output of one chunk."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerAssembler:
    """The items of one answer so far. `starts_late`: the first part may be at any item and byte of the answer."""

    def __init__(self, *, starts_late: bool = False) -> None:
        self._starts_late = starts_late
        self._first = 0  # number of the first item
        self._items: list[_AnswerItem] = []

    @property
    def reasoning(self) -> str:
        return self._text_of("reasoning")

    @property
    def content(self) -> str:
        return self._text_of("content")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(item.call_id, item.name, item.text) for item in self._items if item.kind == "tool_call")

    def add(self, chunk: pb.Chunk, *, is_resuming: bool) -> NewParts:
        """Add the parts of a chunk. After a break, a server may repeat text that was received before.

        Raises PartError.
        """
        new = NewParts()
        for part in chunk.parts:
            text = self._append(part, is_resuming=is_resuming)
            if not text:
                continue
            if part.HasField("tool_call"):
                call = part.tool_call
                new.tool_calls.append(ToolCallDelta(call.index, call.id, call.name, text))
            elif part.HasField("reasoning"):
                new.reasoning += text
            else:
                new.content += text
        return new

    def _append(self, part: pb.AnswerPart, *, is_resuming: bool) -> str:
        """Append the part's new text to its item, and return it."""
        kind = part.WhichOneof("kind") or "content"
        text = part.tool_call.arguments if kind == "tool_call" else getattr(part, kind)
        start = 0
        if self._starts_late and not self._items:
            self._first, start = part.item, part.offset
        at = part.item - self._first
        if at == len(self._items):
            self._items.append(_AnswerItem(kind, part.tool_call.id, part.tool_call.name, start, num_bytes=start))
        if not 0 <= at < len(self._items) or self._items[at].kind != kind:
            end = self._first + len(self._items)
            raise PartError(f"unexpected part of item {part.item} ({kind}); number of items so far: {end}")
        item = self._items[at]
        if part.offset != item.num_bytes:
            text = _new_text(item, part, text, is_resuming=is_resuming)
        if text:
            item.texts.append(text)
            item.num_bytes += len(text) if text.isascii() else len(text.encode())
        return text

    def _text_of(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)


def _new_text(item: _AnswerItem, part: pb.AnswerPart, text: str, *, is_resuming: bool) -> str:
    data, have = text.encode(), item.num_bytes - part.offset
    if not is_resuming or have < 0 or part.offset < item.start:
        raise PartError(f"a part of item {part.item} starts at byte {part.offset}, expected {item.num_bytes}")
    known = item.text.encode()[part.offset - item.start :]
    if data[:have] != known[: len(data)]:
        raise PartError(f"item {part.item} at byte {part.offset} changed after the stream broke")
    return data[have:].decode()
