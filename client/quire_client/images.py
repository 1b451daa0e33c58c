"""Images of chats and prompts."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image: the bytes of a PNG, JPEG, WebP or GIF file."""

    data: bytes

    @classmethod
    def of(cls, image: Image | bytes | str | os.PathLike[str]) -> Self:
        """From bytes, a path, or a URL that begins with data:. Raises OSError or ValueError."""
        if isinstance(image, Image):
            return cls(image.data)
        if isinstance(image, bytes | bytearray | memoryview):
            return cls(bytes(image))
        if isinstance(image, str) and "://" in image.partition(",")[0]:
            raise ValueError(f"{image[:80]!r} is not fetched; give a path, bytes or a data: URL")
        if isinstance(image, str) and image.startswith("data:"):
            return cls(base64.b64decode(image.partition(",")[2], validate=True))
        return cls(Path(image).read_bytes())


def encoded_image(part: Mapping[str, Any]) -> Any:
    """Input for `Image.of`, from {"type": "image", "image": ...} or OpenAI's image_url. None: the part is no image."""
    if part.get("type") == "image":
        return part["image"]
    if part.get("type") != "image_url":
        return None
    url = part["image_url"]
    return url["url"] if isinstance(url, Mapping) else url
