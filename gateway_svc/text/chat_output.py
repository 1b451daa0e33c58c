"""Splits the text of a chat answer into items: reasoning, content, tool calls.

There is one parser, for streams and for whole answers:

    parser = ChatParser(format, ...)
    parser.push(text) -> parts          as often as there is new text
    parser.finish() -> parts            the text is complete

The items depend only on the text, not on how the text was split into pieces: `parse` of the whole text gives the same
items as a stream. So a parser that reads the output of a continuation again reaches the same state as before.

The items of an answer are numbered from 0 and each is complete before the next one begins. Text that is neither
reasoning nor a call, such as a malformed call, is content.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from gateway_svc.text.answer import AnswerPiece, AnswerReader, Item, ItemKind, Steps, items_of
from gateway_svc.text.reasoning import REASONING_FORMATS, REASONING_PARSERS, ReasoningFormat, ThinkingSettings
from gateway_svc.text.tool_formats import TOOL_FORMATS, TOOL_PARSERS, ToolFormat

__all__ = [
    "AnswerPiece", "ChatFormat", "ChatParser", "Item", "ItemKind", "call_id", "items_of", "parse", "short_call_id",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats to parse in an answer; None: not parsed, the text stays content."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser even if they are special tokens."""
        return tuple(m for one in (self.reasoning, self.tools) if one is not None for m in one.markers)


class ChatParser:
    """Parses one answer.

    `is_reasoning_begun`: the prompt ended with the start of reasoning. `tools`: the JSON schema of the parameters of
    each tool, by name. With `is_parallel` false, everything after the first call is dropped. `must_call`: a grammar
    allows calls only, so the text that is left at the end is the start of a call that was cut off, and is dropped.
    """

    def __init__(
        self,
        format: ChatFormat,
        *,
        is_reasoning_begun: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        is_parallel: bool = True,
        must_call: bool = False,
    ) -> None:
        self._must_call = must_call
        self._reader = AnswerReader()
        self._reader.is_reasoning = is_reasoning_begun and format.reasoning is not None
        self._is_parallel = is_parallel
        self._last_item: int | None = None  # nothing after this item is part of the answer
        self._steps = _read(self._reader, format, tools or {}, is_reasoning_begun=is_reasoning_begun)
        next(self._steps)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._reader.is_reasoning

    @property
    def is_past_reasoning(self) -> bool:
        """Whether no reasoning can follow."""
        return self._reader.is_past_reasoning

    def push(self, text: str) -> list[AnswerPiece]:
        """Add text. Returns the new parts, at most one per item."""
        if not text:
            return []
        self._reader.add(text)
        next(self._steps)
        return self._new_parts()

    def finish(self) -> list[AnswerPiece]:
        """End the text. Returns the parts that were held back."""
        self._reader.is_ended = True
        next(self._steps)
        parts = self._new_parts()
        return [part for part in parts if part.kind is not ItemKind.CONTENT] if self._must_call else parts

    def _new_parts(self) -> list[AnswerPiece]:
        parts = self._reader.take_parts()
        if self._is_parallel:
            return parts
        if self._last_item is None:
            self._last_item = next((part.item for part in parts if part.kind is ItemKind.TOOL_CALL), None)
        return [part for part in parts if self._last_item is None or part.item <= self._last_item]


def _read(
    reader: AnswerReader, format: ChatFormat, tools: Mapping[str, Mapping[str, Any]], *, is_reasoning_begun: bool
) -> Steps:
    yield
    if format.reasoning is not None:
        yield from format.reasoning.read(reader, format.tools, is_begun=is_reasoning_begun)
    reader.is_past_reasoning = True
    if format.tools is not None:
        yield from format.tools.layout.read(reader, tools)
    yield from reader.write_until(ItemKind.CONTENT, ())
    yield


def parse(
    format: ChatFormat,
    text: str,
    *,
    is_finished: bool = True,
    is_reasoning_begun: bool = False,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    is_parallel: bool = True,
) -> tuple[Item, ...]:
    """The items of a text; `is_finished`: no more text will follow."""
    parser = ChatParser(format, is_reasoning_begun=is_reasoning_begun, tools=tools, is_parallel=is_parallel)
    parts = parser.push(text)
    return items_of([*parts, *(parser.finish() if is_finished else [])])


def call_key(request_id: str, seed: int, prompt_ids: array[int]) -> str:
    """What the ids of an answer's calls depend on. A retry with the same id and seed has the same ids, and the same id
    with another prompt has other ones.
    """
    return f"{request_id}/{seed}/{xxhash.xxh3_128_hexdigest(prompt_ids.tobytes())}"


def call_id(key: str, sample: int, call: int) -> str:
    """The id of a tool call: the same after a resume, in streams and in whole answers."""
    return f"call_{xxhash.xxh3_128_hexdigest(f'{key}/{sample}/{call}'.encode())}"


def short_call_id(number: int) -> str:
    """An id of 9 letters and digits."""
    return xxhash.xxh3_64_hexdigest(str(number).encode())[:9]


AUTO, NONE = "auto", "none"
NO_SETTINGS = ThinkingSettings()


class ParserNameError(ValueError):
    """A flag names a parser or a model that does not exist."""


def detect_format(template: str, has_token: Callable[[str], bool]) -> ChatFormat:
    """Detect the format from a template's source and the vocabulary. A template contains the markers of tool calls;
    the markers of reasoning may be in the vocabulary only.
    """
    tools = next((one for one in TOOL_FORMATS.values() if _uses(template, one)), None)
    formats = REASONING_FORMATS.values()
    named = (one for one in formats if one.word in template)
    reasoning = next(named, next((one for one in formats if all(map(has_token, one.markers))), None))
    return ChatFormat(reasoning, tools)


def _uses(template: str, format: ToolFormat) -> bool:
    return any(all(word in template for word in words) for words in format.words)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Parsers chosen by flags: a parser's name, `none` or `auto`, by model name; "" for all other models."""

    tools: Mapping[str, str]
    reasoning: Mapping[str, str]
    thinking: ThinkingSettings = NO_SETTINGS

    @classmethod
    def from_flags(
        cls, tools: Sequence[str], reasoning: Sequence[str], thinking: ThinkingSettings = NO_SETTINGS
    ) -> ParserNames:
        """The flags of parsers are NAME or MODEL=NAME. Raises ParserNameError."""
        return cls(
            _by_model("--tool-parser", tools, TOOL_PARSERS),
            _by_model("--reasoning-parser", reasoning, REASONING_PARSERS),
            thinking,
        )

    def format_of(self, model: str, detected: ChatFormat) -> ChatFormat:
        """The format of a model's answers."""
        tools, reasoning = _of(self.tools, model), _of(self.reasoning, model)
        chosen_tools: ToolFormat | None = detected.tools if tools == AUTO else TOOL_PARSERS.get(tools)
        chosen_reasoning: ReasoningFormat | None = (
            detected.reasoning if reasoning == AUTO else REASONING_PARSERS.get(reasoning)
        )
        return ChatFormat(chosen_reasoning, chosen_tools)


DETECTED = ParserNames({}, {})


def _of(names: Mapping[str, str], model: str) -> str:
    return names.get(model, names.get("", AUTO))


def _by_model(flag: str, values: Sequence[str], known: Mapping[str, object]) -> dict[str, str]:
    names: dict[str, str] = {}
    for value in values:
        model, _, name = value.rpartition("=")
        if name not in (AUTO, NONE, *known):
            raise ParserNameError(f"{flag} {value!r}: no parser {name!r}; use one of {', '.join((AUTO, NONE, *known))}")
        names[model] = name
    return names
