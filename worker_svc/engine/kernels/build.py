"""Compiles the kernels once per source, compiler and processor, and loads them with ctypes.

The library leaves OpenMP's symbols undefined on purpose. They are bound to the OpenMP runtime that torch has loaded, so
that kernels and oneDNN run on one pool of threads; two runtimes would each keep spinning threads on the same cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "cpu.cpp", "forward.cpp", "linear.cpp"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("kernels.h", "vec.h"))
ABI_VERSION = 5
COMPILE_TIMEOUT_S = 300

# Sums keep their order and a multiply-add is fused only where the source says so: results must not depend on how a
# loop was unrolled or inlined. The last two drop errno and trap bookkeeping, which changes no result.
STRICT_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")


class KernelBuildError(RuntimeError):
    """No usable compiled kernels; the message says why."""


def load_kernels() -> ctypes.CDLL:
    """The kernels as a loaded library, compiled first if this machine has no fitting copy yet.

    Raises KernelBuildError when there is no compiler or it fails.
    """
    compiler = _find_compiler()
    runtime = _find_openmp_runtime()
    failures = []
    for flags in _flag_sets(runtime is not None):
        try:
            library = _load(_build(compiler, flags), runtime)
        except KernelBuildError as error:
            failures.append(f"{' '.join(flags)}: {error}")
            continue
        if runtime is not None and "-fopenmp" not in flags:
            logger.warning("CPU kernels run on one thread: %s does not fit %s; g++ does", compiler, runtime)
        return library
    raise KernelBuildError(f"{compiler} could not build the CPU kernels; " + "; ".join(failures))


def cache_dir() -> Path:
    """Where compiled kernels are kept: QUIRE_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("QUIRE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def _find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    looked_for = named or "g++, c++ or clang++"
    raise KernelBuildError(f"no C++ compiler found ({looked_for}); install one, e.g. `apt-get install g++`")


def _find_openmp_runtime() -> str | None:
    """Path of the OpenMP library that torch brought into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") and len(line.split()) > 5}
    found = sorted(p for p in paths if Path(p).name.startswith(("libgomp", "libiomp5", "libomp")))
    in_torch = [p for p in found if "torch" in p]
    return next(iter(in_torch or found), None)


def _flag_sets(has_openmp: bool) -> list[tuple[str, ...]]:
    """Best first; the last ones make do with less."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    native = ("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)
    openmp = ("-fopenmp",) if has_openmp else ()
    choices = [(*STRICT_FLAGS, *native, *openmp), (*STRICT_FLAGS, *native[:1], *openmp), (*STRICT_FLAGS, *native[:1])]
    return list(dict.fromkeys([*choices, STRICT_FLAGS]))


def _build(compiler: str, flags: tuple[str, ...]) -> Path:
    target = cache_dir() / f"cpu_kernels_{_build_key(compiler, flags)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=target.parent, prefix="build_")
    except OSError as error:
        raise KernelBuildError(f"cannot write to {target.parent} ({error}); set QUIRE_CACHE_DIR") from error
    try:
        logger.info("compiling CPU kernels with %s into %s", compiler, target)
        library = Path(scratch, "cpu.so")
        objects = [Path(scratch, source.name).with_suffix(".o") for source in SOURCES]
        for source, target_object in zip(SOURCES, objects, strict=True):
            _run([compiler, *flags, "-c", str(source), "-o", str(target_object)])
        undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
        _run([compiler, "-shared", *undefined, *map(str, objects), "-o", str(library)])
        os.replace(library, target)  # processes that build at the same time put the same file there
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _build_key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    parts = [*texts, compiler, version, " ".join(flags), platform.machine(), _cpu_features()]
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def _cpu_features() -> str:
    """What -march=native depends on, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(str(error)) from error
    if done.returncode != 0:
        raise KernelBuildError(done.stderr.strip()[-500:] or f"exit status {done.returncode}")


def _load(path: Path, runtime: str | None) -> ctypes.CDLL:
    try:
        if runtime is not None:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        version = int(library.quire_abi_version())
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} does not load: {error}") from error
    if version != ABI_VERSION:
        raise KernelBuildError(f"{path} has ABI {version}, this build expects {ABI_VERSION}")
    return library
