"""Tool calls of Gemma: arguments with bare keys and marked strings, which become a JSON object.

<|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>                                 Gemma 4
<start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>           FunctionGemma
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps, read_head
from gateway_svc.text.calls.values import TYPES, Schema, json_of, member, types_of

MAX_WORD = 256  # characters of a key, or of a value that is neither a string nor a container
MAX_DEPTH = 128
WORD = re.compile(r"[^{}\[\],:<>]{0,257}")
VALUE = re.compile(r"[^{}\[\],<>]{0,257}")
CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The markers around a call, and the one before and after a string."""

    start: str
    end: str
    quote: str

    def read(self, reader: AnswerReader, tools: Mapping[str, Mapping[str, Any]]) -> Steps:
        while (yield from reader.write_until(ItemKind.CONTENT, (self.start,))):
            at = (yield from reader.space_end()) + len(self.start)
            head = yield from read_head(reader, at, "call:{name}")
            if head is None or not (yield from reader.has("{", head[1])):
                reader.keep(at)
                continue
            reader.skip(head[1])
            reader.begin_call(head[0])
            if not (yield from _Arguments(reader, self.quote, tools.get(head[0], {})).read()):
                yield from reader.write_until(ItemKind.TOOL_CALL, (self.end,))  # not valid: as it is
            yield from reader.skip_end(self.end)


class _Arguments:
    """Reads one object, and writes it as JSON while it arrives."""

    def __init__(self, reader: AnswerReader, quote: str, schema: Schema) -> None:
        self._reader = reader
        self._quote = quote
        self._schema = schema
        self._types = TYPES  # types of the value that is read
        self._closers: list[str] = []

    def read(self) -> Generator[None, None, bool]:
        """False: the text at the position does not fit, or the text ended."""
        is_open = yield from self._open()
        while is_open and self._closers:
            is_open = yield from self._read_item()
        return is_open

    def _open(self) -> Generator[None, None, bool]:
        """Read an opening bracket, and the closing one if the container is empty."""
        opener = self._reader.pending(0, 1)
        self._closers.append(CLOSERS[opener])
        self._take(1)
        yield from self._reader.skip_space()
        if (yield from self._reader.has(self._closers[-1])):
            return (yield from self._close())
        return len(self._closers) <= MAX_DEPTH

    def _close(self) -> Generator[None, None, bool]:
        """Read closing brackets, and the comma after them. False: another text follows."""
        reader = self._reader
        while self._closers and (yield from reader.has(self._closers[-1])):
            self._closers.pop()
            self._take(1)
            if self._closers:
                yield from reader.skip_space()
        if not self._closers:
            return True
        if not (yield from reader.has(",")):
            return False
        reader.skip(1)
        reader.write(ItemKind.TOOL_CALL, ", ")
        return True

    def _read_item(self) -> Generator[None, None, bool]:
        """Read a member of an object or an element of a list, with what closes it."""
        reader = self._reader
        yield from reader.skip_space()
        if self._closers[-1] == "}" and not (yield from self._read_key()):
            return False
        yield from reader.skip_space()
        if (yield from reader.has_any(("{", "["))):
            return (yield from self._open())
        is_read = (
            (yield from self._read_string()) if (yield from reader.has(self._quote)) else (yield from self._word())
        )
        if not is_read:
            return False
        yield from reader.skip_space()
        return (yield from self._close())

    def _read_key(self) -> Generator[None, None, bool]:
        reader = self._reader
        self._types = TYPES
        if (yield from reader.has(self._quote)):
            if not (yield from self._read_string()):
                return False
            yield from reader.skip_space()
        else:
            end = yield from reader.end_of(WORD, 0)
            if not 0 < end <= MAX_WORD or not (yield from reader.has(":", end)):
                return False
            key = reader.pending(0, end).strip()
            if len(self._closers) == 1:
                self._types = types_of(member(self._schema, key), self._schema)
            reader.write(ItemKind.TOOL_CALL, json.dumps(key, ensure_ascii=False))
            reader.skip(end)
        if not (yield from reader.has(":")):
            return False
        reader.skip(1)
        reader.write(ItemKind.TOOL_CALL, ": ")
        return True

    def _read_string(self) -> Generator[None, None, bool]:
        """Read a string, which is written as it arrives. False: it was cut off."""
        reader = self._reader
        reader.skip(len(self._quote))
        reader.write(ItemKind.TOOL_CALL, '"')
        if not (yield from reader.take_until((self._quote,), self._write_escaped)):
            return False
        reader.skip(len(self._quote))
        reader.write(ItemKind.TOOL_CALL, '"')
        return True

    def _word(self) -> Generator[None, None, bool]:
        """Read a number, a literal or a bare word, which is a string."""
        reader = self._reader
        end = yield from reader.end_of(VALUE, 0)
        word = reader.pending(0, end).strip()
        if not word or end > MAX_WORD or end == reader.num_pending:
            return False
        reader.skip(end)
        types = self._types if len(self._closers) == 1 else TYPES
        reader.write(ItemKind.TOOL_CALL, json_of(word, types))
        return True

    def _write_escaped(self, text: str) -> None:
        self._reader.write(ItemKind.TOOL_CALL, json.dumps(text, ensure_ascii=False)[1:-1])

    def _take(self, count: int) -> None:
        self._reader.write(ItemKind.TOOL_CALL, self._reader.pending(0, count))
        self._reader.skip(count)
