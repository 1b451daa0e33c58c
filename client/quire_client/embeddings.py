"""Prompts that are input embeddings instead of tokens."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from quire_client.errors import invalid

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPES = {"f": "F32", "e": "F16"}  # by format of the buffer protocol


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """A prompt as input embeddings [positions, hidden_size], for example of prompt tuning.

    `data` is a safetensors file with one tensor of type float32, bfloat16 or float16:

        PromptEmbeddings(safetensors.torch.save({"prompt": tensor}))
        PromptEmbeddings.of(array)  # a numpy array
    """

    data: bytes

    @classmethod
    def of(cls, rows: Buffer) -> Self:
        """From a contiguous array of float32 or float16 with two dimensions, such as a numpy array."""
        view = memoryview(rows)
        if view.ndim != 2 or view.format not in DTYPES or not view.c_contiguous or sys.byteorder != "little":
            raise invalid(
                "prompt",
                f"embeddings are an array with {view.ndim} dimensions and format {view.format!r}; must be a contiguous "
                "little-endian array of float32 or float16 with 2 dimensions; use safetensors for other types",
            )
        fields = {"dtype": DTYPES[view.format], "shape": view.shape, "data_offsets": [0, view.nbytes]}
        header = json.dumps({"prompt": fields}).encode()
        header += b" " * (-len(header) % 8)
        return cls(len(header).to_bytes(8, "little") + header + view.tobytes())
