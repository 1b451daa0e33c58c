"""Reads protobuf bytes without generated classes.

The SDK requires only grpcio and protobuf. Error details (google.rpc) and health checks (grpc.health.v1) are four small
messages that never change; reading them by field number avoids two requirements and descriptor conflicts.
"""

from __future__ import annotations

from collections.abc import Iterator


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value): int for varints and fixed-size numbers, bytes for length-delimited fields.

    Raises ValueError when `data` is not a protobuf message.
    """
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value, position = _value(data, position, tag & 7)
        yield tag >> 3, value


def _value(data: bytes, position: int, wire_type: int) -> tuple[int | bytes, int]:
    if wire_type == 0:
        return _varint(data, position)
    if wire_type == 2:
        length, position = _varint(data, position)
        return _take(data, position, length), position + length
    if wire_type in (1, 5):
        length = 8 if wire_type == 1 else 4
        return int.from_bytes(_take(data, position, length), "little"), position + length
    raise ValueError(f"unsupported wire type {wire_type} at byte {position}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("truncated varint")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("varint longer than ten bytes")


def _take(data: bytes, position: int, length: int) -> bytes:
    if position + length > len(data):
        raise ValueError(f"field of {length} bytes at byte {position} is truncated")
    return data[position : position + length]
