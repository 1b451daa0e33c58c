"""Prompts that are audio: files and raw samples. Workers compute the features."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.reader import PromptInput, ReadContext, carried_input, is_finite, whole_prompt
from request_fields.sizes import INPUT_DTYPE_BYTES

FIELD = "prompt.audio.data"
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of WAV
STREAMED = 0xFFFF_FFFF  # size of the data of a file that was written to a pipe


class AudioReader:
    """Reads long audio in a thread, and decodes in another process what is not used unchanged."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        if not prompt.audio.data:
            raise invalid(f"{field}.audio.data", "is empty; send a file, or samples with format PCM_F32")

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        """Refuse audio that the model does not take, or samples that are too long."""
        audio = request.prompt.audio
        if not model.info.encoder.HasField("audio"):
            raise invalid("prompt.audio", f"is set, but model {model.name!r} takes no audio; send text or token ids")
        info = model.info.encoder.audio
        if audio.format == pb.AUDIO_FORMAT_PCM_F32 and len(audio.data) > (limit := 4 * info.max_samples):
            raise invalid(
                FIELD,
                f"has {len(audio.data)} bytes; at most {limit} are allowed, which hold {_longest_s(info):g} s: send it "
                "in parts",
            )
        for name, given, known in (
            ("language", audio.language, info.language_ids),
            ("task", audio.task, info.task_ids),
        ):
            if given and given not in known:
                names = ", ".join(sorted(known)) or "none"
                raise invalid(f"prompt.audio.{name}", f"is {given!r}; model {model.name!r} knows {names}")

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None, context: ReadContext
    ) -> PromptInput:
        audio, info = request.prompt.audio, model.info.encoder.audio
        samples = unchanged_samples(audio, info)
        if samples is None:
            parts = await context.audio.decode(audio.data, info, FIELD, _longest_s(info))
            samples = Samples("int16", b"".join(parts))
        return await context.lane.run(len(audio.data), prompt_of, samples, model)


@dataclass(frozen=True, slots=True)
class Samples:
    """Mono audio at the model's rate."""

    dtype: str  # int16 or float32
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // INPUT_DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class AudioPart:
    """A part of speech that the model takes."""

    audio: pb.Audio
    seconds: float


async def audio_parts(audio: pb.Audio, model: ServedModel, max_s: float, context: ReadContext) -> list[AudioPart]:
    """Speech of any length in parts that the model takes, of at most `max_s`, which end at pauses."""
    info = model.info.encoder.audio
    longest_s = min(max_s, _longest_s(info))
    samples = unchanged_samples(audio, info)
    if samples is not None and len(samples) <= longest_s * info.sampling_rate:
        return [AudioPart(audio, len(samples) / info.sampling_rate)]
    parts = await context.audio.decode(audio.data, info, FIELD, longest_s)
    return [AudioPart(_with_samples(audio, part, info), len(part) / 2 / info.sampling_rate) for part in parts]


def _with_samples(audio: pb.Audio, samples: bytes, info: types.AudioInfo) -> pb.Audio:
    return pb.Audio(data=_wav(samples, info), language=audio.language, task=audio.task, prompt=audio.prompt)


def unchanged_samples(audio: pb.Audio, info: types.AudioInfo) -> Samples | None:
    """The samples, if the model takes them as they are."""
    return Samples("float32", audio.data) if audio.format == pb.AUDIO_FORMAT_PCM_F32 else _read_wav(audio.data, info)


def prompt_of(samples: Samples, model: ServedModel) -> PromptInput:
    """The prompt of samples. Raises InvalidRequestError."""
    info = model.info.encoder.audio
    if len(samples.data) % INPUT_DTYPE_BYTES[samples.dtype] or not len(samples):
        raise invalid(FIELD, f"has {len(samples.data)} bytes of {samples.dtype} samples; must be one or more samples")
    if len(samples) > info.max_samples:
        raise invalid(
            FIELD,
            f"has {len(samples) / info.sampling_rate:.1f} s; model {model.name!r} takes at most {_longest_s(info):g} s "
            "at once: send it in parts, or to /v1/audio/transcriptions",
        )
    if samples.dtype == "float32" and not is_finite(samples.data, "float32"):
        raise invalid(FIELD, "contains NaN or infinity; all samples must be finite")
    kind, length = inputs_pb2.INPUT_KIND_AUDIO, model.info.encoder.max_tokens
    return whole_prompt(carried_input(kind, samples.dtype, (len(samples),), samples.data, start=0, length=length))


def _longest_s(info: types.AudioInfo) -> float:
    """The longest audio in seconds."""
    return info.max_samples / info.sampling_rate


def _read_wav(data: bytes, info: types.AudioInfo) -> Samples | None:
    """The samples of a whole WAV file (RIFF: chunks of a name, a size and data) that the model takes as they are."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    dtype, start = "", 12
    while start + 8 <= len(data):
        name, (size,) = data[start : start + 4], struct.unpack_from("<I", data, start + 4)
        content = data[start + 8 : start + 8 + size]
        if name == b"fmt ":
            dtype = _dtype_of(content, info)
        elif name == b"data":
            if len(content) < size != STREAMED:
                raise invalid(FIELD, f"is a WAV file that is cut off: {len(content)} of {size} bytes of samples")
            if not dtype:
                return None
            return Samples(dtype, content[: len(content) // INPUT_DTYPE_BYTES[dtype] * INPUT_DTYPE_BYTES[dtype]])
        start += 8 + size + size % 2
    return None


def _dtype_of(content: bytes, info: types.AudioInfo) -> str:
    """The type of the samples; empty if they have to be converted."""
    if len(content) < 16:
        return ""
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if kind == EXTENSIBLE and len(content) >= 26:
        (kind,) = struct.unpack_from("<H", content, 24)
    if (channels, rate) != (1, info.sampling_rate):
        return ""
    return {(PCM, 16): "int16", (FLOAT, 32): "float32"}.get((kind, bits), "")


def _wav(samples: bytes, info: types.AudioInfo) -> bytes:
    """A WAV file of int16 samples."""
    rate = info.sampling_rate
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body
