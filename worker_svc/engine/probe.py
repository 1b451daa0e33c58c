"""How fast the CPU kernels multiply on this machine, and with which instructions: one line of JSON, for `quire doctor`.

python -m worker_svc.engine.probe
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from worker_svc.engine.kernels.build import KernelBuildError, load_kernels
from worker_svc.engine.machine import instruction_sets

ROWS, OUTPUTS, INPUTS = 256, 1024, 1024
PROBE_S = 0.1
BFLOAT16, INT8, FLOAT32 = 0, 1, 2  # `Kind` of products.h
PATHS = {"avx512f": "AVX512", "avx2": "AVX2", "neon": "NEON", "generic": "no vector instructions"}

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def paths(words: list[str]) -> dict[str, str]:
    """The instructions for each number type, from the words of `quire_arithmetic`."""
    plain = next(name for word, name in PATHS.items() if word in words)
    if "tiles" in words:
        return {"bfloat16": "AMX", "int8": "AMX", "float32": plain}
    pairs = "AVX512-BF16" if "bfloat16-pairs" in words else plain
    return {"bfloat16": pairs, "int8": plain, "float32": plain}


def giga_operations(kernels: ctypes.CDLL, kind: int) -> float:
    """Billions of multiplications and additions per second on one core, for a layer with many rows."""
    is_bf16 = int(kind != FLOAT32)
    dtype = np.uint16 if is_bf16 else np.float32
    one = np.array(1.0, np.float32).view(np.uint32) >> 16 if is_bf16 else 1.0
    weight, x = np.full((OUTPUTS, INPUTS), one, dtype), np.full((ROWS, INPUTS), one, dtype)
    y, scales = np.empty((ROWS, OUTPUTS), dtype), np.empty(OUTPUTS, np.float32)
    packed = np.empty(kernels.quire_linear_packed_bytes(kind, OUTPUTS, INPUTS), np.uint8)
    addresses = packed.ctypes.data, scales.ctypes.data
    kernels.quire_linear_pack(kind, is_bf16, weight.ctypes.data, OUTPUTS, INPUTS, *reversed(addresses), 1)

    def multiply() -> None:
        kernels.quire_linear(
            kind, is_bf16, x.ctypes.data, *addresses, None, y.ctypes.data, ROWS, INPUTS, OUTPUTS, 1
        )  # fmt: skip

    return 2e-9 * ROWS * OUTPUTS * INPUTS / _least_seconds(multiply)


def _least_seconds(call: Callable[[], None]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + PROBE_S
    while True:
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
        if time.perf_counter() > end:
            return best


def measure() -> dict[str, Any]:
    """Paths and speeds by number type; raises KernelBuildError."""
    kernels = load_kernels()
    kernels.quire_arithmetic.restype = ctypes.c_char_p
    kernels.quire_linear_packed_bytes.argtypes = [_INT, _LONG, _LONG]
    kernels.quire_linear_packed_bytes.restype = _LONG
    kernels.quire_linear_pack.argtypes = [_INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT]
    kernels.quire_linear.argtypes = [_INT, _INT, *[_POINTER] * 5, *[_LONG] * 3, _INT]
    words = kernels.quire_arithmetic().decode().split()
    kinds = {"bfloat16": BFLOAT16, "int8": INT8, "float32": FLOAT32}
    return {
        "paths": paths(words),
        "giga_operations": {name: round(giga_operations(kernels, kind), 1) for name, kind in kinds.items()},
        "has_unused_amx": "amx_bf16" in instruction_sets() and "tiles" not in words,
    }


def main() -> None:
    try:
        found = measure()
    except KernelBuildError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
