"""Tool calls that are XML-like elements, one per parameter, which become the members of a JSON object.

    <tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>      Qwen3-Coder
    <tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>          GLM-4.5
    <minimax:tool_call><invoke name="f"><parameter name="city">Paris</parameter></invoke></minimax:tool_call>

A parameter whose schema allows only strings is a string. Any other parameter with valid JSON is JSON, else a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps
from gateway_svc.text.call_heads import read_head

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

    def read(self, reader: AnswerReader, tools: Mapping[str, Mapping[str, Any]]) -> Steps:
        """Read an answer."""
        start, end = self.block[0].strip(), self.block[1]
        while (yield from reader.write_until(ItemKind.CONTENT, (start,))):
            at = (yield from reader.space_end()) + len(start)
            if not (yield from self._read_call(reader, at, tools)):
                reader.keep(at)
                continue
            while self.function[1] and (yield from self._read_call(reader, 0, tools)):
                pass
            yield from reader.skip_end(end)

    def _read_call(
        self, reader: AnswerReader, at: int, tools: Mapping[str, Mapping[str, Any]]
    ) -> Generator[None, None, bool]:
        """Read one call at an offset. False: it is not a call; nothing was read."""
        head = yield from read_head(reader, at, self.function[0])
        if head is None:
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

    def _read_parameters(self, reader: AnswerReader, name: str, schema: Mapping[str, Any]) -> Steps:
        """Write the arguments. Stops at the first text that is not a parameter."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        reader.begin_call(name)
        reader.write(ItemKind.TOOL_CALL, "{")
        separator, is_whole = "", True
        while True:
            yield from reader.skip_space()
            key = yield from self._read_key(reader)
            if key is None:
                break
            reader.write(ItemKind.TOOL_CALL, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            is_whole = yield from self._read_value(reader, properties.get(key))
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
        before, after = (r"\s*".join(map(re.escape, one.split())) for one in self.parameter[0].split("{key}"))
        pattern = re.compile(rf"{before}\s*{KEY}\s*{after}")
        while True:
            head = reader.match(pattern, 0, MAX_HEAD)
            if head is not None:
                reader.skip(reader.offset_of(head.end()))
                return head[1]
            if reader.is_ended or reader.num_pending > MAX_HEAD:
                return None
            yield

    def _read_value(self, reader: AnswerReader, schema: Any) -> Generator[None, None, bool]:
        """Write a value with its end. A string is written as it arrives. False: it was cut off."""
        end = self.parameter[1].strip()
        if (yield from reader.has("\n")):
            reader.skip(1)
        pieces: list[str] = []
        if _is_string(schema):
            reader.write(ItemKind.TOOL_CALL, '"')
            marker = yield from reader.take_until(("\n" + end, end), lambda text: _write_escaped(reader, text))
        else:
            marker = yield from reader.take_until(("\n" + end, end), pieces.append)
        if not marker:
            return False
        reader.skip(len(marker))
        reader.write(ItemKind.TOOL_CALL, '"' if _is_string(schema) else _json_value("".join(pieces)))
        return True


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _write_escaped(reader: AnswerReader, text: str) -> None:
    """Write a part of a JSON string."""
    reader.write(ItemKind.TOOL_CALL, json.dumps(text, ensure_ascii=False)[1:-1])


def _json_value(text: str) -> str:
    """A parameter that is not a string: JSON, or else text as a JSON string."""
    try:
        json.loads(text)
        return text.strip()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
