"""Compilation in parallel processes: its bounds and its failures. test_aot.py covers its results."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from triton.backends.compiler import GPUTarget

from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import activation
from worker_svc.engine.gpu.start import compilation


@pytest.fixture
def gpu(monkeypatch):
    """A target to compile for. The child process interprets kernels, as this one does, so it compiles none."""
    active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(compilation, "driver", SimpleNamespace(active=active))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def launch_of(module, name="activation_kernel"):
    return SimpleNamespace(kernel=SimpleNamespace(module=module), name=name, specialization="{}")


def test_a_kernel_that_does_not_compile_is_named(gpu, caplog):
    caplog.set_level(logging.INFO)
    compilation.compile_in_processes([launch_of(activation.__name__)] * 2, 2)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0].startswith("activation_kernel is not compiled ahead of its launch: AttributeError")
    assert "compiling 2 kernels in 2 processes" in caplog.text


def test_a_process_that_ends_early_is_reported(gpu, caplog):
    compilation.compile_in_processes([launch_of("worker_svc.no_such_module")], 1)
    assert "exited with code 1 after 0 of 1; the others are compiled at their first launch" in caplog.text


def test_the_interpreter_compiles_nothing():
    assert compilation.compile_first([lambda: pytest.fail("launched")], Group()) == 0


def test_nothing_is_launched_while_launches_are_collected(monkeypatch):
    """Not even kernels that are loaded: they would read what the others should have written."""

    class Function:
        def run(self, *args, grid, warmup):
            return warmup

    monkeypatch.setattr(compilation, "JITFunction", Function)
    with compilation.collecting():
        assert Function().run(1, grid=(1,), warmup=False)
    assert not Function().run(1, grid=(1,), warmup=False)


@pytest.mark.parametrize(("kernels", "cores", "gib", "expected"), [
    (40, 16, 64, 16), (3, 16, 64, 3), (40, 16, 4, 4), (40, 16, 0, 1),
])  # fmt: skip
def test_processes_are_bounded_by_kernels_cores_and_memory(monkeypatch, kernels, cores, gib, expected):
    monkeypatch.setattr(compilation, "available_cores", lambda: cores)
    monkeypatch.setattr(compilation, "available_memory", lambda: gib << 30)
    assert compilation.num_processes(kernels) == expected


class OtherRank(Group):
    """Rank 1 of 2, which notes when it waits for rank 0."""

    def __init__(self, events, local_rank=None):
        super().__init__(1, 2, local_rank=local_rank)
        self._events = events

    def all_reduce_min(self, value):
        self._events.append("wait")
        return value


def test_other_ranks_compile_what_the_first_rank_left(monkeypatch):
    events = []
    monkeypatch.setattr(compilation.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(compilation, "_compile_missing", lambda launches: events.append("compile") or 3)
    assert compilation.compile_first([lambda: events.append("step"), lambda: 1 / 0], OtherRank(events)) == 3
    assert events == ["step", "wait", "compile"]
    assert compilation.triton.knobs.runtime.jit_cache_hook is None


def test_the_first_rank_of_another_host_does_not_wait_to_compile(monkeypatch):
    events = []
    monkeypatch.setattr(compilation.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(compilation, "_compile_missing", lambda launches: events.append("compile") or 3)
    assert compilation.compile_first([], OtherRank(events, local_rank=0)) == 3
    assert events == ["compile", "wait"]
