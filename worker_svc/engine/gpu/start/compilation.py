"""Compiles kernels in parallel processes before they are launched for the first time.

Triton compiles a kernel for each combination of argument types at its first launch, one after the other, about a second
each. Here the launches of a start-up are collected without being executed, processes compile those that Triton's cache
lacks, and the real launches find them there. A kernel that was not collected is compiled at its launch, as always.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.start.compile_process import settle_key
from worker_svc.engine.kernels.machine import available_cores, available_memory

logger = logging.getLogger(__name__)

BYTES_PER_PROCESS = 1 << 30  # a compiling process takes less
LOG_INTERVAL_S = 5.0

Kernel = tuple[str, str, str]  # module, name and Launch.specialization


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a kernel."""

    name: str
    error: str | None
    seconds: float


class ProcessEndedError(RuntimeError):
    """The process that compiles kernels has ended before the last one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The first launch of a kernel with arguments of these types."""

    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]  # alignment of pointers, divisibility of numbers
    specialization: str  # all of the above and the options, for JITFunction.preload

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def is_cached(self) -> bool:
        """Whether Triton's cache has the kernel, under the key that triton.compile computes."""
        settle_key(self.kernel)
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        backend = make_backend(driver.active.get_current_target())
        stored = json.loads(self.specialization)["options"]
        options = backend.parse_options({k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        metadata = f"{source.name[:150]}.json"
        return metadata in (files.get_group(metadata) or {})


@contextmanager
def collecting() -> Iterator[list[Launch]]:
    """No kernel of Triton is launched within. The list gets those that this process has not compiled or loaded.

    Loaded kernels are not launched either, because they would read what the others should have written.
    """
    found: dict[tuple[str, str], Launch] = {}
    launches: list[Launch] = []

    def collect(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        key = f"{fn.module}.{fn.name}", str(compile["key"])
        if key not in found:
            found[key] = Launch(
                fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0],
                compile["specialization_data"],
            )  # fmt: skip
            launches.append(found[key])
        return True  # do not compile

    def load(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=True, **options)

    run, JITFunction.run = JITFunction.run, load
    former, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, collect
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook, JITFunction.run = former, run


def compile_first(steps: Sequence[Callable[[], object]], group: Group) -> int:
    """Compiles the kernels that `steps` launch, in parallel. All ranks call it together. Returns the number of kernels
    that the cache lacked.

    The steps run without these kernels, so their results have no meaning, and their errors are ignored: the caller
    runs them again.
    """
    if triton.knobs.runtime.interpret:
        return 0
    with collecting() as launches:
        for step in steps:
            with suppress(Exception):
                step()
    # Most kernels of the ranks are the same, so the first rank of each host compiles them alone.
    is_first = group.local_rank == 0
    num_compiled = _compile_missing(launches) if is_first else 0
    group.all_reduce_min(0)
    return num_compiled if is_first else _compile_missing(launches)


def _compile_missing(launches: list[Launch]) -> int:
    missing = [launch for launch in launches if not launch.is_cached()]
    if missing:
        compile_in_processes(missing, num_processes(len(missing)))
    return len(missing)


def num_processes(num_kernels: int) -> int:
    """As many as there are kernels, cores, and gigabytes of free memory."""
    return max(1, min(num_kernels, available_cores(), available_memory() // BYTES_PER_PROCESS))


def compile_in_processes(launches: list[Launch], processes: int) -> None:
    """Compiles into Triton's cache. A kernel that cannot be compiled is logged; its launch will fail as well."""
    started = last = time.monotonic()
    logger.info("compiling %d kernels in %d processes", len(launches), processes)
    kernels = [(launch.kernel.module, launch.name, launch.specialization) for launch in launches]
    try:
        for number, kernel in enumerate(compiled(kernels, driver.active.get_current_target(), processes), 1):
            if kernel.error is not None:
                logger.warning("%s is not compiled ahead of its launch: %s", kernel.name, kernel.error)
            if time.monotonic() - last >= LOG_INTERVAL_S:
                last = time.monotonic()
                logger.info("%d of %d kernels are compiled", number, len(launches))
    except ProcessEndedError as error:
        logger.warning("%s; the others are compiled at their first launch", error)
        return
    logger.info("%d kernels are compiled in %.1f s", len(launches), time.monotonic() - started)


def compiled(kernels: Sequence[Kernel], target: GPUTarget, processes: int) -> Iterator[Compiled]:
    """Compiles in a process that forks into `processes`. Kernels start in this order, and each is returned at its end.

    Raises ProcessEndedError.
    """
    task = {
        "target": [target.backend, target.arch, target.warp_size],
        "processes": processes,
        "kernels": kernels,
    }
    num_done = 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", "worker_svc.engine.gpu.start.compile_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        with suppress(BrokenPipeError), cast(IO[str], child.stdin) as stdin:  # it has ended: see below
            json.dump(task, stdin)
        for line in cast(IO[str], child.stdout):
            yield Compiled(*json.loads(line))
            num_done += 1
    if num_done < len(kernels):
        raise ProcessEndedError(
            f"the process that compiles kernels exited with code {child.returncode} after {num_done} of {len(kernels)}"
        )
