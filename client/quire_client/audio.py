"""Speech as a prompt, for models that turn it into text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
