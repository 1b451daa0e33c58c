"""Inputs of open rows that are not vocabulary tokens: their checks, and the tokens of a step that they provide.

A position of an input has a content id in the row's token history. Its embedding comes from the input, which is needed
until the position is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prefix_index.hashing import DIGEST_BYTES, FIRST_CONTENT_ID, content_ids
from request_fields.sizes import AUDIO_DTYPES, EMBEDDING_DTYPES, INPUT_DTYPE_BYTES, LEVELS
from step_protocol.columns import I64
from step_protocol.messages import ImageSpan, RowOpen
from step_protocol.types import CarriedInput, ImageInfo
from worker_svc.engine.row_part import SomeRows


@dataclass(frozen=True, slots=True)
class InputSpan:
    """The part of an input that a step computes."""

    item: CarriedInput
    first: int  # index in the input of its first position in this step
    count: int  # number of positions
    token: int  # index of the first position among the tokens of the step


class InputTable(SomeRows[tuple[CarriedInput, ...]]):
    """The inputs of each open row, as far as they are not computed. All its state comes from RowOpen."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        max_samples: int = 0,
        images: ImageInfo | None = None,
    ) -> None:
        """`hidden_size` 0: the backend computes no inputs, so rows with inputs are refused. `max_samples` above 0: the
        model takes audio of at most this length, and no other inputs. Without `images`, rows with images are refused.
        """
        super().__init__()
        self._images = images
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_samples = max_samples

    def refusal(self, item: RowOpen) -> str | None:
        """The error in the inputs of a row, or in its token ids beyond the vocabulary; None if there is none."""
        beyond = np.flatnonzero(item.token_ids >= self._vocab_size)
        if not len(beyond) and not item.inputs and not item.images:
            return None
        if item.images and (refusal := self._spans_refusal(item)) is not None:
            return refusal
        if item.inputs and not self._hidden_size:
            return "this worker's backend computes no inputs besides tokens; send the request without them"
        if item.prompt_logprobs is not None:
            return "prompt_logprobs cannot be combined with inputs: their positions have no token"
        refusals = (self._input_refusal(item, index) for index in range(len(item.inputs)))
        return next((refusal for refusal in refusals if refusal is not None), None) or self._id_refusal(item, beyond)

    def _input_refusal(self, item: RowOpen, index: int) -> str | None:
        carried, name = item.inputs[index], f"inputs[{index}]"
        before = item.inputs[index - 1] if index else None
        first = 0 if before is None else before.start + before.length
        end = carried.start + carried.length
        if not first <= carried.start < end <= item.prompt_len:
            return f"{name} has positions {carried.start} to {end - 1}, expected some from {first} to the prompt's last"
        if carried.kind == "image":
            return self._image_refusal(item, carried, name) or _ids_refusal(item, carried, name)
        if (refusal := self._shape_refusal(carried, name)) is not None:
            return refusal
        num_bytes = math.prod(carried.shape) * INPUT_DTYPE_BYTES[carried.dtype]
        if len(carried.data) != num_bytes:
            return f"{name} has {len(carried.data)} bytes of data, expected {num_bytes}"
        return _ids_refusal(item, carried, name)

    def _image_refusal(self, item: RowOpen, carried: CarriedInput, name: str) -> str | None:
        if self._images is None or carried.dtype != "uint8":
            return f"{name} is an image of {carried.dtype}; this worker's model takes " + (
                "none" if self._images is None else "uint8"
            )
        refusal = _pixels_refusal(self._images, carried)
        if refusal is not None:
            return f"{name} has {refusal}"
        height, width = (size // self._images.merge_size for size in carried.shape[:2])
        if ImageSpan(carried.start, height, width) not in item.images:
            return f"{name} is not one of the images {item.images}"
        return None

    def _spans_refusal(self, item: RowOpen) -> str | None:
        if self._images is None:
            return "the row has images, but this worker's model takes none"
        first = 0
        for span in item.images:
            if span.start < first or span.height < 1 or span.width < 1 or span.end > item.prompt_len:
                return f"image {span} must follow the one before it and end in the prompt of {item.prompt_len} tokens"
            first = span.end
        return None

    def _shape_refusal(self, carried: CarriedInput, name: str) -> str | None:
        kind = "audio" if self._max_samples else "embeddings"
        if carried.kind != kind:
            return f"{name} has kind {carried.kind!r}, expected {kind!r}"
        dtypes = AUDIO_DTYPES if self._max_samples else EMBEDDING_DTYPES
        if carried.dtype not in dtypes:
            return f"{name} has dtype {carried.dtype!r}, expected one of {', '.join(dtypes)}"
        if kind == "audio" and not (len(carried.shape) == 1 and 1 <= carried.shape[0] <= self._max_samples):
            return f"{name} has shape {carried.shape}, expected (1,) to ({self._max_samples},)"
        if kind == "embeddings" and carried.shape != (carried.length, self._hidden_size):
            return f"{name} has shape {carried.shape}, expected ({carried.length}, {self._hidden_size})"
        return None

    def _id_refusal(self, item: RowOpen, beyond: I64) -> str | None:
        """The error if an id beyond the vocabulary has no input and must still be computed, or is no content id."""
        is_known = np.zeros(len(item.token_ids), np.bool_)
        for carried in item.inputs:
            is_known[carried.start : carried.start + carried.length] = True
        num_computed = min(item.prompt_len, item.num_computed_tokens)
        is_known[:num_computed] |= item.token_ids[:num_computed] >= FIRST_CONTENT_ID
        unknown = beyond[~is_known[beyond]]
        if not len(unknown):
            return None
        found = f"token id {item.token_ids[unknown[0]]} at position {unknown[0]}"
        return f"{found} is not below the vocabulary size {self._vocab_size}, and no input has this position"

    def _state_of(self, item: RowOpen) -> tuple[CarriedInput, ...] | None:
        return item.inputs or None

    def find(self, row: int, start: int) -> CarriedInput | None:
        """The input of a row that begins at this position, if its positions are not all computed."""
        return next((item for item in self.in_use.get(row, ()) if item.start == start), None)

    def spans(self, rows: I64, context_lens: I64, ends: I64, starts: I64) -> list[InputSpan]:
        """The inputs at the positions that a step computes: row i computes its positions from `context_lens[i]` to
        `ends[i]`, whose first is token `starts[i]` of the step. Inputs that are computed before are dropped.
        """
        if not self.in_use:
            return []
        found: list[InputSpan] = []
        for i, row in enumerate(rows.tolist()):
            if row not in self.in_use:
                continue
            begin, end = int(context_lens[i]), int(ends[i])
            left = tuple(item for item in self.in_use[row] if item.start + item.length > begin)
            if not left:
                del self.in_use[row]
                continue
            self.in_use[row] = left
            for item in left:
                first, last = max(begin, item.start), min(end, item.start + item.length)
                if first < last:
                    found.append(InputSpan(item, first - item.start, last - first, int(starts[i]) + first - begin))
        return found


def _pixels_refusal(images: ImageInfo, carried: CarriedInput) -> str | None:
    """The error in the shape of an image [height, width, patch_values], its number of positions or of bytes."""
    shape, length, merge = carried.shape, carried.length, images.merge_size
    if len(shape) != 3 or shape[2] != images.patch_values or min(shape) < 1:
        return f"shape {list(shape)}; must be [height, width, {images.patch_values}]"
    height, width = shape[0], shape[1]
    if height % merge or width % merge or height * width != length * merge**2:
        return f"{height} x {width} patches and length {length}; squares of {merge} x {merge} patches need one each"
    expected = height * width * images.patch_values + 4 * LEVELS * images.channels
    return None if len(carried.data) == expected else f"{len(carried.data)} bytes of data; its shape needs {expected}"


def _ids_refusal(item: RowOpen, carried: CarriedInput, name: str) -> str | None:
    found = item.token_ids[carried.start : carried.start + carried.length].astype("<u4").tobytes()
    if len(carried.digest) != DIGEST_BYTES or found != content_ids(carried.digest, carried.length):
        return f"the token ids at the positions of {name} are not the content ids of its digest"
    return None
