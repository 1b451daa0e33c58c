"""The paths of a processor: the sets of instructions that the CPU kernels can be compiled for.

A worker takes the fastest path of its processor. QUIRE_CPU_PATH names another one, e.g. the fastest that all processors
of a mixed fleet have: workers on the same path compute the same bits (docs/adr/0017-exact-by-construction.md).
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from worker_svc.engine.kernels.machine import CPUINFO, instruction_sets

PATH_ENV = "QUIRE_CPU_PATH"
NO_TILES, NO_MATRICES = "-DQUIRE_NO_TILES", "-DQUIRE_NO_MATRICES"


class CpuPathError(ValueError):
    """QUIRE_CPU_PATH names no path of this processor."""


@dataclass(frozen=True, slots=True)
class CpuPath:
    """`sets` are the instruction sets that it needs, as /proc/cpuinfo names them; they and nothing else decide the bits
    of results. The compiler also uses those of `extras`, if the processor has them: for int8, whose sums are exact."""

    name: str
    word: str  # of `quire_arithmetic`, by which a build of this path is recognised
    sets: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    extras: tuple[tuple[str, str], ...] = ()  # instruction set and compiler flag


_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_BFLOAT16 = (*_AVX512, "avx512_bf16")
_TILES = (*_BFLOAT16, "amx_tile", "amx_bf16", "amx_int8")
_VNNI = (("avx512_vnni", "-mavx512vnni"), ("avx512f", "-mprefer-vector-width=512"))


def _flags(sets: tuple[str, ...]) -> tuple[str, ...]:
    """Compiler flags for instruction sets of x86."""
    return tuple("-m" + name.replace("avx512_", "avx512").replace("amx_", "amx-") for name in sets)


# By machine, the fastest first. The last one runs on every processor. No -march=armv8.6-a: a Neoverse V1 has the two
# extensions, but is an ARMv8.4 otherwise.
X86_PATHS = (
    CpuPath("amx", "tiles", _TILES, _flags(_TILES), _VNNI),
    CpuPath("avx512_bf16", "bfloat16-pairs", _BFLOAT16, (*_flags(_BFLOAT16), NO_TILES), _VNNI),
    CpuPath("avx512", "avx512f", _AVX512, _flags(_AVX512), _VNNI),
    CpuPath("avx2", "avx2", _AVX2, _flags(_AVX2), (("avx_vnni", "-mavxvnni"),)),
    CpuPath("generic", "generic"),
)
ARM_PATHS = (
    CpuPath("neon_bf16", "bfloat16-matrices", ("bf16", "i8mm"), ("-march=armv8.2-a+dotprod+bf16+i8mm",)),
    CpuPath("neon", "neon", (), ("-march=armv8-a",), (("asimddp", "-march=armv8.2-a+dotprod"),)),
)
OTHER_PATHS = X86_PATHS[-1:]


def known_paths(machine: str | None = None) -> tuple[CpuPath, ...]:
    """The paths of all processors of this architecture."""
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        return X86_PATHS
    return ARM_PATHS if machine in ("aarch64", "arm64") else OTHER_PATHS


def available_paths(cpuinfo: Path = CPUINFO, machine: str | None = None) -> list[CpuPath]:
    """The paths of this processor, the fastest first."""
    found = instruction_sets(cpuinfo)
    return [path for path in known_paths(machine) if found.issuperset(path.sets)]


def chosen_path(cpuinfo: Path = CPUINFO, machine: str | None = None) -> CpuPath | None:
    """The path that QUIRE_CPU_PATH names. Raises CpuPathError if this processor does not have it."""
    name = os.environ.get(PATH_ENV, "")
    if not name:
        return None
    available = {path.name: path for path in available_paths(cpuinfo, machine)}
    if name not in available:
        raise CpuPathError(f"{PATH_ENV} = {name}: not a path of this processor; set one of {', '.join(available)}")
    return available[name]


def flags_of(path: CpuPath, cpuinfo: Path = CPUINFO) -> list[tuple[str, ...]]:
    """Sets of compiler flags of a path for this processor, the fastest first; a compiler may not know all of these."""
    found = instruction_sets(cpuinfo)
    extras = tuple(flag for name, flag in path.extras if name in found)
    return [(*path.flags, *extras, "-mtune=native"), path.flags]


def path_of(arithmetic: str) -> CpuPath:
    """The path of a build, by the words of `quire_arithmetic`."""
    words = arithmetic.split()
    return next(path for path in (*X86_PATHS[:-1], *ARM_PATHS, X86_PATHS[-1]) if path.word in words)
