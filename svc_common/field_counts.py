"""Refuses a serialized message with very many fields before it is decoded.

An empty repeated message takes 2 bytes on the wire but about 50 bytes decoded, and decoding blocks the event loop.
Valid requests are large because of long texts and packed ids, not because of many fields. The ids of a packed field are
counted too, many as one field: decoding 16 million takes a third of a second. A message between services may hold many
requests, so it may have more fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

SMALL_BYTES = 64 << 10  # fields of smaller messages are not counted: they decode to 2 MB at most
MAX_FIELDS = 60_000  # above the largest valid request: a chat of 10,000 messages
MAX_STREAM_FIELDS = 1_000_000  # limit for a message in a stream between services: the requests of many clients
NUMBERS_PER_FIELD = 35  # packed numbers that count as one field: 2 million in a request
MAX_NUMBER_BYTES = 5  # size of a uint32
MAX_DEPTH = 100  # limit for messages in each other; the decoder refuses more


class TooManyFieldsError(ValueError):
    """The message has too many fields."""


# Field number -> layout of a message in which a few bytes can decode to many objects. Other fields are not searched.
Layout = Mapping[int, Any]
NUMBERS: Layout = {}  # stands for a packed field
CONTINUES = bytes(range(0x80, 0x100))  # bytes of a number besides its last one
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


@cache
def layout_of(descriptor: Descriptor) -> Layout:
    """The layout of a message, which may contain its own type."""
    return _layout_of(descriptor, {})


def _layout_of(descriptor: Descriptor, known: dict[str, dict[int, Any]]) -> Layout:
    layout = known.get(descriptor.full_name)
    if layout is None:
        layout = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None and _has_objects(field.message_type):
                layout[field.number] = _layout_of(field.message_type, known)
            elif field.is_packed:
                layout[field.number] = NUMBERS
    return layout


def _has_objects(descriptor: Descriptor) -> bool:
    return any(field.message_type is not None or field.is_repeated for field in descriptor.fields)


def check_field_count(data: bytes, layout: Layout, max_fields: int = MAX_FIELDS) -> None:
    """Raise TooManyFieldsError if a large message has more than `max_fields` fields. Malformed data passes."""
    if len(data) <= SMALL_BYTES:
        return
    try:
        left = _count(data, 0, len(data), layout, max_fields, 0)
    except IndexError:
        return  # truncated: the decoder reports it
    if left < 0:
        raise TooManyFieldsError(
            f"it has {len(data)} bytes and more than {max_fields} fields ({NUMBERS_PER_FIELD} packed numbers count as "
            "one); send fewer messages, strings or numbers, and use packed encoding for repeated numbers"
        )


def _count(data: bytes, position: int, end: int, layout: Layout, left: int, depth: int) -> int:
    """Count the fields of one message. Returns the number of fields that are still allowed; negative: too many."""
    while position < end and left >= 0:
        left -= 1
        tag, position = data[position], position + 1  # a varint of one byte, in most cases
        if tag & 0x80:
            tag, position = _varint(data, position - 1)
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            length, position = data[position], position + 1
            if length & 0x80:
                length, position = _varint(data, position - 1)
            inner = layout.get(tag >> 3)
            if inner is NUMBERS:
                left -= _count_numbers(data, position, length, left)
            elif inner is not None and depth < MAX_DEPTH:
                left = _count(data, position, min(end, position + length), inner, left, depth + 1)
            position += length
        elif wire_type == VARINT:
            _, position = _varint(data, position)
        else:
            position += {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)
    return left


def _count_numbers(data: bytes, position: int, length: int, left: int) -> int:
    """The numbers of a packed field, as fields. A payload that is certainly too long is not read."""
    if length > MAX_NUMBER_BYTES * NUMBERS_PER_FIELD * left:
        return left + 1
    return len(data[position : position + length].translate(None, CONTINUES)) // NUMBERS_PER_FIELD


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number and the position after it. Raises IndexError at the end of the data and for more than 10 bytes."""
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise IndexError("varint longer than 10 bytes")
