"""Mutated protobuf messages: valid messages with one or more fields or bytes changed.

    mutator = Mutator(seed)
    data = mutator.mutate(message)    # serialized; often no longer a valid message

The fields come from the descriptors, so a new field is attacked without a change here.
"""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
MANY = 100
LONG = 20_000
NUMBERS: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 1 << 30, -(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, -(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 255, 1 << 16, 1 << 31, U32 - 1, U32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 1 << 32, 1 << 63, U64 - 1, U64),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -0.0, -1.0, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}
TEXTS = (
    "", "\0", "a", "\n", "%s%n{}{0}", "../../etc/passwd", "é€😀", "\u202e\ufeff", "{" * 500, "[" * 5_000,
    "x" * 300, "x" * LONG, "null", "{}", '{"type": "object"}', "(a+)+$", "nan", "-1", "{{ 1 / 0 }}", "\r\nx: y",
)  # fmt: skip


class Mutator:
    """Draws mutations. Equal seeds give equal mutations."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)

    def mutate(self, message: Message) -> bytes:
        """The message with one to four changed fields, and in a fifth of all cases with changed bytes."""
        changed = type(message)()
        changed.CopyFrom(message)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            self._change_field(self._pick_node(changed))
        data = changed.SerializeToString()
        return self.damage(data) if self.rng.random() < 0.2 else data

    def fields_only(self, message: Message) -> None:
        """Change one or two fields in place; the message stays valid protobuf."""
        for _ in range(self.rng.choice((1, 1, 2))):
            self._change_field(self._pick_node(message))

    def damage(self, data: bytes) -> bytes:
        """The bytes with one change: flipped bits, or bytes cut out, repeated, inserted or appended."""
        way = self.rng.choice((_flip, _cut, _repeat, _insert, _truncate, _wrap_unknown, _nest))
        return way(data, self.rng)

    def _pick_node(self, message: Message) -> Message:
        """The message or one of the messages in it. Unset messages are created in passing."""
        while self.rng.random() < 0.7:
            inner = [f for f in message.DESCRIPTOR.fields if f.message_type is not None and not _is_map(f)]
            if not inner:
                break
            field = self.rng.choice(inner)
            value = getattr(message, field.name)
            if field.is_repeated:
                message = self.rng.choice(value) if value and self.rng.random() < 0.8 else value.add()
            else:
                value.SetInParent()
                message = value
        return message

    def _change_field(self, message: Message) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self.rng.choice(fields)
        if self.rng.random() < 0.1:
            message.ClearField(field.name)
        elif _is_map(field):
            self._change_map(getattr(message, field.name), field)
        elif field.is_repeated:
            self._change_repeated(getattr(message, field.name), field)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        elif field.type == FieldDescriptor.TYPE_BYTES and self.rng.random() < 0.7:
            setattr(message, field.name, self._column(getattr(message, field.name)))
        else:
            setattr(message, field.name, self._value(field))

    def _column(self, data: bytes) -> bytes:
        """A column of little-endian u32 with a changed, removed, repeated or added item, or in another order."""
        items = [data[i : i + 4] for i in range(0, len(data), 4)]
        at = self.rng.randrange(len(items) + 1)
        number = self.rng.choice((*NUMBERS[FieldDescriptor.CPPTYPE_UINT32], self.rng.randrange(64)))
        new = number.to_bytes(4, "little")
        way = self.rng.randrange(5)
        if way == 0:
            return b"".join([*items[:at], new, *items[at:]])
        if way == 1:
            return b"".join(items[:at] + items[at + 1 :])
        if way == 2:
            return b"".join(items[: at + 1] + items[at:])
        if way == 3:
            self.rng.shuffle(items)
            return b"".join(items)
        return b"".join([*items[:at], new, *items[at + 1 :]])

    def _change_map(self, values: Any, field: FieldDescriptor) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self.rng.choice((1, 2, MANY))):
            if value.message_type is not None:
                values[self._value(key)].SetInParent()
            else:
                values[self._value(key)] = self._value(value)

    def _change_repeated(self, values: Any, field: FieldDescriptor) -> None:
        count = self.rng.choice((1, 2, 17, MANY))
        if field.message_type is not None:
            for _ in range(count):
                values.add()
        else:
            value = self._value(field)
            size = len(value) if isinstance(value, str | bytes) else 1
            values.extend([value] * min(count, 1 + LONG // max(size, 1)))

    def _value(self, field: FieldDescriptor) -> Any:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.rng.choice(TEXTS)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self.rng.choice([*(value.number for value in field.enum_type.values), -1, 99, (1 << 31) - 1])
        low = self.rng.choice(NUMBERS[field.cpp_type])
        is_whole = isinstance(low, int) and not isinstance(low, bool)
        return self.rng.randrange(64) if is_whole and self.rng.random() < 0.3 else low

    def _bytes(self) -> bytes:
        length = self.rng.choice((0, 1, 3, 4, 8, 15, 16, 17, 64, 4_000, LONG))
        if length > 64:
            return bytes([self.rng.randrange(256)]) * length
        return self.rng.randbytes(length) if self.rng.random() < 0.5 else bytes(length)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.randrange(1, 17))


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.randrange(1, 9)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 2, 50)) + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    start, _ = _span(data, rng)
    return data[:start] + rng.randbytes(rng.randrange(1, 33)) + data[start:]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _wrap_unknown(data: bytes, rng: random.Random) -> bytes:
    """The message behind an unknown field: a number, 64 bits, or a group that does not end."""
    return rng.choice((b"\xf8\xff\x01" + b"\xff" * 9 + b"\x01", b"\xf9\xff\x01" + bytes(8), b"\xfb\xff\x01")) + data


def _nest(data: bytes, rng: random.Random) -> bytes:
    """The message inside of many messages with the field number of one of its fields."""
    tag = rng.randrange(1, 12) << 3 | 2
    for _ in range(rng.choice((5, 101, 400))):
        data = bytes([tag]) + _varint(len(data)) + data
    return data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
