"""What an operator may ask of a running service: a profile, or a report for support.

A report has versions, settings, metrics and the last lines of the log. It has no secrets: settings hide them, and logs
do not contain prompts, outputs or keys. As a second defence, passwords in URLs and bearer tokens are removed from it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from quire.v1 import inference_pb2 as pb

from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.memory import memory_kinds
from svc_common.observe import profiler
from svc_common.observe.logs import recent_lines
from svc_common.observe.metrics import quire_version

MIN_SECONDS, MAX_SECONDS, DEFAULT_SECONDS = 0.1, 60.0, 10.0
MAX_HZ, DEFAULT_HZ = 1000, 200
ANSWER_S = 15.0  # for the answer after a profile of some seconds
PACKAGES = (
    "grpcio", "protobuf", "uvloop", "numpy", "torch", "triton", "safetensors", "tokenizers", "llguidance", "jinja2",
    "xxhash", "redis", "starlette", "uvicorn", "prometheus-client", "cryptography", "opentelemetry-sdk",
)  # fmt: skip
PASSWORD = re.compile(r"(?<=://)\S*@")  # up to the last @: a password may contain others
BEARER = re.compile(r"(?i)(bearer\s+)[\w.~+/=-]+")


class Inspector:
    """Profiles and reports of this process. `settings`: the settings in force, without secrets. `memory`: bytes of its
    anonymous memory whose use is known.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        settings: str,
        metrics: Callable[[], bytes],
        memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._service = service
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._memory = memory
        self._started_at = time.time()
        self._is_profiling = False

    async def inspect(self, kind: pb.InspectKind.ValueType, seconds: float, hz: int) -> bytes:
        """The profile as JSON in gzip, or the report as JSON. Raises InvalidRequestError or OverloadedError."""
        if kind == pb.INSPECT_KIND_REPORT:
            memory = await asyncio.to_thread(self._kinds_of_memory)
            return json.dumps(self._report() | {"memory": memory}).encode()
        if kind != pb.INSPECT_KIND_PROFILE:
            raise InvalidRequestError(
                f"kind is {kind}; must be INSPECT_KIND_PROFILE or INSPECT_KIND_REPORT", field="kind"
            )
        seconds, hz = checked_times(seconds, hz)
        if self._is_profiling:
            raise OverloadedError(f"{self._instance} is being profiled; retry when that profile is complete")
        self._is_profiling = True
        stop = threading.Event()
        try:
            return await asyncio.to_thread(
                profiler.record, f"quire-{self._service} {self._instance}", seconds, hz, stop
            )
        finally:
            stop.set()  # if the caller has left
            self._is_profiling = False

    def _kinds_of_memory(self) -> dict[str, int]:
        """Resident bytes by kind, which add up to the memory of the process."""
        known, kinds = dict(self._memory()), memory_kinds()
        other = kinds.pop("anonymous", 0) - sum(known.values())
        return known | {"other": max(0, other)} | kinds

    def _report(self) -> dict[str, object]:
        return {
            "service": self._service,
            "instance": self._instance,
            "versions": versions(),
            "uptime_s": round(time.time() - self._started_at, 1),
            "settings": without_secrets(self._settings),
            "metrics": without_secrets(self._metrics().decode()),
            "log": without_secrets("\n".join(recent_lines())),
        }


def checked_times(seconds: float, hz: int) -> tuple[float, int]:
    """Duration and rate of a profile; 0 is the default. Raises InvalidRequestError."""
    seconds, hz = seconds or DEFAULT_SECONDS, hz or DEFAULT_HZ
    if not math.isfinite(seconds) or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        limits = f"{MIN_SECONDS:g} to {MAX_SECONDS:g}"
        raise InvalidRequestError(f"seconds is {seconds:g}; must be from {limits}", field="seconds")
    if hz > MAX_HZ:
        raise InvalidRequestError(f"hz is {hz}; must be at most {MAX_HZ}", field="hz")
    return seconds, hz


def answer_timeout_s(kind: pb.InspectKind.ValueType, seconds: float) -> float:
    """How long a caller waits for the answer."""
    is_profile = kind == pb.INSPECT_KIND_PROFILE and math.isfinite(seconds)
    return ANSWER_S + (min(max(seconds or DEFAULT_SECONDS, 0.0), MAX_SECONDS) if is_profile else 0.0)


def versions() -> dict[str, str]:
    """Versions of Quire, Python, the system and the packages that are installed."""
    found = {"quire": quire_version(), "python": sys.version.split()[0], "system": platform.platform()}
    found["cpus"] = str(os.cpu_count())
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(text: str) -> str:
    """The text without passwords in URLs and bearer tokens."""
    return BEARER.sub(r"\1***", PASSWORD.sub("***@", text))
