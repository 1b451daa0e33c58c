"""The paths of processors, and QUIRE_CPU_PATH."""

from __future__ import annotations

import pytest

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels import build, numerics, paths
from worker_svc.engine.kernels.build import KernelBuildError
from worker_svc.engine.kernels.numerics import cpu_numerics
from worker_svc.engine.kernels.paths import CpuPathError, available_paths, chosen_path, flags_of, known_paths

AVX2 = "fpu avx avx2 fma sse4_1"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512cd avx512_vnni"
AMX = f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8 avx_vnni"


@pytest.fixture
def cpuinfo(tmp_path):
    """A function that writes /proc/cpuinfo of a processor with these instruction sets."""

    def write(words, field="flags"):
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor : 0\n{field}\t: {words}\n")
        return path

    return write


@pytest.mark.parametrize(
    ("machine", "words", "names"),
    [
        ("x86_64", AMX, ["amx", "avx512_bf16", "avx512", "avx2", "generic"]),
        ("x86_64", AVX512, ["avx512", "avx2", "generic"]),
        ("x86_64", AVX2, ["avx2", "generic"]),
        ("x86_64", "fpu sse2", ["generic"]),
        ("aarch64", "fp asimd asimddp bf16 i8mm", ["neon_bf16", "neon"]),
        ("aarch64", "fp asimd", ["neon"]),
        ("riscv64", "", ["generic"]),
    ],
)
def test_paths_of_a_processor(cpuinfo, machine, words, names):
    assert [path.name for path in available_paths(cpuinfo(words), machine)] == names


@pytest.mark.parametrize(
    ("machine", "words", "name", "expected"),
    [
        ("x86_64", AVX2, "avx2", ["-mavx2", "-mfma"]),
        ("x86_64", AMX, "avx2", ["-mavx2", "-mfma", "-mavxvnni"]),
        ("aarch64", "asimd", "neon", ["-march=armv8-a"]),
        ("aarch64", "asimd asimddp bf16 i8mm", "neon", ["-march=armv8-a", "-march=armv8.2-a+dotprod"]),
        ("aarch64", "asimd asimddp bf16 i8mm", "neon_bf16", ["-march=armv8.2-a+dotprod+bf16+i8mm"]),
    ],
)
def test_flags_of_a_path_on_a_processor(cpuinfo, machine, words, name, expected):
    path = next(path for path in known_paths(machine) if path.name == name)
    fastest, plain = flags_of(path, cpuinfo(words, "Features"))
    assert list(fastest) == [*expected, "-mtune=native"]
    assert plain == path.flags


def test_a_path_that_the_processor_lacks_stops_the_worker(cpuinfo, monkeypatch):
    monkeypatch.setenv(paths.PATH_ENV, "amx")
    text = "QUIRE_CPU_PATH = amx: not a path of this processor; set one of avx2, generic"
    with pytest.raises(CpuPathError, match=text):
        chosen_path(cpuinfo(AVX2), "x86_64")
    monkeypatch.setenv(paths.PATH_ENV, "vfp")
    with pytest.raises(BackendUnavailableError, match="QUIRE_CPU_PATH = vfp: not a path of this processor"):
        make_backend("cpu", 1, "exact")


def test_a_path_that_cannot_be_compiled_stops_the_worker(monkeypatch):
    """Plain torch would serve, but with other bits than those of the chosen path."""
    monkeypatch.setenv(paths.PATH_ENV, available_paths()[-1].name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailableError, match=r"QUIRE_CPU_PATH = \w+: no C\+\+ compiler found"):
        make_backend("cpu", 1, "exact")


class Kernels:
    def __init__(self, error, is_as_specified):
        self.quire_permit_tiles = lambda: error
        self.quire_verify_matrices = lambda: is_as_specified


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (Kernels(1, 1), "the system does not permit AMX to this process"),
        (Kernels(0, 0), "this processor rounds BFMMLA in another way than Arm specifies"),
    ],
)
def test_a_path_that_the_system_refuses_is_an_error(monkeypatch, kernels, text):
    monkeypatch.setattr(build, "_load_first", lambda flag_sets, sources: kernels)
    with pytest.raises(KernelBuildError, match=text):
        build.load_kernels_of(available_paths()[0])


def test_workers_on_one_chosen_path_are_of_one_kind_whatever_else_their_processors_have(cpuinfo, monkeypatch):
    monkeypatch.setattr(numerics.platform, "machine", lambda: "x86_64")
    kinds = {cpu_numerics("cpu", "fma avx2", cpuinfo(words)) for words in (AVX2, AVX512, AMX)}
    assert len(kinds) == 3
    monkeypatch.setenv(paths.PATH_ENV, "avx2")
    kinds = {cpu_numerics("cpu", "fma avx2", cpuinfo(words)) for words in (AVX2, AVX512, AMX)}
    assert kinds == {"cpu, x86_64 avx2, fma avx2"}
    assert "amx_tile" in cpu_numerics("reference", "exact", cpuinfo(AMX))
