"""The process that decodes the audio of requests, under limits: it may be killed at any time.

    python -m gateway_svc.request.sandbox.audio_process

Message and answer (`to_frame` of child.py); `error` is empty if the message succeeded:

    {"rate": 16000, "max_samples": n, "max_part": n, "data": file}
    -> {"error": ..., "ends": [...], "data": i16[samples]}

The samples are mono. `ends` are the ends of parts of at most `max_part` samples, which are divided at pauses.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import av
import numpy as np

from gateway_svc.request.sandbox.child import answer_messages

if TYPE_CHECKING:
    import numpy.typing as npt

    I16 = npt.NDArray[np.int16]

MAX_MEMORY_BYTES = 3 << 30  # limit of the address space; more is a MemoryError
OPTIONS = {"format_whitelist": "aac,aiff,amr,caf,flac,matroska,webm,mov,mp4,m4a,mp3,ogg,wav,w64"}  # no playlists
PAUSE_S = 0.02  # the energy of a pause is measured in steps of this length
PLACES = 4  # a part ends in its last quarter


class BadAudioError(Exception):
    """The audio cannot be used; the message says why."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one message."""
    try:
        samples = decoded(request["data"], request["rate"], request["max_samples"])
        return {
            "error": "",
            "ends": part_ends(samples, request["rate"], request["max_part"]),
            "data": samples.tobytes(),
        }
    except BadAudioError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "needs more memory than is allowed; send it in parts"}


def decoded(data: bytes, rate: int, max_samples: int) -> I16:
    """The first audio stream of a file as mono samples. Stops when there are more samples than allowed."""
    frames: list[I16] = []
    num_samples = 0
    try:
        with av.open(io.BytesIO(data), mode="r", options=OPTIONS, metadata_errors="ignore") as file:
            for frame in _frames(file, rate):
                frames.append(frame)
                num_samples += len(frame)
                if num_samples > max_samples:
                    raise BadAudioError(f"has more than {max_samples / rate:g} s; send it in parts")
    except av.error.FFmpegError as error:
        if not frames:
            raise BadAudioError(f"is not audio in a known format ({error.strerror})") from None
        raise BadAudioError(f"is damaged after {num_samples / rate:.1f} s ({error.strerror})") from None
    except ValueError as error:  # PyAV's, if a stream changes its rate or channels
        raise BadAudioError(f"cannot be decoded after {num_samples / rate:.1f} s ({error})") from None
    if not frames:
        raise BadAudioError("has no samples")
    return np.concatenate(frames)


def _frames(file: Any, rate: int) -> Iterator[I16]:
    """Decoded samples, at this rate."""
    if not file.streams.audio:
        raise BadAudioError("has no audio")
    stream = file.streams.audio[0]
    stream.thread_type = "NONE"
    resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)
    for frame in chain(file.decode(stream), [None]):
        for part in resampler.resample(frame):
            yield part.to_ndarray().reshape(-1).astype(np.int16, copy=False)


def part_ends(samples: I16, rate: int, max_part: int) -> list[int]:
    """Where parts end: each in the quietest place of its last quarter, so that no word is divided."""
    ends: list[int] = []
    start = 0
    while len(samples) - start > max_part:
        low = start + max_part - max_part // PLACES
        start = low + _quietest(samples[low : start + max_part], max(1, round(PAUSE_S * rate)))
        ends.append(start)
    return [*ends, len(samples)]


def _quietest(samples: I16, step: int) -> int:
    """The middle of the step with the least energy; the last one of equals, so that parts are long."""
    num_steps = max(1, len(samples) // step)
    energy = np.square(samples[: num_steps * step].astype(np.float32)).reshape(num_steps, -1).sum(axis=1)
    return int(num_steps - 1 - np.argmin(energy[::-1])) * step + step // 2


def _load_modules() -> None:
    """Load what the libraries load late, because later the process cannot open files."""
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as output:
        stream = output.add_stream("pcm_s16le", rate=8000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1600), np.int16), format="s16", layout="stereo")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    part_ends(decoded(file.getvalue(), 16000, 1 << 20), 16000, 400)


if __name__ == "__main__":
    av.logging.set_level(av.logging.PANIC)
    _load_modules()
    answer_messages(answer, MAX_MEMORY_BYTES)
