"""The parts of a chat answer, and the reader that the parsers of `reasoning.py` and `tool_formats.py` use.

A parser is a generator. It yields when it needs more text, and is resumed when text was added or the text has ended. So
its code reads like a parser of a whole text, and it keeps its position and reads each character about once. Its output
depends only on the text, not on how the text was split into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

SPACE = " \t\r\n"
SPACES = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # name of a tool
MAYBE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{0,129}")
HEAD_PARTS = re.compile(r"(\{name\}|\s+)")

Steps: TypeAlias = Generator[None, None, None]


class Scanner(Protocol):
    """Scans a text from a position; returns the position that it reached."""

    def scan(self, text: str, start: int) -> int: ...


class MendingScanner(Scanner, Protocol):
    """A scanner that corrects what it reads."""

    def mended(self, text: str, start: int, end: int) -> str: ...


class ItemKind(Enum):
    """Kind of an item of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


class AnswerPiece(NamedTuple):
    """New text of one item. The parts of an item, in order, are its whole text.

    `item` numbers the items of the answer, `call` its tool calls, both from 0. `offset` is the number of UTF-8 bytes of
    the item's text before this part; it is 0 in the first part of an item only. The text of a tool call is its
    arguments: JSON as the model wrote it.
    """

    item: int
    kind: ItemKind
    text: str
    offset: int = 0
    call: int = 0  # for TOOL_CALL: number of the call
    name: str = ""  # for TOOL_CALL: name of the function, in every part


@dataclass(frozen=True, slots=True)
class Item:
    """A whole item: reasoning, content, or a call of function `name` with the arguments `text`."""

    kind: ItemKind
    text: str
    name: str = ""


def items_of(parts: Iterable[AnswerPiece]) -> tuple[Item, ...]:
    """The items of an answer, from all its parts so far."""
    texts: dict[int, list[str]] = {}
    heads: dict[int, AnswerPiece] = {}
    for part in parts:
        heads.setdefault(part.item, part)
        texts.setdefault(part.item, []).append(part.text)
    return tuple(Item(head.kind, "".join(texts[item]), head.name) for item, head in heads.items())


class AnswerReader:
    """The text that is not read yet, and the parts that were written. Offsets (`at`) are relative to the position.

    Space directly before and after a marker belongs to the format and is dropped; all other space is text.
    `is_reasoning`: the position is inside of reasoning. `is_past_reasoning`: no reasoning can follow.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self.is_reasoning = False
        self.is_past_reasoning = False
        self._text = ""
        self._position = 0
        self._parts: list[AnswerPiece] = []
        self._num_items = 0
        self._num_calls = 0
        self._kind: ItemKind | None = None  # kind of the current item
        self._name = ""
        self._num_bytes = 0  # size of the current item

    # -- called by the parser's owner ---------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text if self._position < len(self._text) else text
        self._position = 0

    def take_parts(self) -> list[AnswerPiece]:
        """The parts written since the last call."""
        parts, self._parts = self._parts, []
        return parts

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of characters that are not read yet."""
        return len(self._text) - self._position

    def pending(self, start: int, end: int | None = None) -> str:
        """Characters that are not read yet."""
        return self._text[self._position + start : None if end is None else self._position + end]

    def match(self, pattern: re.Pattern[str], at: int = 0, limit: int | None = None) -> re.Match[str] | None:
        """Match a pattern at an offset; with a `limit`, in that many characters."""
        start = self._position + at
        return pattern.match(self._text, start, len(self._text) if limit is None else start + limit)

    def offset_of(self, end: int) -> int:
        """Convert a position of a match to an offset."""
        return end - self._position

    def find(self, marker: str, at: int = 0) -> int | None:
        """The offset of a marker at or after an offset."""
        found = self._text.find(marker, self._position + at)
        return None if found < 0 else found - self._position

    def scan(self, scanner: Scanner, at: int = 0) -> int:
        """Run a scanner from an offset. Returns the offset that it reached."""
        return scanner.scan(self._text, self._position + at) - self._position

    def mended(self, scanner: MendingScanner, end: int) -> str:
        """The text that the scanner read up to an offset, with its corrections."""
        return scanner.mended(self._text, self._position, self._position + end)

    def skip(self, count: int) -> None:
        """Read characters without writing them."""
        self._position += count

    def end_of(self, pattern: re.Pattern[str], at: int) -> Generator[None, None, int]:
        """The offset where a run of a pattern's characters ends. Waits until a character follows, or the text ends."""
        while True:
            match = self.match(pattern, at)
            end = at if match is None else self.offset_of(match.end())
            if end < self.num_pending or self.is_ended:
                return end
            yield

    def space_end(self, at: int = 0) -> Generator[None, None, int]:
        """The offset of the first character at or after `at` that is not space; else the end of the text."""
        return (yield from self.end_of(SPACES, at))

    def skip_space(self) -> Steps:
        """Read space without writing it."""
        self.skip((yield from self.space_end()))

    def has(self, marker: str, at: int = 0) -> Generator[None, None, bool]:
        """Whether the marker is at this offset. Waits for more text until this is known."""
        while True:
            start = self._position + at
            if self._text.startswith(marker, start):
                return True
            if self.is_ended or not marker.startswith(self._text[start : start + len(marker)]):
                return False
            yield

    def has_any(self, markers: tuple[str, ...], at: int = 0) -> Generator[None, None, str]:
        """The marker that is at this offset; "": none of them."""
        for marker in markers:
            if (yield from self.has(marker, at)):
                return marker
        return ""

    def skip_end(self, marker: str) -> Steps:
        """Read an end marker with the space around it, if it follows. It may be cut off by the end of the text."""
        yield from self.skip_space()
        if (yield from self.has(marker)) or (self.is_ended and marker.startswith(self.pending(0))):
            self.skip(min(len(marker), self.num_pending))
        yield from self.skip_space()

    def write_until(self, kind: ItemKind, markers: tuple[str, ...]) -> Generator[None, None, str]:
        """Write text as `kind` up to the first marker, and stop before the space in front of it.

        TOOL_CALL: write to the arguments of the current call. Returns the marker; "" at the end of the text.
        """
        return (yield from self.take_until(markers, lambda text: self.write(kind, text), keeps_space=not markers))

    def take_until(
        self, markers: tuple[str, ...], take: Callable[[str], None], *, keeps_space: bool = True
    ) -> Generator[None, None, str]:
        """Read text up to the first marker, and pass it on as it arrives.

        Without `keeps_space`, stops before the space in front of the marker. Returns the marker; "": the text ended.
        """
        prefixes = tuple({marker[:size] for marker in markers for size in range(1, len(marker))})
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._position)) >= 0]
            end, marker = min(found) if found else (self._end_of_text(prefixes), "")
            if not keeps_space and (found or not self.is_ended):
                end = self._position + len(self._text[self._position : end].rstrip(SPACE))
            take(self._text[self._position : end])
            self._position = end
            if marker or self.is_ended:
                return marker
            yield

    def _end_of_text(self, prefixes: tuple[str, ...]) -> int:
        """The end of the text without a suffix that may be the start of a marker."""
        if self.is_ended or not self._text.endswith(prefixes, self._position):
            return len(self._text)
        return len(self._text) - max(len(p) for p in prefixes if self._text.endswith(p, self._position))

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, kind: ItemKind, text: str) -> None:
        """Append text to the current item; begin an item if it is of another kind."""
        if not text:
            return
        if self._kind is not kind:
            self._begin(kind)
        self._append(text)

    def begin_call(self, name: str) -> None:
        """Begin a tool call. Its arguments, which must not be empty, are written with `write`."""
        self._begin(ItemKind.TOOL_CALL, name)
        self._num_calls += 1

    def keep(self, count: int) -> None:
        """Read characters, and write them as content."""
        self.write(ItemKind.CONTENT, self.pending(0, count))
        self.skip(count)

    def _begin(self, kind: ItemKind, name: str = "") -> None:
        self._kind, self._name, self._num_bytes = kind, name, 0
        self._num_items += 1

    def _append(self, text: str) -> None:
        item = self._num_items - 1
        if self._parts and self._parts[-1].item == item:
            last = self._parts[-1]
            self._parts[-1] = last._replace(text=last.text + text)
        else:
            assert self._kind is not None
            call = self._num_calls - 1 if self._kind is ItemKind.TOOL_CALL else 0
            self._parts.append(AnswerPiece(item, self._kind, text, self._num_bytes, call, self._name))
        self._num_bytes += len(text) if text.isascii() else len(text.encode())


def read_head(reader: AnswerReader, at: int, template: str) -> Generator[None, None, tuple[str, int] | None]:
    """Match a template at an offset; space before it and in it stands for any space.

    Returns the name and the offset after the head; None: it is not there. Nothing is read.
    """
    name, at = "", (yield from reader.space_end(at))
    for part in filter(None, HEAD_PARTS.split(template)):
        if part.isspace():
            at = yield from reader.space_end(at)
            continue
        if part != "{name}":
            if not (yield from reader.has(part, at)):
                return None
            at += len(part)
            continue
        end = yield from reader.end_of(MAYBE_NAME, at)
        name = reader.pending(at, end)
        if not NAME.fullmatch(name):
            return None
        at = end
    return name, at
