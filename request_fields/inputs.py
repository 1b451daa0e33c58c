"""Limits of the inputs of a request that are not tokens (CarriedInput). Gateways and schedulers check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_INPUTS = 256
# Limit for one request, and for all requests that one step opens: a message between services holds 64 MiB.
MAX_INPUT_BYTES = 48 << 20
INPUT_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
EMBEDDING_DTYPES = ("float32", "bfloat16", "float16")
AUDIO_DTYPES = ("float32", "int16")
LEVELS = 256  # values of a channel of an image


@dataclass(frozen=True, slots=True)
class ImageShape:
    """How images become positions of a model's prompt; see ImageInfo of the protocol."""

    token_id: int
    merge_size: int
    patch_values: int
    channels: int
    token_cost: float = 1.0
    attention_cost: float = 0.0

    def refusal(self, shape: Sequence[int], length: int, num_bytes: int) -> str | None:
        """The error in the shape of an image [height, width, patch_values], its number of positions or of bytes."""
        if len(shape) != 3 or shape[2] != self.patch_values or min(shape) < 1:
            return f"shape {list(shape)}; must be [height, width, {self.patch_values}]"
        height, width, merge = shape[0], shape[1], self.merge_size
        if height % merge or width % merge or height * width != length * merge**2:
            return f"{height} x {width} patches and length {length}; squares of {merge} x {merge} patches need one each"
        expected = height * width * self.patch_values + 4 * LEVELS * self.channels
        return None if num_bytes == expected else f"{num_bytes} bytes of data; its shape needs {expected}"
