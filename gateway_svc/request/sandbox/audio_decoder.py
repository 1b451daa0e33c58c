"""Decodes the audio of requests, in processes that are killed when they exceed a limit: a file may be hostile to its
decoder, and a few bytes may hold hours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.sandbox.child import parse_frame, to_frame
from gateway_svc.request.sandbox.pool import Job, SandboxPool
from svc_common.errors import UnimplementedError

MAX_AUDIO_S = 1800.0  # limit for one file: 58 MB of samples
JOB = Job("audio_process", "decode audio", "send it in parts", 30.0, 60.0, 60.0, 256 << 20)
PACKAGES = ("av", "numpy")


class AudioDecoder(SandboxPool):
    """The processes. They start with the first file that has to be decoded."""

    def __init__(self) -> None:
        super().__init__(JOB.new_process, 2)

    async def decode(self, data: bytes, info: types.AudioInfo, field: str, max_part_s: float) -> Sequence[bytes]:
        """The int16 samples of a file at the model's rate, in parts of at most this length, which end at pauses.

        Raises InvalidRequestError, OverloadedError if the processes are busy, or UnimplementedError if this gateway
        cannot decode audio.
        """
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise UnimplementedError(
                f"{field}: this gateway has no {' and '.join(missing)}, which audio needs that is no WAV file with "
                f"{info.sampling_rate} samples per second, mono; install it with pip install 'quire-server[audio]'",
                field=field,
            )
        rate = info.sampling_rate
        limits = {"max_samples": round(MAX_AUDIO_S * rate), "max_part": round(max_part_s * rate), "cpu_s": JOB.cpu_s}
        frame = partial(to_frame, {"rate": rate, **limits}, data)
        answer = parse_frame(await JOB.ask(self, frame, partial(invalid, field)))
        if answer["error"]:
            raise invalid(field, f"{answer['error']}; send WAV, MP3, M4A, OGG, WebM or FLAC")
        samples = memoryview(answer["data"])
        return [bytes(samples[2 * start : 2 * end]) for start, end in pairwise([0, *answer["ends"]])]
