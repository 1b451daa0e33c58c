"""Tool calls that are XML-like elements, one per parameter, which become the members of a JSON object.

    <tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>      Qwen3-Coder
    <tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>          GLM-4.5
    <minimax:tool_call><invoke name="f"><parameter name="city">Paris</parameter></invoke></minimax:tool_call>

A call without its block is read if it names one of the request's tools. A closing tag ends a value only if a parameter
or the end of the call follows it. Values are typed by their schema (`values`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps, read_head
from gateway_svc.text.calls.json_calls import Accepts, Schemas, any_name
from gateway_svc.text.calls.values import TEXT_OR_NULL, Schema, json_of, member, types_of

MAX_HEAD = 512  # characters of the start of a parameter
KEY = r"([^<>\"]{1,256}?)"


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """The elements of a format, outermost first: the texts before and after each, with the white space that the model
    writes there. `{name}` and `{key}` are the names of tool and parameter.
    """

    block: tuple[str, str]
    function: tuple[str, str]  # without an end, a block is one call
    parameter: tuple[str, str]
    has_many: bool = False  # a block holds all calls of an answer

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        start, call = self.block[0].strip(), self.function[0].partition("{name}")[0]
        while marker := (yield from reader.write_until(ItemKind.CONTENT, (start, call) if call else (start,))):
            at = yield from reader.space_end()
            begin, accepts = (at + len(start), any_name) if marker == start else (at, tools.__contains__)
            if not (yield from self._read_call(reader, begin, tools, accepts)):
                reader.keep(at + len(marker))
                continue
            while self.function[1] and (yield from self._read_call(reader, 0, tools, any_name)):
                pass
            yield from reader.skip_end(self.block[1].strip())

    def _read_call(
        self, reader: AnswerReader, at: int, tools: Schemas, accepts: Accepts
    ) -> Generator[None, None, bool]:
        """Read one call at an offset. False: it is not a call; nothing was read."""
        head = yield from read_head(reader, at, self.function[0])
        if head is None or not accepts(head[0]):
            return False
        name, end = head
        if not self.function[1] and not (yield from self._has_parameter_or_end(reader, end)):
            return False
        reader.skip(end)
        yield from self._read_parameters(reader, name, tools.get(name, {}))
        yield from reader.skip_end(self.function[1].strip())
        return True

    def _has_parameter_or_end(self, reader: AnswerReader, at: int) -> Generator[None, None, bool]:
        at = yield from reader.space_end(at)
        return bool((yield from reader.has_any((self._start, self.block[1]), at)))

    def _read_parameters(self, reader: AnswerReader, name: str, schema: Schema) -> Steps:
        """Write the arguments. Stops at the first text that is not a parameter."""
        reader.begin_call(name)
        reader.write(ItemKind.TOOL_CALL, "{")
        separator, is_whole = "", True
        while True:
            yield from reader.skip_space()
            key = yield from self._read_key(reader)
            if key is None:
                break
            reader.write(ItemKind.TOOL_CALL, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            is_whole = yield from self._read_value(reader, types_of(member(schema, key), schema))
            separator = ", "
        starts = (self._start, self.function[1].strip() or self.block[1])
        if reader.is_ended and (not is_whole or any(one.startswith(reader.pending(0)) for one in starts)):
            reader.skip(reader.num_pending)  # cut off: the arguments stay incomplete
        else:
            reader.write(ItemKind.TOOL_CALL, "}")

    @property
    def _start(self) -> str:
        """The text before the name of a parameter."""
        return self.parameter[0].partition("{key}")[0]

    def _read_key(self, reader: AnswerReader) -> Generator[None, None, str | None]:
        """Read the start of a parameter. None: it is not there; nothing was read."""
        if not (yield from reader.has(self._start)):
            return None
        before, after = (
            r"\s*".join(re.escape(part) for part in re.split(r"\s+|(?<=>)(?=<)", one.strip()))
            for one in self.parameter[0].split("{key}")
        )
        pattern = re.compile(rf"{before}\s*{KEY}\s*{after}")
        while True:
            head = reader.match(pattern, 0, MAX_HEAD)
            if head is not None:
                reader.skip(reader.offset_of(head.end()))
                return head[1]
            if reader.is_ended or reader.num_pending > MAX_HEAD:
                return None
            yield

    def _read_value(self, reader: AnswerReader, types: frozenset[str]) -> Generator[None, None, bool]:
        """Write a value with its end. False: it was cut off."""
        end, is_on_lines = self.parameter[1].strip(), self.parameter[0].endswith("\n")
        if is_on_lines and (yield from reader.has("\n")):
            reader.skip(1)
        value = _Value(reader, types)
        while marker := (yield from reader.take_until(("\n" + end, end) if is_on_lines else (end,), value.take)):
            if (yield from self._is_end(reader, len(marker))):
                reader.skip(len(marker))
                value.end()
                return True
            value.take(marker)
            reader.skip(len(marker))
        return False

    def _is_end(self, reader: AnswerReader, at: int) -> Generator[None, None, bool]:
        """Whether the text after a closing tag is a parameter, the end of the call, or another call."""
        at = yield from reader.space_end(at)
        texts = (self._start, self.function[1].strip(), self.block[1].strip(), self.function[0].partition("{name}")[0])
        after = tuple(filter(None, texts))
        if (yield from reader.has_any(after, at)):
            return True
        return reader.is_ended and any(one.startswith(reader.pending(at)) for one in after)


class _Value:
    """A value as it arrives. Text is written at once, unless it may be null."""

    def __init__(self, reader: AnswerReader, types: frozenset[str]) -> None:
        self._reader = reader
        self._types = types
        self._pieces: list[str] = []
        self._is_begun = False

    def take(self, text: str) -> None:
        if not self._is_begun:
            self._pieces.append(text)
            text = "".join(self._pieces) if self._types <= TEXT_OR_NULL else ""
            if not self._types <= TEXT_OR_NULL or ("null" in self._types and "null".startswith(text)):
                return
            self._is_begun = True
            text = f'"{json.dumps(text, ensure_ascii=False)[1:-1]}'
        else:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        self._reader.write(ItemKind.TOOL_CALL, text)

    def end(self) -> None:
        value = '"' if self._is_begun else json_of("".join(self._pieces), self._types)
        self._reader.write(ItemKind.TOOL_CALL, value)
