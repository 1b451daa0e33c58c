"""Work on images before the forward pass of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from step_protocol.columns import Part, WireError, u32_from_bytes, u32_to_bytes


class ImageWork(NamedTuple):
    """A part of the work on one image of a row."""

    row: int
    start: int  # first position of the image
    done: int  # after this step
    total: int


@dataclass(frozen=True, slots=True)
class ImageSteps(Part):
    """The work on images that a step does."""

    FIELDS = ("images",)

    work: tuple[ImageWork, ...]

    def write(self, message: Any) -> None:
        message.images = u32_to_bytes(np.array(self.work, np.uint32))

    @classmethod
    def read(cls, message: Any) -> Self:
        values = u32_from_bytes(message.images, "images")
        if len(values) % 4:
            raise WireError(f"images has {len(values)} numbers, expected four per image", "images")
        work = tuple(ImageWork(*item) for item in values.reshape(-1, 4).tolist())
        if any(not 0 < item.done <= item.total for item in work):
            raise WireError("images has work that is 0, or beyond all work of its image", "images")
        return cls(work)
