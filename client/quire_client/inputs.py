"""Prompts and parts of prompts that are not text: images, speech and questions."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self


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


@dataclass(frozen=True, slots=True)
class Question:
    """A question of `decide`: with `choices` or `levels` (in ascending order) it asks for one of them, else whether the
    instructions are true. Choices and levels are labels, or labels with descriptions.
    """

    instructions: str | Sequence[str | Image]
    choices: Sequence[str] | Mapping[str, str] = ()
    levels: Sequence[str] | Mapping[str, str] = ()


def encoded_image(part: Mapping[str, Any]) -> Any:
    """Input for `Image.of`, from {"type": "image", "image": ...} or OpenAI's image_url. None: the part is no image."""
    if part.get("type") == "image":
        return part["image"]
    if part.get("type") != "image_url":
        return None
    url = part["image_url"]
    return url["url"] if isinstance(url, Mapping) else url


@dataclass(frozen=True, slots=True)
class Audio:
    """An audio file (WAV, MP3, M4A, OGG, WebM, FLAC), or samples without a header: mono, with the sampling rate of the
    model (16000 for Whisper).

        await client.generate(Audio(Path("speech.wav").read_bytes(), language="en"))

    `language`: code of the spoken language; None: the model detects it. `task` translate: the text is in English.
    `prompt`: text that precedes the speech, for names and style.
    """

    data: bytes
    format: Literal["wav", "pcm_f32"] = "wav"
    language: str | None = None
    task: Literal["transcribe", "translate"] | None = None
    prompt: str | None = None
