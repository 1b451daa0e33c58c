"""The interface of readers, and what a prompt becomes: token ids, and inputs that schedulers carry to workers.

Floating-point inputs are checked for NaN and infinity without numpy, which a gateway does not need otherwise. A number
is not finite if all bits of its exponent are 1. Adding 1 to such an exponent carries into the bit above it. One
addition of large integers checks thousands of numbers, each in its own lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb

from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.audio_decoder import AudioDecoder
from gateway_svc.request.sandbox.image_preparer import ImagePreparer
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Lane
from gateway_svc.request.tools import NO_TOOLS, ChatTools
from prefix_index.hashing import content_ids, ids_from_bytes, input_digest

PIECE_BYTES = 1 << 17  # other threads can run between pieces
# By dtype: bytes of a number, its exponent bits, and the lowest of them.
FORMATS = {"float32": (4, 0x7F80_0000, 0x0080_0000), "bfloat16": (2, 0x7F80, 0x0080), "float16": (2, 0x7C00, 0x0400)}


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Token ids, with content ids at the positions of inputs, and these inputs in the order of their positions."""

    ids: Sequence[int]
    inputs: tuple[inputs_pb2.CarriedInput, ...] = ()
    tools: ChatTools = NO_TOOLS  # tools of a chat


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Where prompts are read: the threads for generations or for Tokenize calls, and the sandbox processes."""

    lane: Lane
    templates: TemplateRenderer
    images: ImagePreparer
    audio: AudioDecoder


class PromptReader(Protocol):
    """Reads the prompts of one kind. All methods raise InvalidRequestError."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        """Check the form, which needs no model. `field` is the path of the prompt."""

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        """Refuse a prompt that the model does not take or that is certainly too long, before it is read."""

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None, context: ReadContext
    ) -> PromptInput:
        """The prompt of a generation. `known_ids`: its ids, if a record has them."""


def has_images(chat: pb.Chat) -> bool:
    """Whether a message of a chat has an image."""
    return any(part.HasField("image") for message in chat.messages for part in message.parts)


def carried_input(
    kind: inputs_pb2.InputKind.ValueType, dtype: str, shape: tuple[int, ...], data: bytes, *, start: int, length: int
) -> inputs_pb2.CarriedInput:
    """An input at `length` positions from `start`."""
    name = inputs_pb2.InputKind.Name(kind).removeprefix("INPUT_KIND_").lower()
    return inputs_pb2.CarriedInput(
        kind=kind,
        digest=input_digest(name, dtype, shape, data),
        start=start,
        length=length,
        dtype=inputs_pb2.InputDtype.Value(f"INPUT_DTYPE_{dtype.upper()}"),
        shape=shape,
        data=data,
    )


def whole_prompt(carried: inputs_pb2.CarriedInput) -> PromptInput:
    """The prompt that consists of one input."""
    return PromptInput(ids_from_bytes(content_ids(carried.digest, carried.length)), (carried,))


def is_finite(data: bytes, dtype: str) -> bool:
    """Whether all numbers of a little-endian array are finite. `dtype` is one of FORMATS."""
    exponents, lowest, carries = _lanes(dtype)
    pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
    return not any((int.from_bytes(piece, "little") & exponents) + lowest & carries for piece in pieces)


@cache
def _lanes(dtype: str) -> tuple[int, int, int]:
    """The masks of all lanes of a piece: exponent bits, the lowest exponent bit, and the bit above the exponent."""
    size, exponent, lowest = FORMATS[dtype]
    masks = exponent, lowest, exponent + lowest
    exponents, lows, carries = (mask.to_bytes(size, "little") * (PIECE_BYTES // size) for mask in masks)
    return int.from_bytes(exponents, "little"), int.from_bytes(lows, "little"), int.from_bytes(carries, "little")
