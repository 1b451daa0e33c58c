"""Tool calls with JSON arguments: objects with a name and arguments, or a name and arguments between markers.

<tool_call>{"name": "f", "arguments": {}}</tool_call>                                Hermes
{"name": "f", "parameters": {}}; {...}    at the start, or after <|python_tag|>      Llama 3
<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>                 Cohere
[TOOL_CALLS][{"name": "f", "arguments": {}}], or [TOOL_CALLS]f[ARGS]{}               Mistral
<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>                              DeepSeek
<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>      Kimi K2
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway_svc.text.answer import NAME, AnswerReader, ItemKind, Steps, read_head
from gateway_svc.text.calls.values import JsonScanner

MAX_HEADER = 1024  # characters of a call before its arguments
HEADER = re.compile(
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
    rf'"(?:tool_)?name"\s*:\s*"({NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
KEYS = ("name", "arguments", "parameters", "type", "id", "tool_name", "tool_call_id")
NAMED = re.compile(rf"({NAME.pattern})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?=\{{)")
MAYBE_NAMED = re.compile(r"[A-Za-z0-9_.:/\[\]-]*\s*")
MARKERS = re.compile(r"```|<[^>]*>")
NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool of the request, by name."""

Accepts: TypeAlias = Callable[[str], bool]


def any_name(name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects between the texts of `block`: one, or several with `separator` between them.

    `head`: the object before its arguments. `is_list`: a block has a list of calls. `is_bare`: an answer may begin with
    a call without a marker, if it is one of the request's tools; an answer may also be JSON.
    """

    block: tuple[str, str]
    head: str = '{"name": {name}, "arguments": '
    separator: str = ""
    is_list: bool = False
    is_bare: bool = False

    @property
    def start(self) -> str:
        return self.block[0].strip()

    @property
    def end(self) -> str:
        return self.block[1].strip()

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        if self.is_bare:
            yield from self.read_block(reader, 0, tools.__contains__)
        while self.start and (yield from reader.write_until(ItemKind.CONTENT, (self.start,))):
            at = (yield from reader.space_end()) + len(self.start)
            if not (yield from self.read_block(reader, at, any_name)):
                reader.keep(at)

    def read_block(self, reader: AnswerReader, at: int, accepts: Accepts) -> Generator[None, None, bool]:
        """Read the calls after a marker. False: there is none; nothing was read."""
        start = yield from reader.space_end(at)
        is_list = self.is_list and (yield from reader.has("[", start))
        if not (yield from self._read_call(reader, start + is_list, accepts)):
            return False
        separator = self.separator.strip()
        while separator and (yield from reader.has(separator, at := (yield from reader.space_end()))):
            if not (yield from self._read_call(reader, at + len(separator), any_name)):
                break
        if is_list and (yield from reader.has("]", at := (yield from reader.space_end()))):
            reader.skip(at + 1)
        yield from reader.skip_end(self.end)
        return True

    def _read_call(self, reader: AnswerReader, at: int, accepts: Accepts) -> Generator[None, None, bool]:
        start = yield from reader.space_end(at)
        return (yield from _read_json_call(reader, start, accepts, (self.end or self.start or "]",)))


class MistralCalls(JsonCalls):
    """A list of objects, or a name with its arguments, after a marker."""

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        while (yield from reader.write_until(ItemKind.CONTENT, (self.start,))):
            at = (yield from reader.space_end()) + len(self.start)
            start = yield from reader.space_end(at)
            is_list = reader.pending(start, start + 1) == "["
            read = self.read_block(reader, start, any_name) if is_list else _read_named(reader, start)
            if (yield from read):
                yield from reader.skip_space()
            else:
                reader.keep(at)


MISTRAL = MistralCalls(("[TOOL_CALLS]", ""), separator=", ", is_list=True)


def _read_named(reader: AnswerReader, at: int) -> Generator[None, None, bool]:
    """Read a function's name and its arguments. False: it is not a call; nothing was read."""
    while True:
        header = reader.match(NAMED, at, MAX_HEADER)
        if header is not None:
            reader.skip(reader.offset_of(header.end()))
            reader.begin_call(header[1])
            yield from write_arguments(reader, (MISTRAL.start,))
            return True
        maybe = reader.match(MAYBE_NAMED, at)
        end = at if maybe is None else reader.offset_of(maybe.end())
        if end < reader.num_pending or end - at >= MAX_HEADER or reader.is_ended:
            return False
        yield


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """The texts around all calls of an answer, and around the arguments of each; `{name}` is the name of the tool.

    `is_numbered`: the name is written as `functions.NAME:NUMBER`.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str = ""  # between calls
    is_numbered: bool = False

    @property
    def start(self) -> str:
        """The marker at the start of a call."""
        return str(MARKERS.findall(self.call[0])[0])

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        """Read an answer. A call without the section around it is read too."""
        starts = (self.section[0], self.start)
        while marker := (yield from reader.write_until(ItemKind.CONTENT, starts)):
            at = yield from reader.space_end()
            start = at + len(marker) if marker == self.section[0] else at
            if not (yield from self._read_call(reader, start)):
                reader.keep(at + len(marker))
                continue
            while (yield from self._read_call(reader, 0)):
                pass
            yield from reader.skip_end(self.section[1])

    def _read_call(self, reader: AnswerReader, at: int) -> Generator[None, None, bool]:
        """Read one call at an offset. False: it is not a call; nothing was read."""
        head = yield from read_head(reader, at, self.call[0])
        if head is None:
            return False
        start = yield from reader.space_end(head[1])
        if not (yield from reader.has("{", start)):
            return False
        named = NUMBERED.fullmatch(head[0]) if self.is_numbered else None
        ends = tuple(MARKERS.findall(self.call[1]))
        reader.skip(start)
        reader.begin_call(head[0] if named is None else named[1])
        yield from write_arguments(reader, ends)
        for end in ends:
            yield from reader.skip_end(end)
        return True


def _read_json_call(
    reader: AnswerReader, at: int, accepts: Accepts, stops: tuple[str, ...]
) -> Generator[None, None, bool]:
    """Read the JSON object of a call at an offset. False: it is not a call; nothing was read or written.

    `stops`: markers that end arguments which are not valid JSON.
    """
    scanner, scanned = JsonScanner(), at
    while True:
        header = reader.match(HEADER, at, MAX_HEADER)
        if header is not None:
            if not accepts(header[1]):
                return False
            reader.skip(reader.offset_of(header.end()))
            reader.begin_call(header[1])
            if (yield from write_arguments(reader, stops)):
                yield from _skip_rest(reader)
            return True
        scanned = reader.scan(scanner, scanned)
        first = reader.match(FIRST_KEY, at)
        if scanner.is_invalid or (first is not None and first[1] not in KEYS):
            return False
        if scanner.is_complete:
            return _write_whole_call(reader, at, scanned, accepts)
        if reader.is_ended:
            return False
        yield


def write_arguments(reader: AnswerReader, stops: tuple[str, ...]) -> Generator[None, None, bool]:
    """Write a JSON object as arguments. False: it is incomplete or invalid; the text up to a stop was written."""
    scanner = JsonScanner()
    while True:
        end = reader.scan(scanner)
        reader.write(ItemKind.TOOL_CALL, reader.mended(scanner, end))
        reader.skip(end)
        if scanner.is_complete:
            return True
        if scanner.is_invalid:
            yield from reader.write_until(ItemKind.TOOL_CALL, stops)
            return False
        if reader.is_ended:
            reader.write(ItemKind.TOOL_CALL, reader.pending(0))
            reader.skip(reader.num_pending)
            return False
        yield


def _skip_rest(reader: AnswerReader) -> Steps:
    """Skip the rest of a call's object after its arguments, up to its end or the first error."""
    scanner = JsonScanner.after_value()
    while True:
        reader.skip(reader.scan(scanner))
        if scanner.is_complete or scanner.is_invalid or reader.is_ended:
            return
        yield


def _write_whole_call(reader: AnswerReader, at: int, end: int, accepts: Accepts) -> bool:
    """Write the call of a complete object. False: it is not a call."""
    call = _loads(mended(reader.pending(at, end)))
    if call is None:
        return False
    name, arguments = call
    if not accepts(name):
        return False
    reader.skip(end)
    reader.begin_call(name)
    reader.write(ItemKind.TOOL_CALL, arguments)
    return True


def mended(text: str) -> str:
    """An object as JSON, as far as it can be read; the rest as it is."""
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    return scanner.mended(text, 0, end) + text[end:]


def _loads(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's object; None if the text is not a call."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        arguments = mended(arguments) or "{}"
        arguments.encode()  # a lone \ud800 cannot be sent
    except (ValueError, RecursionError):
        return None
    name = call.get("name", call.get("tool_name"))
    return (name, arguments) if isinstance(name, str) and NAME.fullmatch(name) else None
