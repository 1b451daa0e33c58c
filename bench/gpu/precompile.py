"""Compiles all kernels of the benchmark in parallel before anything is measured.

The engine and the sections of kernels run once on the CPU, with real settings, without launching or compiling: Triton
only reports what each launch would compile. The engine's own processes then compile all of it into the cache that the
later sections and the workers share.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from bench.gpu import adapters, kernels, machine, model, self_checks
from bench.gpu.aot import ARCHITECTURES
from bench.gpu.dry_run import Device, Recorder, take_steps, without_gpu
from bench.gpu.report import Report
from bench.workloads import COMMON, QWEN3_06B, weight_shapes
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.attention.tiles import Processors
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.gpu.start import compilation
from worker_svc.engine.gpu.start.compilation import Kernel

ENGINES: list[dict[str, Any]] = [
    {}, model.NANO_SETTINGS, model.NANO_SETTINGS | {"kv_cache_dtype": "fp8"},
    model.NANO_SETTINGS | {"determinism": "exact"}, {"determinism": "exact"}, model.EXACT_SETTINGS,
    {"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"quantize": "fp8"}, {"quantize": "fp8", "determinism": "exact"},
    model.LONG_SETTINGS, adapters.SETTINGS, adapters.SETTINGS | {"determinism": "exact"},
]  # fmt: skip
SECTIONS = (kernels.decode_attention, kernels.prefill_attention, kernels.other_caches)
LONG = ("paged_attention", "linear", "collect", "select", "pick")  # compilations
NO_GPU = "libcuda.so cannot found"  # in the error of a launcher, where there is nothing to launch on


def compile_all(report: Report) -> None:
    if report.is_smoke:
        report.row("compile", "interpreter", note="nothing to compile")
        return
    started = time.perf_counter()
    torch.set_num_threads(1)  # a forked process must not find torch's threads gone
    capability = int(machine.query(("compute_cap",)).get("compute_cap", "9.0").replace(".", ""))
    with tempfile.TemporaryDirectory() as scratch:
        _checkpoint_of_zeros(Path(scratch))
        programs = {f"engine {fields}": partial(run_engine, Path(scratch), fields) for fields in ENGINES}
        programs |= {section.__name__: partial(run_section, section) for section in SECTIONS}
        programs |= {f"checks {i}": partial(run_checks, fields) for i, fields in enumerate(self_checks.SETTINGS)}
        with _pool(capability, len(programs)) as pool:
            jobs = {name: pool.submit(list_kernels, program) for name, program in programs.items()}
            wanted = set().union(*(_result(report, name, job) for name, job in jobs.items()))
    report.row("compile", f"{len(wanted)} kernels listed", ms=(time.perf_counter() - started) * 1e3)
    compile_in_processes(report, wanted, capability)


def _result(report: Report, program: str, job: Future[set[Kernel]]) -> set[Kernel]:
    """Empty, with a row, if the program failed: its kernels are compiled later, when they are first launched."""
    try:
        return job.result()
    except Exception as error:
        report.row("compile", f"list {program}", ok=False, note=f"{type(error).__name__}: {str(error)[:200]}")
        return set()


def _pool(capability: int, num_jobs: int) -> ProcessPoolExecutor:
    """Processes for which the GPU is a driver that launches nothing."""
    size = min(num_jobs, len(os.sched_getaffinity(0)))
    return ProcessPoolExecutor(size, multiprocessing.get_context("fork"), _begin, (capability,))


def _begin(capability: int) -> None:
    torch.set_num_threads(1)
    driver.set_active(Device(capability))


def run_engine(folder: Path, fields: dict[str, Any]) -> None:
    """Starts an engine with these settings, and takes a few steps."""
    with without_gpu(Recorder(Device())):
        config = EngineConfig(folder, **(model.SETTINGS | {"dtype": "bfloat16", "num_blocks": 1200} | fields))
        take_steps(DeviceRunner(config))


def run_checks(fields: dict[str, Any]) -> None:
    """Launches the kernels of the start-up checks with these settings."""
    for launch in self_checks.launches(self_checks.make_setup(Listing(), fields)):
        with suppress(Exception):  # nothing is computed
            launch()


def run_section(section: Callable[[Report], None]) -> None:
    """Runs a section of kernels."""
    section(Listing())


def list_kernels(program: Callable[[], None]) -> set[Kernel]:
    """Kernels that the program would compile."""
    with compilation.collecting() as launches, listing(driver.active.get_current_target().arch):
        program()
    gc.collect()  # engines are in cycles
    return {(launch.kernel.module, launch.name, launch.specialization) for launch in launches}


@contextmanager
def listing(capability: int) -> Iterator[None]:
    """Nothing is computed, and engines compile nothing."""
    processors = ARCHITECTURES.get(capability, ARCHITECTURES[90]).processors
    make_case = kernels.Case.make

    def small_case(report: Report, contexts: list[int], num_queries: int = 1, *args: Any, **fields: Any) -> Any:
        return make_case(report, [min(c, 300) for c in contexts[:3]], min(num_queries, 40), *args, **fields)

    patches = [
        mock.patch.object(compilation, "compile_in_processes"),
        mock.patch.object(Processors, "of", return_value=processors),
        mock.patch.object(Processors, "num_programs", return_value=processors.count),
        mock.patch.object(F, "linear", lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))),
        mock.patch.object(torch, "_scaled_mm", return_value=torch.zeros(1, 1)),
        mock.patch.object(kernels.Case, "make", small_case),
        mock.patch.object(kernels.Case, "error", return_value=0.0),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class Listing(Report):
    """A report for sections of which only the launches matter."""

    def __init__(self) -> None:
        super().__init__(is_smoke=False)
        self.device = torch.device("cpu")

    def row(self, section: str, name: str, **_: object) -> None:
        pass

    def time_ms(self, calls: Any, repeats: int = 1) -> float:
        calls[0]()  # the others launch the same kernels
        return 1.0

    def release(self) -> None:
        pass


def _checkpoint_of_zeros(folder: Path) -> None:
    """One layer of the model: layers have equal kernels."""
    shape = QWEN3_06B | {"num_hidden_layers": 1, "max_position_embeddings": model.LONGEST}
    tensors = {
        f"model.{name}.weight": torch.zeros(size, dtype=torch.bfloat16) for name, size in weight_shapes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(COMMON | shape | {"dtype": "bfloat16"}))


def compile_in_processes(report: Report, wanted: set[Kernel], capability: int) -> None:
    """Compiles as a start-up does. Rows for the whole and for each kernel that does not compile."""
    started = time.perf_counter()
    longest_first = sorted(wanted, key=lambda kernel: (not kernel[1].startswith(LONG), kernel))
    target, processes = GPUTarget("cuda", capability, 32), compilation.num_processes(len(wanted))
    seconds: list[float] = []
    try:
        for number, kernel in enumerate(compilation.compiled(longest_first, target, processes), 1):
            if kernel.error is None or NO_GPU in kernel.error:
                seconds.append(kernel.seconds)
            else:  # the other kernels are still useful
                report.row("compile", kernel.name, ok=False, note=kernel.error[:200])
            if number % 25 == 0:
                print(f"   {number} of {len(wanted)} compiled", flush=True)
    except compilation.ProcessEndedError as error:
        report.row("compile", "remaining kernels", ok=False, note=str(error))
    note = f"{sum(seconds):.0f} s in all processes, the longest {max(seconds, default=0):.1f} s"
    report.row("compile", f"{len(seconds)} kernels", ms=(time.perf_counter() - started) * 1e3, note=note)
    report.figures["kernels_compiled"] = len(seconds)
