"""Tool calls that are JSON objects with a name and arguments, and the JSON arguments of other calls.

hermes    <tool_call>{"name": "f", "arguments": {}}</tool_call>
llama3    {"name": "f", "parameters": {}}; {...}    at the start, or after <|python_tag|>
mistral   [TOOL_CALLS][{"name": "f", "arguments": {}}], or [TOOL_CALLS]f[ARGS]{}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps
from gateway_svc.text.call_heads import NAME
from gateway_svc.text.json_scan import JsonScanner

MAX_HEADER = 1024  # characters of a call before its arguments
HEADER = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
    rf'"name"\s*:\s*"({NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
KEYS = ("name", "arguments", "parameters", "type", "id")
NAMED = re.compile(rf"({NAME.pattern})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?=\{{)")
MAYBE_NAMED = re.compile(r"[A-Za-z0-9_.:/\[\]-]*\s*")

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool of the request, by name."""

Accepts: TypeAlias = Callable[[str], bool]


def _any_name(name: str) -> bool:
    return True


def read_hermes(reader: AnswerReader, tools: Schemas) -> Steps:
    while (yield from reader.write_until(ItemKind.CONTENT, (TOOL_CALL,))):
        at = (yield from reader.space_end()) + len(TOOL_CALL)
        start = yield from reader.space_end(at)
        if not (yield from _read_json_call(reader, start, _any_name, (END_TOOL_CALL,))):
            reader.keep(at)
            continue
        yield from reader.skip_end(END_TOOL_CALL)


def read_llama3(reader: AnswerReader, tools: Schemas) -> Steps:
    # Without a marker, JSON is a call only if it names a tool: an answer may also be JSON.
    start = yield from reader.space_end()
    if (yield from _read_json_call(reader, start, tools.__contains__, ())):
        yield from _read_more_llama3(reader)
    while (yield from reader.write_until(ItemKind.CONTENT, (PYTHON_TAG,))):
        at = (yield from reader.space_end()) + len(PYTHON_TAG)
        start = yield from reader.space_end(at)
        if (yield from _read_json_call(reader, start, _any_name, ())):
            yield from _read_more_llama3(reader)
        else:
            reader.keep(at)


def _read_more_llama3(reader: AnswerReader) -> Steps:
    """Read the calls that follow after semicolons."""
    while True:
        at = yield from reader.space_end()
        if not (yield from reader.has(";", at)):
            break
        start = yield from reader.space_end(at + 1)
        if not (yield from _read_json_call(reader, start, _any_name, ())):
            break
    yield from reader.skip_space()


def read_mistral(reader: AnswerReader, tools: Schemas) -> Steps:
    while (yield from reader.write_until(ItemKind.CONTENT, (TOOL_CALLS,))):
        at = (yield from reader.space_end()) + len(TOOL_CALLS)
        start = yield from reader.space_end(at)
        read = _read_list if reader.pending(start, start + 1) == "[" else _read_named
        if (yield from read(reader, start)):
            yield from reader.skip_space()
        else:
            reader.keep(at)


def _read_list(reader: AnswerReader, at: int) -> Generator[None, None, bool]:
    """Read a JSON list of calls. False: it does not begin with a call; nothing was read."""
    start = yield from reader.space_end(at + 1)
    if not (yield from _read_json_call(reader, start, _any_name, (TOOL_CALLS,))):
        return False
    while True:
        at = yield from reader.space_end()
        if not (yield from reader.has(",", at)):
            break
        start = yield from reader.space_end(at + 1)
        if not (yield from _read_json_call(reader, start, _any_name, (TOOL_CALLS,))):
            break
    if (yield from reader.has("]", at)):
        reader.skip(at + 1)
    return True


def _read_named(reader: AnswerReader, at: int) -> Generator[None, None, bool]:
    """Read a function's name and its arguments. False: it is not a call; nothing was read."""
    while True:
        header = reader.match(NAMED, at, MAX_HEADER)
        if header is not None:
            reader.skip(reader.offset_of(header.end()))
            reader.begin_call(header[1])
            yield from write_arguments(reader, (TOOL_CALLS,))
            return True
        maybe = reader.match(MAYBE_NAMED, at)
        end = at if maybe is None else reader.offset_of(maybe.end())
        if end < reader.num_pending or end - at >= MAX_HEADER or reader.is_ended:
            return False
        yield


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
        reader.write(ItemKind.TOOL_CALL, reader.pending(0, end))
        reader.skip(end)
        if scanner.is_complete:
            return True
        if scanner.is_invalid:
            yield from reader.write_until(ItemKind.TOOL_CALL, stops)
            return False
        if reader.is_ended:
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
    call = _loads(reader.pending(at, end))
    if call is None:
        return False
    name, arguments = call
    if not accepts(name):
        return False
    reader.skip(end)
    reader.begin_call(name)
    reader.write(ItemKind.TOOL_CALL, arguments)
    return True


def _loads(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's object; None if the text is not a call."""
    try:
        call = json.loads(text, strict=False)
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        arguments.encode()  # a lone \ud800 cannot be sent
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    return (name, arguments or "{}") if isinstance(name, str) and NAME.fullmatch(name) else None
