"""Messages of rank 0 to the other ranks, as bytes: a step, adapters for it, close all
rows, record a graph, or stop.

    kind | length of the head | head | arrays and bytes of the step, in the order of the head
    kind | digest | a piece of the adapter's matrices
    kind | digests of the adapters that rows of the next step may open with

The head is JSON: the fields of `StepBatch` and of what it holds, with a type and a length in place of arrays and bytes.
A field that a step gets there is sent without a change here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar, GrammarKind
from step_protocol.features import STEP_PARTS, ImageWork
from step_protocol.messages import ImageSpan, RowOpen, StepBatch, TokenRules
from step_protocol.types import CarriedInput, EncoderInput, Pooling, PoolingKind, PoolingTask
from worker_svc.engine.backend import Adapter, AdapterPart, Module
from worker_svc.engine.decoder.pool.block_contents import HASH_BYTES

CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        StepBatch, RowOpen, SamplingParams, TokenRules, Grammar, GrammarKind, Pooling, PoolingTask, PoolingKind,
        CarriedInput, EncoderInput, ImageSpan, ImageWork, *STEP_PARTS,
    )
}  # fmt: skip
ARRAY, BYTES, ITEMS, MAP = "array", "bytes", "items", "map"  # the other names in a head are those of classes
HEAD_LENGTH_BYTES = 4
PIECE_BYTES = 64 << 20


class MessageKind(IntEnum):
    """The first byte of a message."""

    STOP = 0
    RESET_ROWS = 1
    STEP = 2
    ADAPTER_PIECE = 3
    ADAPTERS = 4
    RECORD_USED = 5


STOP, RESET_ROWS = bytes([MessageKind.STOP]), bytes([MessageKind.RESET_ROWS])
RECORD_USED = bytes([MessageKind.RECORD_USED])


def step_to_bytes(batch: StepBatch) -> bytes:
    """The batch must have been checked."""
    parts: list[bytes] = []
    head = json.dumps(_described(batch, parts)).encode()
    kind, length = bytes([MessageKind.STEP]), len(head).to_bytes(HEAD_LENGTH_BYTES, "little")
    return b"".join((kind, length, head, *parts))


def step_from_bytes(message: bytes) -> StepBatch:
    """The inverse of `step_to_bytes`."""
    begin = 1 + HEAD_LENGTH_BYTES
    end = begin + int.from_bytes(message[1:begin], "little")
    batch: StepBatch = _MessageReader(message, end).value(json.loads(message[begin:end]))
    return batch


def adapter_pieces(adapter: Adapter) -> Iterator[bytes]:
    """Messages with the matrices of an adapter."""
    tensors: dict[str, torch.Tensor] = {}
    for part in adapter.parts:
        name = ".".join(map(str, part.module))
        tensors |= {f"{name}.a": part.a.contiguous(), f"{name}.b": part.b.contiguous()}
    content = memoryview(save(tensors))
    for begin in range(0, len(content), PIECE_BYTES):
        yield b"".join((bytes([MessageKind.ADAPTER_PIECE]), adapter.digest, content[begin : begin + PIECE_BYTES]))


def adapter_piece(message: bytes) -> tuple[bytes, bytes]:
    """The digest and the piece of a message."""
    return message[1 : 1 + HASH_BYTES], message[1 + HASH_BYTES :]


def adapter_from_bytes(digest: bytes, content: bytes) -> Adapter:
    """The adapter of which `content` are all pieces."""
    tensors = load(content)
    modules = sorted({Module(*map(int, name.split(".")[:-1])) for name in tensors})
    names = {module: ".".join(map(str, module)) for module in modules}
    parts = [AdapterPart(module, tensors[f"{name}.a"], tensors[f"{name}.b"]) for module, name in names.items()]
    return Adapter(digest, max(len(part.a) for part in parts), tuple(parts))


def adapters_to_bytes(digests: Sequence[bytes]) -> bytes:
    return bytes([MessageKind.ADAPTERS]) + b"".join(digests)


def adapters_from_bytes(message: bytes) -> list[bytes]:
    """The digests of the adapters."""
    return [message[begin : begin + HASH_BYTES] for begin in range(1, len(message), HASH_BYTES)]


def _described(value: Any, parts: list[bytes]) -> Any:
    """The value for the head. Appends its arrays and bytes to `parts`."""
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, np.ndarray):
        parts.append(value.tobytes())
        return [ARRAY, value.dtype.str, len(parts[-1])]
    if isinstance(value, bytes):
        parts.append(value)
        return [BYTES, len(value)]
    if isinstance(value, Enum):
        return [type(value).__name__, value.value]
    if type(value).__name__ in CLASSES:
        cls: Any = type(value)
        return [cls.__name__, *(_described(getattr(value, name), parts) for name in cls.__match_args__)]
    if isinstance(value, dict):
        return [MAP, *(_described(item, parts) for pair in value.items() for item in pair)]
    return [ITEMS, *(_described(item, parts) for item in value)]


class _MessageReader:
    """Reads arrays and bytes of a message from front to back."""

    def __init__(self, message: bytes, place: int) -> None:
        self._message = message
        self._place = place

    def value(self, described: Any) -> Any:
        """The inverse of `_described`; sequences become tuples."""
        if not isinstance(described, list):
            return described
        name, *values = described
        if name == ARRAY:
            return np.frombuffer(self._take(values[1]), values[0])
        if name == BYTES:
            return self._take(values[0])
        if name == ITEMS:
            return tuple(map(self.value, values))
        found = [self.value(item) for item in values]
        return dict(zip(found[::2], found[1::2], strict=True)) if name == MAP else CLASSES[name](*found)

    def _take(self, size: int) -> bytes:
        self._place += size
        return self._message[self._place - size : self._place]
