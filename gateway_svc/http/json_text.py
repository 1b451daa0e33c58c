"""Decodes and encodes the JSON of bodies and events. Refuses many values before they are made, and never holds the
interpreter for long. Pure.

Decoding holds Python's lock, also in a thread. A large value is therefore decoded in parts: the event loop runs between
them. An empty list takes 2 bytes of a body but 56 bytes decoded; numbers in a list, such as token ids, are cheap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring as encode_string
from typing import Any

import msgspec

SMALL_BYTES = 64 << 10  # values of smaller bodies are not counted
PART_BYTES = 64 << 10  # decoded at once: at most a few milliseconds
MAX_VALUES = 100_000  # besides numbers in lists: above a chat of 10,000 messages. A value after a comma counts twice
PART_VALUES = 4096  # encoded at once
MAX_OPENED = 4  # levels of a value that are decoded in parts: body, messages, message, content


def _finite(text: str) -> float:
    """The number. msgspec itself takes 10 us or more for one like 1e308."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


VALUE = msgspec.json.Decoder(float_hook=_finite)
OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
ESCAPES_AND_CHARACTER = re.compile(rb"\\*.", re.DOTALL)
LIST = msgspec.json.Decoder(list[msgspec.Raw])


class TooManyValuesError(ValueError):
    """The text has too many values."""


def decode(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, or RecursionError if it is too deep."""
    if len(text) > SMALL_BYTES:
        check_values(text)
    try:
        return _decoded(text, MAX_OPENED)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error).removeprefix("JSON is malformed: ")) from None


def check_values(text: bytes) -> None:
    """Raise TooManyValuesError for more than MAX_VALUES strings, lists, objects and other values. Numbers in lists that
    have nothing else are not counted.
    """
    num_strings, rest = 0, list[bytes]()
    for part in _between_strings(text):
        num_strings += part.count(b'"')
        _check_count(num_strings)
        rest.append(part)
    structure = b"".join(rest)  # each string is one quote
    _check_count(num_strings + structure.count(b"[") + structure.count(b"{"))
    _check_count(num_strings + sum(map(_num_values, structure.split(b"["))))


def _check_count(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise TooManyValuesError(
            f"it has more than {MAX_VALUES} strings, lists, objects and other values besides numbers in lists; send it "
            "in parts"
        )


def _between_strings(text: bytes) -> Iterator[bytes]:
    """The text in parts, with a quote in place of each string."""
    start, is_string = 0, False
    while start < len(text):
        end = _end_of_part(text, start)
        part = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"', 2 * MAX_VALUES + 2)
        yield b'"' * is_string + b'"'.join(pieces[is_string::2])
        is_string ^= len(pieces) % 2 == 0
        start = end


def _end_of_part(text: bytes, start: int) -> int:
    """The end of a part, which is not inside of an escape."""
    last = ESCAPES_AND_CHARACTER.match(text, start + PART_BYTES - 1)
    return len(text) if last is None else last.end()


def _num_values(after_bracket: bytes) -> int:
    """The values from a `[` up to the next one, without numbers in lists."""
    inner, is_closed, after = after_bracket.partition(b"]")
    is_numbers = is_closed and b'"' not in inner and b"{" not in inner
    return 1 + (after if is_numbers else after_bracket).count(b",")


def _decoded(text: bytes, levels: int) -> Any:
    start = text[:64].lstrip()[:1] if len(text) > PART_BYTES and levels else b""
    if start == b"{":
        return {name: _decoded(bytes(value), levels - 1) for name, value in OBJECT.decode(text).items()}
    if start == b"[" and _is_flat(text):
        return _numbers(text)
    if start == b"[":
        return [_decoded(bytes(value), levels - 1) for value in LIST.decode(text)]
    return VALUE.decode(text)


def _is_flat(text: bytes) -> bool:
    """Whether a list has no strings, lists and objects."""
    return b'"' not in text and b"{" not in text and text.find(b"[") == text.rfind(b"[")


def _numbers(text: bytes) -> list[Any]:
    """The values of a flat list, decoded as several lists."""
    inner, start, values = text.strip().removeprefix(b"["), 0, list[Any]()
    while (end := inner.find(b",", start + PART_BYTES)) >= 0:
        values += VALUE.decode(b"[%b]" % inner[start:end])
        start = end + 1
    values += VALUE.decode(b"[%b" % inner[start:])
    return values


def encode(value: Any) -> bytes:
    """Compact JSON. The value may have parts that are encoded already."""
    return msgspec.json.encode(value)


def encoded_list(values: Sequence[Any]) -> msgspec.Raw:
    """A list as a part of a larger value. Encoded, it takes a tenth of its memory."""
    parts = (values[start : start + PART_VALUES] for start in range(0, len(values), PART_VALUES))
    return joined_lists(msgspec.json.encode(part) for part in parts)


def joined_lists(lists: Iterable[Any]) -> msgspec.Raw:
    """Encoded lists as one list."""
    inner = (memoryview(one)[1:-1] for one in lists)
    return msgspec.Raw(b"[%b]" % b",".join(part for part in inner if len(part)))


def encode_text(text: str) -> bytes:
    """A JSON string of an event."""
    return _one_line(encode_string(text).encode())


def _one_line(data: bytes) -> bytes:
    """JSON without the characters at which clients split lines, although JSON and events allow them."""
    if data.isascii():
        return data
    return (
        data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029").replace(b"\xc2\x85", rb"\u0085")
    )


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _one_line(encode(value)) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event with its `type` as its name."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), _one_line(encode(value)))
