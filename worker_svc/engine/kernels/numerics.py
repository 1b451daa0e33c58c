"""The kind and the build of a worker. Besides the model and its settings, the bits of results depend on them.

In exact mode a sequence can move to another worker only if both are of the same kind. The kind is therefore part of the
revision, and a scheduler refuses workers of another kind. Builds differ during every upgrade: schedulers only log that.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import xxhash

from worker_svc.engine.kernels.machine import CPUINFO, instruction_sets
from worker_svc.engine.kernels.paths import chosen_path

# Instruction sets with which our kernels, oneDNN or the C library may compute differently.
INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
BUILT_FROM = ("torch", "triton")
SOURCES = Path(__file__).parents[1]  # the whole engine
GPU_SOURCES = (SOURCES / "gpu" / "kernels", SOURCES / "gpu" / "attention" / "tiles.py")


def cpu_numerics(backend: str, arithmetic: str, cpuinfo: Path = CPUINFO, formats: Collection[str] = ()) -> str:
    """The numerics of a CPU worker. `arithmetic` names the instruction sets that its backend uses: kernels may be
    compiled for fewer instruction sets than the processor has. If QUIRE_CPU_PATH chose a path, only the sets of this
    path count, so workers on different processors can be of the same kind. `formats`: of weights that are multiplied as
    they are stored."""
    path = chosen_path(cpuinfo) if backend == "cpu" else None
    found = instruction_sets(cpuinfo) if path is None else frozenset(path.sets)
    sets = [name for name in INSTRUCTION_SETS if name in found]
    weights = [f"{name} weights" for name in sorted(formats)]
    return ", ".join((backend, " ".join((platform.machine(), *sets)), arithmetic, *weights))


def device_numerics(
    backend: str,
    device: torch.device,
    num_ranks: int,
    formats: Collection[str] = (),
    in_torch: Collection[str] = (),
    *,
    is_compiled: bool = True,
    has_one_tile: bool = False,
) -> str:
    """The kind of a GPU worker. Ranks sum partial results, so their number changes roundings. `formats`: of
    quantized weights that are multiplied as they are stored. `in_torch`: kernels that plain torch replaces.
    `is_compiled`: whether others are left. `has_one_tile`: of linear layers, for every number of rows."""
    kind, compiled = "cpu" if in_torch else "interpreted", list[str]()
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"sm_{major}{minor}"
        compiled = [gpu_compiler(10 * major + minor)] if is_compiled else []
    weights = [f"{name} weights" for name in sorted(formats)]
    replaced = ["one tile"] if has_one_tile else []
    replaced += [f"torch {torch.__version__}", f"torch for {' '.join(in_torch)}"] if in_torch else []
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return ", ".join((backend, kind, *compiled, ranks, *weights, *replaced))


def torch_numerics(device: torch.device) -> str:
    """What fixes the order of torch's own operations on a device."""
    kind = "cpu"
    if device.type == "cuda":
        kind = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return f"cuda/torch, {kind}, torch {torch.__version__}"


@cache
def gpu_compiler(capability: int) -> str:
    """What fixes the order of a GPU kernel's operations: the compilers, and the sources of kernels and tile sizes.
    `capability`: 90 for sm_90.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version

    found = re.search(r"V(\d[\d.]*)", get_ptxas_version(capability))
    sources = (path for root in GPU_SOURCES for path in (root.rglob("*.py") if root.is_dir() else (root,)))
    ptxas = found.group(1) if found else "unknown"
    return f"triton {_version('triton')} ptxas {ptxas} kernels {_digest(sources)}"


@cache
def build() -> str:
    """A digest of the engine's sources, and the versions of the libraries that compile or run it."""
    sources = (path for kind in ("*.py", "*.cpp", "*.h") for path in SOURCES.rglob(kind))
    return " ".join((f"engine-{_digest(sources)}", *(f"{name}-{_version(name)}" for name in BUILT_FROM)))


def _digest(paths: Iterable[Path]) -> str:
    digest = xxhash.xxh3_64()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
