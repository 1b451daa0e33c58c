"""Prompts that are audio: WAV files and raw samples. Workers compute the features."""

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
from request_fields.inputs import INPUT_DTYPE_BYTES

FIELD = "prompt.audio.data"
HEADER_BYTES = 64 << 10  # of a WAV file: formats and tags
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of WAV
STREAMED = 0xFFFF_FFFF  # size of the data of a file that was written to a pipe
CONVERT = "convert it, e.g. with: ffmpeg -i INPUT -ar {rate} -ac 1 -c:a pcm_s16le OUTPUT.wav"


class AudioReader:
    """Reads long audio in a thread."""

    def check(self, prompt: pb.Prompt, field: str) -> None:
        if not prompt.audio.data:
            raise invalid(f"{field}.audio.data", "is empty; send a WAV file, or samples with format PCM_F32")

    def check_size(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        """Refuse audio that the model does not take, or that is certainly too long."""
        audio = request.prompt.audio
        if not model.info.encoder.HasField("audio"):
            raise invalid("prompt.audio", f"is set, but model {model.name!r} takes no audio; send text or token ids")
        info = model.info.encoder.audio
        if len(audio.data) > (limit := HEADER_BYTES + 4 * info.max_samples):
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
        audio = request.prompt.audio
        return await context.lane.run(len(audio.data), read_audio, audio, model)


@dataclass(frozen=True, slots=True)
class Samples:
    """Mono audio."""

    dtype: str  # int16 or float32
    data: bytes


def read_audio(audio: pb.Audio, model: ServedModel) -> PromptInput:
    """The prompt of audio whose size is checked. Raises InvalidRequestError."""
    info = model.info.encoder.audio
    samples = Samples("float32", audio.data) if audio.format == pb.AUDIO_FORMAT_PCM_F32 else _read_wav(audio.data, info)
    num_samples, rest = divmod(len(samples.data), INPUT_DTYPE_BYTES[samples.dtype])
    if rest or not num_samples:
        raise invalid(FIELD, f"has {len(samples.data)} bytes of {samples.dtype} samples; must be one or more samples")
    if num_samples > info.max_samples:
        raise invalid(
            FIELD,
            f"has {num_samples / info.sampling_rate:.1f} s; model {model.name!r} takes at most {_longest_s(info):g} s: "
            "send it in parts",
        )
    if samples.dtype == "float32" and not is_finite(samples.data, "float32"):
        raise invalid(FIELD, "contains NaN or infinity; all samples must be finite")
    kind, length = inputs_pb2.INPUT_KIND_AUDIO, model.info.encoder.max_tokens
    return whole_prompt(carried_input(kind, samples.dtype, (num_samples,), samples.data, start=0, length=length))


def _longest_s(info: types.AudioInfo) -> float:
    """The longest audio in seconds."""
    return info.max_samples / info.sampling_rate


def _read_wav(data: bytes, info: types.AudioInfo) -> Samples:
    """The samples of a WAV file (RIFF: chunks of a name, a size and data)."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise _refused("is not a WAV file", info)
    dtype, start = "", 12
    while start + 8 <= len(data):
        name, (size,) = data[start : start + 4], struct.unpack_from("<I", data, start + 4)
        content = data[start + 8 : start + 8 + size]
        if name == b"fmt ":
            dtype = _dtype_of(content, info)
        elif name == b"data":
            if len(content) < size != STREAMED:
                raise _refused(f"is a WAV file that is cut off: {len(content)} of {size} bytes of samples", info)
            if not dtype:
                break
            return Samples(dtype, content[: len(content) // INPUT_DTYPE_BYTES[dtype] * INPUT_DTYPE_BYTES[dtype]])
        start += 8 + size + size % 2
    raise _refused("is a WAV file without a format or without samples", info)


def _dtype_of(content: bytes, info: types.AudioInfo) -> str:
    if len(content) < 16:
        raise _refused("is a WAV file with a damaged format", info)
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if kind == EXTENSIBLE and len(content) >= 26:
        (kind,) = struct.unpack_from("<H", content, 24)
    if rate != info.sampling_rate:
        raise _refused(f"has {rate} samples per second; the model takes {info.sampling_rate}", info)
    if channels != 1:
        raise _refused(f"has {channels} channels; the model takes one (mono)", info)
    dtype = {(PCM, 16): "int16", (FLOAT, 32): "float32"}.get((kind, bits))
    if dtype is None:
        raise _refused(f"has WAV format {kind} with {bits} bits; must be 16-bit PCM or 32-bit float", info)
    return dtype


def _refused(words: str, info: types.AudioInfo) -> Exception:
    return invalid(FIELD, f"{words}; {CONVERT.format(rate=info.sampling_rate)}")
