"""The kind and the build that a worker announces."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch

from tests.unit.engine.models import make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu import backend as cpu_backend
from worker_svc.engine.kernels import numerics
from worker_svc.engine.kernels.machine import instruction_sets
from worker_svc.engine.kernels.numerics import build, cpu_numerics, device_numerics, gpu_compiler
from worker_svc.engine.model_runner import ModelRunner


def info_of(folder: Path, **settings: str):
    return ModelRunner(EngineConfig(folder, num_blocks=8, threads=1, **settings)).info


def test_kinds_of_processors_differ_by_their_instruction_sets(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("processor : 0\nflags\t\t: fpu avx2 sse4\n")
    new.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 ibpb\n")
    assert cpu_numerics("cpu", "fma avx2", old).endswith(" avx2, fma avx2")
    assert cpu_numerics("cpu", "fma avx2", new).endswith(" avx2 avx512f avx512_bf16, fma avx2")
    assert cpu_numerics("cpu", "generic", tmp_path / "none").startswith("cpu, ")


def test_kernels_compiled_for_less_announce_another_kind(tmp_path, kernel_builds, monkeypatch):
    folder = make_model(tmp_path, "qwen3", num_hidden_layers=1)
    infos = []
    for name in ("native", "tiles", "avx2", "generic"):
        kernels = kernel_builds(name)
        monkeypatch.setattr(cpu_backend, "load_kernels", lambda kernels=kernels: kernels)
        infos.append(info_of(folder))
    assert [info.numerics.split(", ")[-1] for info in infos][1:] == ["fma tiles avx2", "fma avx2", "generic"]
    if "avx512f" in instruction_sets():
        assert len({info.numerics for info in infos}) == len({info.revision for info in infos}) == 4


def test_a_worker_on_a_chosen_path_announces_nothing_else(tmp_path, kernel_builds, monkeypatch):
    kernels = kernel_builds("avx2")
    monkeypatch.setattr(cpu_backend, "load_kernels", lambda: kernels)
    folder = make_model(tmp_path, "qwen3", num_hidden_layers=1)
    everything = info_of(folder)
    monkeypatch.setenv("QUIRE_CPU_PATH", "avx2")
    chosen = info_of(folder)
    assert chosen.numerics == f"cpu, {platform.machine()} avx2, fma avx2"
    assert (chosen.numerics == everything.numerics) == (chosen.revision == everything.revision)


def test_ranks_are_part_of_the_kind_of_a_gpu_worker(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(numerics, "gpu_compiler", lambda capability: f"compiler of {capability}")
    device = torch.device("cuda", 0)
    kind = "cuda/triton, sm_90, compiler of 90"
    assert device_numerics("cuda/triton", device, 1) == f"{kind}, 1 rank"
    assert device_numerics("cuda/triton", device, 2) == f"{kind}, 2 ranks"
    assert device_numerics("cuda/triton", device, 1, {"fp8"}) == f"{kind}, 1 rank, fp8 weights"


def test_kernels_that_compile_differently_are_another_kind(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    kernel, tiles = tmp_path / "kernels" / "sampler" / "pick.py", tmp_path / "tiles.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("a")
    tiles.write_text("64")
    monkeypatch.setattr(numerics, "GPU_SOURCES", (tmp_path / "kernels", tiles))
    kinds = [gpu_compiler.__wrapped__(90)]
    assert re.fullmatch(r"triton [\d.]+ ptxas [\d.]+ kernels [0-9a-f]{16}", kinds[0])
    for path in (kernel, tiles):
        path.write_text("b")
        kinds.append(gpu_compiler.__wrapped__(90))
    ptxas = "Cuda compilation tools, release 13.0, V13.0.48"
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas_version", lambda capability: ptxas)
    kinds.append(gpu_compiler.__wrapped__(90))
    assert "ptxas 13.0.48 " in kinds[-1]
    assert len(set(kinds)) == 4


def test_a_build_names_sources_and_libraries():
    assert build().startswith("engine-")
    assert f"torch-{torch.__version__.split('+')[0]}" in build()


@pytest.mark.parametrize(("determinism", "is_same"), [("exact", False), ("best_effort", True)])
def test_exact_revisions_differ_between_kinds_of_workers(tmp_path, determinism, is_same):
    folder = make_model(tmp_path, "qwen3")
    cpu = info_of(folder, backend="cpu", determinism=determinism)
    reference = info_of(folder, backend="reference", determinism=determinism)
    assert (cpu.revision == reference.revision) == is_same
    assert cpu.numerics != reference.numerics
