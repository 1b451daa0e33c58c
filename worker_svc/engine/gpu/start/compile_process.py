"""Compiles kernels into Triton's cache in forked processes. compilation.py starts it.

It reads one task from stdin: target, number of processes, and kernels as (module, name, specialization). It writes a
line (name, error or null, seconds) for each kernel to stdout. It has its own process, because a worker has threads and
a CUDA context and so must not fork. If the worker dies, it ends at its next line.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class CompileTarget:
    """A Triton driver that only names its target, so no GPU is used."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def settle_key(function: JITFunction[Any]) -> None:
    """Computes the keys of the functions that a kernel calls, then its own.

    Triton adds the constants of a called function to a key only if that function has its key already. Without an order,
    two processes look for the same kernel under two keys.
    """
    called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
    for other in called:
        if isinstance(other, JITFunction) and other is not function and other.hash is None:
            settle_key(other)
    _ = function.cache_key


def compile_kernel(module: str, name: str, specialization: str) -> str | None:
    """Returns the error, if any."""
    try:
        kernel = getattr(importlib.import_module(module), name)
        settle_key(kernel)
        compiled = kernel.preload(specialization)
        if hasattr(nvidia, "make_launcher"):  # Triton 3.6 compiles a C function for each signature
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # Any error of the compiler: the launch of this kernel reports it.
        return f"{type(error).__name__}: {error}"
    return None


def timed_compilation(kernel: list[str]) -> tuple[str, str | None, float]:
    """The answer for a kernel."""
    started = time.perf_counter()
    error = compile_kernel(*kernel)
    return kernel[1], error, time.perf_counter() - started


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers may print
    task: dict[str, Any] = json.load(sys.stdin)
    driver.set_active(CompileTarget(GPUTarget(*task["target"])))
    for module, _, _ in task["kernels"]:
        importlib.import_module(module)  # once, before the fork
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(task["processes"], mp_context=fork) as pool:
        for done in as_completed([pool.submit(timed_compilation, kernel) for kernel in task["kernels"]]):
            print(json.dumps(done.result()), file=answers)


if __name__ == "__main__":
    main()
