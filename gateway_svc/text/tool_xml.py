"""Tool calls of Qwen3-Coder: one XML-like element per parameter, which becomes a member of a JSON object.

    <tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>

A parameter whose schema allows only strings is a string. Any other parameter with valid JSON is JSON, else a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from gateway_svc.text.answer import AnswerReader, ItemKind, Steps

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_HEAD = 256  # characters of <function=...>
FUNCTION_HEAD = re.compile(r"<function=\s*([A-Za-z0-9_.:/-]{1,128})\s*>")
MAYBE_HEAD = re.compile(r"<function=[^<>]*")
PARAMETER_HEAD = re.compile(r"<parameter=([^<>]{1,256})>")


def read_qwen3_coder(reader: AnswerReader, tools: Mapping[str, Mapping[str, Any]]) -> Steps:
    """Read an answer."""
    while (yield from reader.write_until(ItemKind.CONTENT, (TOOL_CALL,))):
        at = (yield from reader.space_end()) + len(TOOL_CALL)
        start = yield from reader.space_end(at)
        head = yield from _function_head(reader, start)
        if head is None:
            reader.keep(at)
            continue
        reader.skip(reader.offset_of(head.end()))
        yield from _read_function(reader, head[1], tools.get(head[1], {}))
        yield from reader.skip_end(END_FUNCTION)
        yield from reader.skip_end(END_TOOL_CALL)


def _function_head(reader: AnswerReader, at: int) -> Generator[None, None, re.Match[str] | None]:
    if not (yield from reader.has(FUNCTION, at)):
        return None
    while True:
        head = reader.match(FUNCTION_HEAD, at, MAX_HEAD)
        maybe = reader.match(MAYBE_HEAD, at, MAX_HEAD)
        is_over = maybe is None or reader.offset_of(maybe.end()) < reader.num_pending
        if head is not None or is_over or reader.is_ended:
            return head
        yield


def _read_function(reader: AnswerReader, name: str, schema: Mapping[str, Any]) -> Steps:
    """Write the arguments, one parameter at a time. Stops at the first text that is not a parameter."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    reader.begin_call(name)
    reader.write(ItemKind.TOOL_CALL, "{")
    separator = ""
    while True:
        yield from reader.skip_space()
        parameter = yield from _parameter(reader)
        if parameter is None:
            break
        key, value = parameter
        member = f"{json.dumps(key, ensure_ascii=False)}: {_json_value(value, properties.get(key))}"
        reader.write(ItemKind.TOOL_CALL, separator + member)
        separator = ", "
    is_cut_off = reader.is_ended and any(m.startswith(reader.pending(0)) for m in (PARAMETER, END_FUNCTION))
    if is_cut_off:
        reader.skip(reader.num_pending)
    else:
        reader.write(ItemKind.TOOL_CALL, "}")


def _parameter(reader: AnswerReader) -> Generator[None, None, tuple[str, str] | None]:
    """Read one parameter. None: no complete parameter; then nothing was read, except at the end of the text."""
    if not (yield from reader.has(PARAMETER)):
        return None
    searched = 0
    while True:
        end = reader.find(END_PARAMETER, searched)
        if end is not None:
            break
        if reader.is_ended:
            reader.skip(reader.num_pending)  # cut off: the arguments stay incomplete
            return None
        searched = max(0, reader.num_pending - len(END_PARAMETER))
        yield
    head = reader.match(PARAMETER_HEAD)
    start = reader.offset_of(head.end()) if head is not None else end
    value = reader.pending(start, end)
    reader.skip(end + len(END_PARAMETER))
    key = "" if head is None else head[1].strip()
    return key, value.removeprefix("\n").removesuffix("\n")


def _json_value(value: str, schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "string":
        try:
            json.loads(value)
            return value.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)
