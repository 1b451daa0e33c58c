"""Code that only a GPU reaches: its calls match the signatures in torch, and a failed capture is reported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.gpu.report import Report
from worker_svc.engine.gpu.step.graphs import CudaRecorder, GraphError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted(ROOT.glob("worker_svc/engine/gpu/**/*.py")), *sorted(ROOT.glob("bench/gpu/*.py"))]
MODULES = {"torch.cuda": torch.cuda, "dist": dist}


def calls_of(path: Path) -> Iterator[tuple[object, str, ast.Call]]:
    """Calls of torch.cuda.* and dist.*, and the functions that they call."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        for prefix, module in MODULES.items():
            if name.startswith(f"{prefix}."):
                yield reduce(getattr, name.removeprefix(f"{prefix}.").split("."), module), name, node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_calls_match_signatures(path):
    for function, name, call in calls_of(path):
        try:
            signature = inspect.signature(function)
        except ValueError:  # a C++ function without a signature: it exists
            continue
        assert not any(isinstance(argument, ast.Starred) for argument in call.args), name
        signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


class Memory:
    """Device memory. Memory that a step frees stays in the cache until the cache is emptied."""

    def __init__(self) -> None:
        self.free, self.cached = 1000, 0

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    def take(self, held: int, cached: int) -> None:
        self.free, self.cached = self.free - held - cached, self.cached + cached


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: FakeEvent) -> float:
        return 3.0


@pytest.fixture
def cuda(monkeypatch):
    """Replaces torch.cuda; a failed capture ends as CUDA's does. Returns the streams that were set, and the memory."""
    streams, memory = [], Memory()

    @contextmanager
    def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        try:
            yield
        except BaseException:
            streams.append("capturing")
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    fakes = {
        "graph": graph, "CUDAGraph": type("FakeGraph", (), {"replay": lambda self: None}), "Event": FakeEvent,
        "graph_pool_handle": lambda: (0, 1), "mem_get_info": lambda device: (memory.free, 1000),
        "synchronize": lambda device=None: None, "empty_cache": memory.empty_cache,
        "current_stream": lambda device: "launching", "set_stream": streams.append,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return streams, memory


def test_a_failed_capture_names_its_cause_and_restores_the_stream(cuda):
    def step() -> None:
        raise RuntimeError("a host sync in a step")

    with pytest.raises(GraphError, match="cannot be recorded: a host sync in a step"):
        CudaRecorder(torch.device("cuda", 0)).record(step)
    assert cuda[0] == ["capturing", "launching"]


def test_cached_memory_does_not_count_as_memory_of_graphs(cuda):
    _, memory = cuda
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.record(lambda: memory.take(held=30, cached=0))
    memory.take(held=0, cached=500)  # a large eager step
    assert recorder.bytes_taken() == 30
    recorder.record(lambda: memory.take(held=20, cached=0))
    assert recorder.bytes_taken() == 50


def test_the_benchmark_measures_replays(cuda):
    calls = []
    assert Report(is_smoke=False).time_ms([lambda: calls.append(1), lambda: calls.append(2)]) == 1.5
    assert calls == [1, 2, 1, 2]  # once to compile, once to record
