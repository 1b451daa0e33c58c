"""Compiles the kernels once per source, compiler and processor, and loads them with ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from worker_svc.engine.kernels.binding import declare
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.kernels.paths import NO_MATRICES, NO_TILES, CpuPath, chosen_path, flags_of

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMMON = ("vec.h", "team.h")  # of most sources; they include the headers of intrinsics and threads
ABI_VERSION = 33
COMPILE_TIMEOUT_S = 300

# Sums keep their order, and a multiply-add is fused only where the source says so: results must not depend on how a
# loop was unrolled or inlined. -fno-math-errno and -fno-trapping-math change no result.
STRICT_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-w",
)  # fmt: skip
# What the speed of a path depends on (`quire doctor`). The rest would take most of the time to compile.
LINEAR_SOURCES = tuple(s for s in SOURCES if s.stem in ("cpu", "linear", "matrices", "team", "tiles"))


class KernelBuildError(RuntimeError):
    """No usable compiled kernels; the message says why."""


def load_kernels() -> ctypes.CDLL:
    """The kernels as a loaded library, compiled first if this machine has no matching copy: those of QUIRE_CPU_PATH, or
    the fastest ones that this processor and system run.

    Raises KernelBuildError when there is no compiler or it fails, or the system forbids the chosen path, and
    CpuPathError for a path that this processor does not have.
    """
    if path := chosen_path():
        return load_kernels_of(path)
    if os.environ.get("QUIRE_DISABLE_AMX", "") not in ("", "0"):
        return _load_fastest(NO_TILES)
    library = _load_fastest()
    if error := library.quire_permit_tiles():
        logger.warning("AMX is not used: the system does not permit it to this process (%s)", os.strerror(error))
        return _load_fastest(NO_TILES)
    if not library.quire_verify_matrices():
        logger.warning("BFMMLA is not used: this processor rounds it in another way than Arm specifies")
        return _load_fastest(NO_MATRICES)
    return library


def load_kernels_of(path: CpuPath, sources: tuple[Path, ...] | None = None) -> ctypes.CDLL:
    """The kernels of a path, or those of some `sources` only. Raises KernelBuildError."""
    library = _load_first([(*STRICT_FLAGS, *flags) for flags in flags_of(path)], sources)
    if error := library.quire_permit_tiles():
        raise KernelBuildError(f"the system does not permit AMX to this process ({os.strerror(error)})")
    if not library.quire_verify_matrices():
        raise KernelBuildError("this processor rounds BFMMLA in another way than Arm specifies")
    return library


def _load_fastest(*added: str) -> ctypes.CDLL:
    return _load_first([(*flags, *added) for flags in _flag_sets()])


def _load_first(flag_sets: list[tuple[str, ...]], sources: tuple[Path, ...] | None = None) -> ctypes.CDLL:
    """The kernels with the first flags that the compiler accepts."""
    compiler = _find_compiler()
    failures = []
    for flags in flag_sets:
        try:
            return _load(_build(compiler, flags, sources))
        except KernelBuildError as error:
            failures.append(f"{' '.join(flags)}: {error}")
    raise KernelBuildError(f"{compiler} could not build the CPU kernels; " + "; ".join(failures))


def load_kernels_built_with(*flags: str, sources: tuple[Path, ...] | None = None) -> ctypes.CDLL:
    """Like `load_kernels`, but with these flags instead of those for this processor. Tests use it."""
    return _load(_build(_find_compiler(), (*STRICT_FLAGS, *flags), sources))


def cache_dir() -> Path:
    """The folder of compiled kernels: QUIRE_CACHE_DIR, or the user's cache folder."""
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


def native_flags() -> tuple[str, ...]:
    """Compiler flags for the processor at hand."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return ("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)


def _flag_sets() -> list[tuple[str, ...]]:
    """Sets of compiler flags, the fastest first. If a compiler rejects a set, the next one is used."""
    native = native_flags()
    return list(dict.fromkeys([(*STRICT_FLAGS, *native), (*STRICT_FLAGS, *native[:1]), STRICT_FLAGS]))


def _build(compiler: str, flags: tuple[str, ...], sources: tuple[Path, ...] | None = None) -> Path:
    sources = SOURCES if sources is None else sources
    target = cache_dir() / f"cpu_kernels_{_build_key(compiler, flags, sources)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=target.parent, prefix="build_")
    except OSError as error:
        raise KernelBuildError(
            f"cannot write to {target.parent} ({error}); set QUIRE_CACHE_DIR to a writable folder"
        ) from error
    try:
        with _one_at_a_time(target.parent):
            if not target.exists():
                _compile(compiler, flags, sources, Path(scratch), target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Locks the folder while the block runs, so that workers that start together compile the kernels once. The system
    releases the lock if this process dies. On a file system without locks each worker compiles its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("%s cannot be locked (%s)", folder, error)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, flags: tuple[str, ...], sources: tuple[Path, ...], scratch: Path, target: Path) -> None:
    logger.info("starting: compiling the CPU kernels, once per machine, with %s into %s", compiler, target)
    library = scratch / "cpu.so"
    objects = compile_objects([compiler, *flags], sources, scratch)
    _run([compiler, "-shared", "-pthread", *objects, "-o", str(library)])
    os.replace(library, target)  # atomic


def compile_objects(command: list[str], sources: tuple[Path, ...], scratch: Path) -> list[str]:
    """Compile each source. Reading the headers would take a third of the time, so they are compiled once."""
    headers = scratch / "headers.h"
    headers.write_text("".join(f'#include "{HEADERS[0].parent / name}"\n' for name in COMMON))
    with contextlib.suppress(KernelBuildError):  # without it, the compiler reads them
        _run([*command, "-x", "c++-header", str(headers), "-o", f"{headers}.gch"])

    def compile_one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([*command, "-include", str(headers), "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(compile_one, sources))


def _build_key(compiler: str, flags: tuple[str, ...], sources: tuple[Path, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [path.read_text() for path in (*sources, *HEADERS)]
    parts = [*texts, compiler, version, " ".join(flags), platform.machine(), _cpu_features()]
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def _cpu_features() -> str:
    """The processor features that -march=native depends on, as far as the system reports them."""
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


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.quire_abi_version())
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} does not load: {error}") from error
    if version != ABI_VERSION:
        raise KernelBuildError(f"{path} has ABI {version}, but this build expects {ABI_VERSION}")
    return declare(library)
