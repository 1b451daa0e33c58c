"""How fast the CPU kernels multiply on this machine, and with which instructions: a line of JSON for each path of the
processor, for `quire doctor`.

python -m worker_svc.engine.kernels.probe           # the path that a worker takes here
python -m worker_svc.engine.kernels.probe --all     # the other paths of this processor too, which may compile them
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from worker_svc.engine.kernels.binding import struct
from worker_svc.engine.kernels.build import LINEAR_SOURCES, KernelBuildError, load_kernels, load_kernels_of
from worker_svc.engine.kernels.paths import PATH_ENV, CpuPathError, available_paths, chosen_path, path_of

ROWS, OUTPUTS, INPUTS = 256, 1024, 1024
READ_OUTPUTS = 1 << 15  # weights of 64 MB, which most caches do not hold
PROBE_S = 0.1
BFLOAT16, INT8, FLOAT32 = 0, 1, 2  # `Kind` of products.h
KINDS = {"bfloat16": BFLOAT16, "int8": INT8, "float32": FLOAT32}
TITLES = {"avx512f": "AVX512", "avx2": "AVX2", "neon": "NEON", "generic": "no vector instructions"}


def instructions(words: list[str]) -> dict[str, str]:
    """The instructions for each number type, from the words of `quire_arithmetic`."""
    plain = next(name for word, name in TITLES.items() if word in words)
    if "tiles" in words:
        return {"bfloat16": "AMX", "int8": "AMX", "float32": plain}
    if "bfloat16-matrices" in words:
        return {"bfloat16": "BFMMLA", "int8": "SMMLA", "float32": plain}
    pairs = "AVX512-BF16" if "bfloat16-pairs" in words else plain
    return {"bfloat16": pairs, "int8": plain, "float32": plain}


def multiplier(kernels: ctypes.CDLL, kind: int, rows: int, outputs: int) -> Callable[[], None]:
    """A function that computes a layer on one core."""
    is_bf16 = int(kind != FLOAT32)
    dtype = np.uint16 if is_bf16 else np.float32
    one = np.array(1.0, np.float32).view(np.uint32) >> 16 if is_bf16 else 1.0
    weight, x = np.full((outputs, INPUTS), one, dtype), np.full((rows, INPUTS), one, dtype)
    y, scales = np.empty((rows, outputs), dtype), np.empty(outputs, np.float32)
    packed = np.empty(kernels.quire_linear_packed_bytes(kind, outputs, INPUTS), np.uint8)
    kernels.quire_linear_pack(kind, is_bf16, weight, outputs, INPUTS, scales, packed, 1)
    layer = struct("Linear")(kind=kind, packed=packed, scales=scales, out=outputs, **{"in": INPUTS})

    def multiply() -> None:
        kernels.quire_linear(is_bf16, ctypes.byref(layer), x, y, rows, 1)

    return multiply


def giga_operations(kernels: ctypes.CDLL, kind: int) -> float:
    """Billions of multiplications and additions per second on one core, for a layer with many rows."""
    return 2e-9 * ROWS * OUTPUTS * INPUTS / _least_seconds(multiplier(kernels, kind, ROWS, OUTPUTS))


def read_rate(kernels: ctypes.CDLL) -> float:
    """GB of bfloat16 weights per second that one core reads for a layer with one row."""
    return 2e-9 * READ_OUTPUTS * INPUTS / _least_seconds(multiplier(kernels, BFLOAT16, 1, READ_OUTPUTS))


def copy_rate() -> float:
    """GB per second that one core reads, and writes elsewhere, when it copies memory."""
    source = np.ones(READ_OUTPUTS * INPUTS, np.uint16)
    target = np.empty_like(source)
    return 2e-9 * source.nbytes / _least_seconds(lambda: np.copyto(target, source))


def _least_seconds(call: Callable[[], None]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + PROBE_S
    while True:
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
        if time.perf_counter() > end:
            return best


def measure_path(kernels: ctypes.CDLL) -> dict[str, Any]:
    """Instructions and speeds of kernels."""
    arithmetic = kernels.quire_arithmetic().decode()
    return {
        "path": path_of(arithmetic).name,
        "instructions": instructions(arithmetic.split()),
        "giga_operations": {name: round(giga_operations(kernels, kind), 1) for name, kind in KINDS.items()},
        "read_gb_s": round(read_rate(kernels), 1),
    }


def measure() -> dict[str, Any]:
    """The path that a worker takes. Raises KernelBuildError and CpuPathError."""
    found = measure_path(load_kernels())
    fastest = available_paths()[0].name
    return found | {"copy_gb_s": round(copy_rate(), 1), "fastest": fastest, "is_chosen": chosen_path() is not None}


def measure_others(used: str) -> Iterator[dict[str, Any]]:
    """The other paths of this processor, except for those that the compiler or the system refuses."""
    for path in available_paths():
        try:
            if path.name != used:
                yield measure_path(load_kernels_of(path, LINEAR_SOURCES))
        except KernelBuildError as error:
            print(f"{path.name}: {error}", file=sys.stderr)


def main() -> None:
    try:
        found = measure()
    except (KernelBuildError, CpuPathError) as error:
        found = {"error": str(error), "is_fatal": bool(os.environ.get(PATH_ENV))}
    print(json.dumps(found), flush=True)
    if "--all" in sys.argv[1:] and "path" in found:
        for other in measure_others(found["path"]):
            print(json.dumps(other), flush=True)


if __name__ == "__main__":
    main()
