"""Decodes the audio of requests, in processes that are killed when they exceed a limit: a file may be hostile to its
decoder, and a few bytes may hold hours.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import invalid
from gateway_svc.request.sandbox.frames import parse_frame, to_frame
from gateway_svc.request.sandbox.pool import SandboxErrors, SandboxPool
from gateway_svc.request.sandbox.process import SandboxProcess
from svc_common.errors import UnimplementedError

NUM_PROCESSES = 2
MAX_AUDIO_S = 1800.0  # limit for one file: 58 MB of samples
CPU_S = 30.0
TIMEOUT_S = 60.0  # longer than CPU_S, because the machine may be busy
PROCESS = "gateway_svc.request.sandbox.audio_process"
PACKAGES = ("av", "numpy")


class AudioDecoder:
    """Owns the processes. They start with the first file that has to be decoded."""

    def __init__(self) -> None:
        self._pool = SandboxPool(lambda: SandboxProcess(PROCESS, 256 << 20), NUM_PROCESSES)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return self._pool.pids

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

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
        errors = SandboxErrors(
            partial(invalid, field),
            busy="all processes that decode audio are busy",
            slow=f"audio was not decoded within {TIMEOUT_S:g} s",
            killed="the process that decodes audio was killed twice",
            oversized="becomes too large when it is decoded; send it in parts",
            out_of_cpu_time=f"takes more than {CPU_S:g} s of CPU time to decode; send it in parts",
            ended="ended the process that decodes it with status {status}; send another file",
        )
        with errors.raised():
            return await self._pool.run(partial(_ask, data, info, field, max_part_s), TIMEOUT_S)


async def _ask(
    data: bytes, info: types.AudioInfo, field: str, max_part_s: float, process: SandboxProcess
) -> Sequence[bytes]:
    rate = info.sampling_rate
    limits = {
        "rate": rate,
        "max_samples": round(MAX_AUDIO_S * rate),
        "max_part": round(max_part_s * rate),
        "cpu_s": CPU_S,
    }
    frame = await asyncio.to_thread(to_frame, limits, data)
    answer = parse_frame(await process.ask(frame, TIMEOUT_S))
    if answer["error"]:
        raise invalid(field, f"{answer['error']}; send WAV, MP3, M4A, OGG, WebM or FLAC")
    samples = memoryview(answer["data"])
    return [bytes(samples[2 * start : 2 * end]) for start, end in pairwise([0, *answer["ends"]])]
