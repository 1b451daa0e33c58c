"""Decodes and encodes the JSON of bodies and events, and reads values of a body by type. Refuses many values before
they are made, and never holds the interpreter for long. Pure.

Decoding holds Python's lock, also in a thread. A large value is therefore decoded in parts: the event loop runs between
them. An empty list takes 2 bytes of a body but 56 bytes decoded; numbers in a list, such as token ids, are cheap. An
error about a value names the field, what it is, and what it must be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as encode_string
from typing import Any, TypeVar

import msgspec

from request_fields.fields import MAX_UINT32, Kind
from svc_common.errors import InvalidRequestError

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


Json = dict[str, Any]
T = TypeVar("T")

INTEGERS = (Kind.INT32, Kind.UINT32, Kind.UINT64)
NUMBERS = (Kind.FLOAT, *INTEGERS)
NUMBER = re.compile(r" *[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})? *")
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}  # values of a query
MAX_SHOWN = 80  # characters of a wrong value in an error


def invalid(field: str, words: str) -> InvalidRequestError:
    """The error for a field of a body."""
    return InvalidRequestError(f"{field} {words}", field=field)


def object_of(name: str, value: Any) -> Json:
    """An object. Raises InvalidRequestError, as all functions here do."""
    if not isinstance(value, dict):
        raise invalid(name, f"is {shown(value)}; must be an object")
    return value


def list_of(name: str, value: Any, items: str = "") -> list[Any]:
    """A list. `items`: what it must contain, for the error."""
    if not isinstance(value, list):
        raise invalid(name, f"is {shown(value)}; must be a list{items and f' of {items}'}")
    return value


def text_of(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"is {shown(value)}; must be a string")
    return value


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """One of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, f"is {shown(value)}; must be one of {', '.join(choices)}")
    return value


def optional(read: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """Reads a value with `read`; null is None."""
    return None if value is None else read(name, value)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """A string field of a body, or of the object at `where`; "" if it is not set."""
    return optional(text_of, f"{where}.{name}" if where else name, body.get(name)) or ""


def text_at(where: str, item: Mapping[str, Any], name: str) -> str:
    """A string field that the object at `where` must have."""
    return text_of(f"{where}.{name}", item.get(name))


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean field of the body."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise invalid(name, f"is {shown(value)}; must be true or false")
    return default if value is None else value


def typed_value(name: str, kind: Kind, value: Any) -> Any:
    """The value as the protocol's type. Raises InvalidRequestError."""
    if kind in NUMBERS:
        value = number_of(value)
    if kind is Kind.FLOAT and type(value) in (int, float):
        return _as_float(name, value)
    if kind in INTEGERS and (type(value) is int or (type(value) is float and value.is_integer())):
        return int(value)
    if kind is Kind.BOOL and type(value) is bool:
        return value
    if kind is Kind.STRING and type(value) is str:
        return value
    if kind is Kind.STRINGS and type(value) is list and all(type(item) is str for item in value):
        return value
    if kind is Kind.TOKEN_IDS and type(value) is list:
        return token_ids(name, value)
    if kind is Kind.BIASES and type(value) is dict:
        return _biases(name, value)
    if kind is Kind.COUNTS and type(value) is dict:
        return {key: typed_value(f"{name}.{key}", Kind.UINT32, count) for key, count in value.items()}
    raise invalid(name, f"is {shown(value)}; must be {WORDS[kind]}")


WORDS = {
    Kind.FLOAT: "a number", **dict.fromkeys(INTEGERS, "an integer"), Kind.BOOL: "true or false",
    Kind.STRING: "a string", Kind.STRINGS: "a string or a list of strings", Kind.TOKEN_IDS: "a list of token ids",
    Kind.BIASES: "an object of token ids and numbers", Kind.COUNTS: "an object of integers",
}  # fmt: skip


def number_of(value: Any) -> Any:
    """The number that a string contains, as vLLM accepts it; other values unchanged."""
    if not isinstance(value, str) or not NUMBER.fullmatch(value):
        return value
    return float(value) if set(value) & set(".eE") else int(value)


def _biases(name: str, values: dict[str, Any]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_UINT32))):
            raise invalid(name, f'has key {shown(key)}; a key must be a token id as a string, such as "42"')
        biases[token_ids(name, [int(key)])[0]] = typed_value(f"{name}[{key}]", Kind.FLOAT, value)
    return biases


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise invalid(name, f"is {shown(value)}, which is out of range for a number") from None


def token_ids(name: str, values: list[Any]) -> list[int]:
    """A list of token ids. Raises InvalidRequestError that names the first element that is not a token id."""
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= MAX_UINT32:
            raise invalid(f"{name}[{i}]", f"is {shown(value)}; must be a token id, an integer from 0 to {MAX_UINT32}")
    return values


def shown(value: Any) -> str:
    """A value of a body as text for an error, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)[: MAX_SHOWN + 1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
