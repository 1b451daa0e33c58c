"""Runs the engine's launches without a GPU: through Triton's compiler for sm_90 into a driver that launches nothing.

It finds errors that neither the interpreter nor `aot` finds: call sites whose types do not compile, grids and shared
memory beyond the limits, kernels that are first compiled during graph recording or for a request, and kernels that are
launched with other types than they were compiled for in parallel.

    python -m bench.gpu.dry_run            # without TRITON_INTERPRET; a line per kind of worker, then a line of JSON
    python -m bench.gpu.dry_run --short    # the first kind only
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from bench.gpu import model
from bench.gpu.report import Report
from bench.lora import make_adapter
from prefix_index.hashing import content_ids, input_digest
from request_fields.fields import SamplingParams
from step_protocol.messages import RowOpen, StepBatch, TokenRules
from step_protocol.types import CarriedInput, Pooling, PoolingKind, PoolingTask, RowErrorCode
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu import check, loading, runner
from worker_svc.engine.gpu.kernels.forms import Forms
from worker_svc.engine.gpu.kernels.linears import linear
from worker_svc.engine.gpu.start import compilation, memory, setup

KINDS: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "max_adapters": 2},
    {"dtype": "bfloat16", "determinism": "exact"},
    {"dtype": "float16", "kv_cache_dtype": "fp8", "quantize": "fp8"},
    {"dtype": "bfloat16", "block_size": 16, "cuda_graphs": "lazy", "max_num_seqs": 300},
]
SETTINGS: dict[str, Any] = {
    "backend": "cuda", "block_size": 256, "num_blocks": 40, "max_num_seqs": 9, "max_num_batched_tokens": 256,
    "max_model_len": 4608, "determinism": "best_effort", "cuda_graph_tokens": 256,
}  # fmt: skip
SHAPE = {"num_hidden_layers": 1, "vocab_size": 9000, "hidden_size": 256, "intermediate_size": 512}
FILTERED = SamplingParams(0.8, 5, 0.9, 0.1, 7)
PLAIN = SamplingParams(0.0, 0, 1.0, 0.0, 0)
PROCESSED = SamplingParams(0.8, 5, 0.9, 0.1, 7, repetition_penalty=1.2, frequency_penalty=0.5)
RULES = TokenRules(bad_words=(np.array([3, 4], np.uint32),))
SHARED_BYTES, MAX_GRID_Y = 227 * 1024, 65_535


class Device:
    """A fake Triton driver. `loaded` lists the kernels in the order of their first launch."""

    def __init__(self, capability: int = 90) -> None:
        self.loaded: list[str] = []
        self.capability = capability
        self.utils = self
        self.launcher_cls = Launcher

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "max_num_regs": 65_536, "warpSize": 32}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Launcher:
    """Accepts a launch and checks its grid."""

    def __init__(self, source: object, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, x: int, y: int, z: int, *_: object) -> None:
        if not (0 < x < 2**31 and 0 < y <= MAX_GRID_Y and z == 1):
            raise RuntimeError(f"{self._name} is launched on a grid of {x} x {y} x {z}, which is beyond the limits")


class Recorder:
    """Runs a step as its recording would, and collects the kernels that this compiles."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.compiled: list[str] = []

    def record(self, step: Callable[[], None], *, while_serving: bool = False) -> Callable[[], None]:
        before = len(self._device.loaded)
        step()
        self.compiled += self._device.loaded[before:]
        return step

    def bytes_taken(self) -> int:
        return 0


def measure(config: EngineConfig, compute: Any, device: torch.device) -> tuple[int, int]:
    """Launches the steps that are measured to size the pool."""
    compute.warm_up(config.max_num_batched_tokens)
    for bucket in memory._largest(compute.buckets()):
        compute.run_empty(bucket)
    return 0, 1


def launch_alone(
    start: check.StartCheck, chosen: Forms, *, launch: Any = check.StartCheck._depends_on_other_rows
) -> bool:
    launch(start, chosen)
    return False


@contextmanager
def without_gpu(recorder: Recorder) -> Iterator[None]:
    """Engines that are made here start as on a GPU."""
    with (
        mock.patch.object(runner, "find_device", return_value=torch.device("cpu")),
        mock.patch.object(setup, "choose_dtype", lambda config, *_: config.dtype),
        mock.patch.object(loading, "make_recorder", return_value=recorder),
        mock.patch.object(memory, "_measure", measure),
        mock.patch.object(setup.Setup, "is_compiled", True),
        mock.patch.object(linear, "is_on_gpu", return_value=True),
        mock.patch.object(check.Comparison, "call", Forms.call),  # nothing is computed, so nothing is compared
        mock.patch.object(check.StartCheck, "_depends_on_other_rows", launch_alone),
    ):
        yield


def run(kind: dict[str, Any], folder: Path, device: Device) -> dict[str, Any]:
    """Counts the kernels that a worker of this kind loads at start-up and those among them that processes compiled, and
    names those that are compiled later."""
    before, recorder, in_processes = len(device.loaded), Recorder(device), counting_compilations()
    with without_gpu(recorder), compiling() as by_launches, in_processes as ahead:
        engine = runner.DeviceRunner(EngineConfig(folder, **(SETTINGS | kind)))
    at_start = len(device.loaded)
    with without_gpu(recorder):
        take_steps(engine)
    return {
        "kernels": at_start - before, "in_processes": sum(len(call.args[0]) for call in ahead.call_args_list),
        "by_launches": by_launches, "while_recording": recorder.compiled, "by_requests": device.loaded[at_start:],
        "graphs": engine._compute.num_graphs,
    }  # fmt: skip


def counting_compilations() -> Any:
    """Records the calls that compile kernels in processes."""
    return mock.patch.object(compilation, "compile_in_processes", wraps=compilation.compile_in_processes)


@contextmanager
def compiling() -> Iterator[list[str]]:
    """The list gets the kernels that this process compiles."""
    names: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            names.append(src.name)

    with mock.patch.object(triton.knobs.compilation, "listener", listen):
        yield names


def take_steps(engine: runner.DeviceRunner) -> None:
    """Chunks, a mixed step, a decode step, and steps of single rows: with every filter, with penalties and a bad word,
    a beam, pooled rows, and a row with embeddings. If the engine serves adapters, the first steps again with some."""
    for adapters in ([b""], *([place_adapters(engine)] if engine.adapters is not None else [])):
        fields = [{"adapter": adapters[row % len(adapters)]} for row in range(3)]
        rows = model.Rows(engine, [[3] * count for count in (40, 7, 1)], room=8, fields=fields)
        for counts in ({0: 30, 1: 7}, {0: 10, 2: 1, 1: 1}, {0: 1, 1: 1, 2: 1}):
            rows.launch(counts).result()
    block = engine.info.num_blocks - 1
    prompt, table = np.full(6, 3, np.uint32), np.array([block], np.uint32)
    slots = (block * engine.info.block_size + np.arange(6)).astype(np.uint32)
    length, context = (np.array([number], np.uint32) for number in (6, 0))
    for step, fields in enumerate(_single_rows(engine.info.hidden_size), 4):
        row = np.array([5 + step % 2], np.uint32)
        opened = RowOpen(**({"sampling": PLAIN, "token_ids": prompt, "row": int(row[0]), "prompt_len": 6,
                             "block_table": table, "num_computed_tokens": 0, "sample_index": 0} | fields))  # fmt: skip
        samples = np.array([opened.pooling is None])
        output = engine.launch(
            StepBatch(step, row, length, context, samples, slots, close_rows=11 - row, opens=[opened])
        ).result()
        if any(error.code is not RowErrorCode.NAN for error in output.errors):  # nothing is computed
            raise RuntimeError(str(output.errors[0]))


def _single_rows(hidden_size: int) -> list[dict[str, Any]]:
    """One set of special columns for each of the rows."""
    data = bytes(6 * hidden_size * 4)
    digest = input_digest("embeddings", "float32", (6, hidden_size), data)
    item = CarriedInput("embeddings", digest, 0, 6, "float32", (6, hidden_size), data)
    return [
        {"sampling": FILTERED},
        {"sampling": PROCESSED, "rules": RULES},
        {"num_candidates": 3},
        {"pooling": Pooling(PoolingTask.VECTOR, PoolingKind.MEAN)},
        {"pooling": Pooling(PoolingTask.LOGITS, token_ids=np.array([3, 5], np.uint32))},
        {"inputs": (item,), "token_ids": np.frombuffer(content_ids(digest, 6), "<u4")},
    ]


def place_adapters(engine: runner.DeviceRunner) -> list[bytes]:
    """An adapter, and none."""
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        shape = model.QWEN3_06B | {"num_hidden_layers": 1}  # equals the layers in the checkpoint of a dry run
        path = make_adapter(Path(folder) / "adapter", shape, 8, 0)
        digests.append(engine.adapters.load("one", path).digest)
    engine.adapters.swap(digests[0])
    return [*digests, b""]


def main() -> None:
    device = Device()
    driver.set_active(device)
    found = []
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(model.QWEN3_06B, SHAPE):
        report = Report(is_smoke=False, scratch=Path(scratch))
        report.device = torch.device("cpu")
        folder = model.make_checkpoint(report)
        for kind in KINDS[:1] if "--short" in sys.argv else KINDS:
            found.append(kind | run(kind, folder, device))
            print(found[-1], flush=True)
    print(json.dumps(found))
    sys.exit(any(kind["by_launches"] or kind["while_recording"] or kind["by_requests"] for kind in found))


if __name__ == "__main__":
    main()
