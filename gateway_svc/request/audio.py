"""Audio prompts: WAV files and raw samples become carried inputs. Workers compute the features."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from quire.internal.v1 import inputs_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.columns import u32_from_bytes
from gateway_svc.request.encoder import AUDIO_FIELD as FIELD
from gateway_svc.request.encoder import longest_s
from gateway_svc.request.finite import is_finite
from gateway_svc.request.models import ServedModel
from gateway_svc.request.parameters import invalid
from gateway_svc.request.prompt_input import PromptInput
from prefix_index.content_ids import content_ids, input_digest
from request_fields.inputs import INPUT_DTYPE_BYTES

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of WAV
STREAMED = 0xFFFF_FFFF  # size of the data of a file that was written to a pipe
CONVERT = "convert it, e.g. with: ffmpeg -i INPUT -ar {rate} -ac 1 -c:a pcm_s16le OUTPUT.wav"


@dataclass(frozen=True, slots=True)
class Samples:
    """Mono audio."""

    dtype: str  # int16 or float32
    data: bytes


def read_audio(audio: pb.Audio, model: ServedModel) -> PromptInput:
    """The prompt of audio that `encoder.check_audio` has accepted. Raises InvalidRequestError."""
    info = model.info.encoder.audio
    samples = Samples("float32", audio.data) if audio.format == pb.AUDIO_FORMAT_PCM_F32 else _read_wav(audio.data, info)
    num_samples, rest = divmod(len(samples.data), INPUT_DTYPE_BYTES[samples.dtype])
    if rest or not num_samples:
        raise invalid(FIELD, f"has {len(samples.data)} bytes of {samples.dtype} samples; must be one or more samples")
    if num_samples > info.max_samples:
        raise invalid(
            FIELD,
            f"has {num_samples / info.sampling_rate:.1f} s; model {model.name!r} takes at most {longest_s(info):g} s: "
            "send it in parts",
        )
    if samples.dtype == "float32" and not is_finite(samples.data, "float32"):
        raise invalid(FIELD, "contains NaN or infinity; all samples must be finite")
    return _whole_prompt(samples, num_samples, model.info.encoder.max_tokens)


def _whole_prompt(samples: Samples, num_samples: int, num_positions: int) -> PromptInput:
    digest = input_digest("audio", samples.dtype, (num_samples,), samples.data)
    carried = inputs_pb2.CarriedInput(
        kind=inputs_pb2.INPUT_KIND_AUDIO,
        digest=digest,
        start=0,
        length=num_positions,
        dtype=inputs_pb2.InputDtype.Value(f"INPUT_DTYPE_{samples.dtype.upper()}"),
        shape=(num_samples,),
        data=samples.data,
    )
    return PromptInput(u32_from_bytes(content_ids(digest, num_positions)), (carried,))


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
