"""Tool calls that are Python calls with named arguments, which become the members of a JSON object.

<|tool_call_start|>[f(city="Paris", days=3), g()]<|tool_call_end|>                   LFM2
<function_calls>f(city="Paris")<newline>g()</function_calls>                         OLMo 3
[f(city="Paris", days=3)]    as the whole answer                                     Llama 3.2 and 4
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps, read_head
from gateway_svc.text.calls.json_calls import Accepts, Schemas, any_name
from gateway_svc.text.calls.values import Schema, json_of, member, types_of

KEY = re.compile(r"\s*([^\W\d]\w{0,255})\s*=\s*")
MAYBE_KEY = re.compile(r"\s*\w*\s*")
MAX_KEY = 512
NEXT = re.compile(r"[\[({\])},\"'\\\x00-\x1f]")  # characters with a meaning in a value
CLOSERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls between the texts of `block`, with `separator` between them.

    `is_bare`: the block has no marker of its own. It is read at the start of an answer if it has one of the request's
    tools.
    """

    block: tuple[str, str]
    separator: str = ", "
    is_list: bool = False  # calls are in square brackets
    is_bare: bool = False

    @property
    def start(self) -> str:
        return self.block[0].strip()

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        if self.is_bare:
            yield from self._read_block(reader, 0, tools, tools.__contains__)
            return
        while (yield from reader.write_until(ItemKind.CONTENT, (self.start,))):
            at = (yield from reader.space_end()) + len(self.start)
            if not (yield from self._read_block(reader, at, tools, any_name)):
                reader.keep(at)

    def _read_block(
        self, reader: AnswerReader, at: int, tools: Schemas, accepts: Accepts
    ) -> Generator[None, None, bool]:
        at = yield from reader.space_end(at)
        if self.is_list and not (yield from reader.has("[", at)):
            return False
        if not (yield from self._read_call(reader, at + self.is_list, tools, accepts)):
            return False
        separator = self.separator.strip()
        while True:
            at = yield from reader.space_end()
            if (yield from reader.has(separator, at)):
                at += len(separator)
            if not (yield from self._read_call(reader, at, tools, any_name)):
                break
        yield from reader.skip_end("]" if self.is_list else "")
        yield from reader.skip_end(self.block[1].strip())
        return True

    def _read_call(
        self, reader: AnswerReader, at: int, tools: Schemas, accepts: Accepts
    ) -> Generator[None, None, bool]:
        """Read one call at an offset. False: it is not a call; nothing was read."""
        head = yield from read_head(reader, at, "{name}(")
        if head is None or not accepts(head[0]):
            return False
        reader.skip(head[1])
        reader.begin_call(head[0])
        yield from _read_arguments(reader, tools.get(head[0], {}))
        return True


def _read_arguments(reader: AnswerReader, schema: Schema) -> Steps:
    """Write the arguments up to the closing bracket, or to the first text that is not an argument."""
    reader.write(ItemKind.TOOL_CALL, "{")
    separator = ""
    while (key := (yield from _read_key(reader))) is not None:
        reader.write(ItemKind.TOOL_CALL, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        value = yield from _Literal(reader).read()
        if value is None:
            return  # cut off: the arguments stay incomplete
        reader.write(ItemKind.TOOL_CALL, json_of(value.strip(), types_of(member(schema, key), schema), is_literal=True))
        yield from reader.skip_space()
        if not (yield from reader.has(",")):
            break
        reader.skip(1)
        separator = ", "
    at = yield from reader.space_end()
    if (yield from reader.has(")", at)):
        reader.skip(at + 1)
        reader.write(ItemKind.TOOL_CALL, "}")
    elif not reader.is_ended:
        reader.write(ItemKind.TOOL_CALL, "}")
    else:
        reader.skip(reader.num_pending)


def _read_key(reader: AnswerReader) -> Generator[None, None, str | None]:
    """Read `key=`. None: it is not there; nothing was read."""
    while True:
        found = reader.match(KEY, 0, MAX_KEY)
        if found is not None:
            reader.skip(reader.offset_of(found.end()))
            return found[1]
        if reader.is_ended or reader.num_pending > MAX_KEY or not MAYBE_KEY.fullmatch(reader.pending(0)):
            return None
        yield


class _Literal:
    """Reads one value, up to a comma or bracket outside of it. Control characters in its strings are escaped."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self._pieces: list[str] = []

    def read(self) -> Generator[None, None, str | None]:
        """None: the text ended inside the value."""
        while not self._scan(self._reader.pending(0)):
            if self._reader.is_ended:
                return None
            yield
        return "".join(self._pieces)

    def _scan(self, text: str) -> bool:
        """Read up to the end of the value, or of the text."""
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped, end = False, position + 1
                self._pieces.append(text[position])
                position = end
                continue
            found = NEXT.search(text, position)
            end = len(text) if found is None else found.start()
            self._pieces.append(text[position:end])
            if found is not None and not self._take(found[0]):
                self._reader.skip(end)
                return True
            position = end + (found is not None)
        self._reader.skip(len(text))
        return False

    def _take(self, char: str) -> bool:
        """Read a character with a meaning. False: it ends the value."""
        if self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
            self._pieces.append(json.dumps(char)[1:-1] if char < " " else char)
            return True
        if char in "\"'":
            self._quote = char
        elif char in CLOSERS:
            self._closers.append(CLOSERS[char])
        elif char in "])}," and not self._closers:
            return False
        elif self._closers and char == self._closers[-1]:
            self._closers.pop()
        self._pieces.append(char)
        return True
