"""Checks for what Triton needs to compile its launcher: a C compiler and Python's headers. Without them every section
would fail with its own error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

VENDOR = Path(__file__).resolve().parent / "vendor"  # filled by bench/gpu/pack
PEERS, BUILT = "peers", "built"  # a folder of the state; a file that names where a package is imported from
SOURCE = "#include <Python.h>\nint quire_has_headers(void) { return PY_VERSION_HEX != 0; }\n"


def prepare_toolchain(vendor: Path = VENDOR) -> str:
    """The compiler to use. A packed compiler and packed headers replace missing ones. Exits with a remedy if there is
    none."""
    scheme = sysconfig.get_default_scheme().replace(
        "posix_local", "posix_prefix"
    )  # the scheme that Triton uses on Debian
    headers = Path(sysconfig.get_paths(scheme)["include"])
    packed = vendor / "include" / headers.name
    if not (headers / "Python.h").exists() and (packed / "Python.h").exists():
        places = str(packed), str(packed.parent), os.environ.get("CPATH")
        os.environ["CPATH"] = os.pathsep.join(filter(None, places))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None and (vendor / "cc").exists():
        compiler = os.environ["CC"] = str(vendor / "cc")
    if compiler is None:
        sys.exit("Triton needs a C compiler: neither gcc nor clang was found, and CC is not set. "
                 "Install one, or pack one on a machine with a network: bench/gpu/pack VERSION --compiler")  # fmt: skip
    complaint = _complaint(compiler, headers)
    if complaint:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(f"Triton cannot compile its launcher: {compiler} does not compile a file that includes Python.h from "
                 f"{headers}. Install python{version}-dev, or run bench/gpu/pack where it is installed. "
                 f"Its error: {complaint}")  # fmt: skip
    return compiler


def use_peers(state: Path) -> None:
    """Libraries and engines that the section `peers` has built are imported from now on, also by processes that this
    one starts."""
    found = [file.read_text() for file in sorted((state / PEERS).glob(f"*/{BUILT}"))]
    sys.path[:0] = found
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")])


def _complaint(compiler: str, headers: Path) -> str:
    """The end of the compiler's error for a small file; empty if it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.c"
        source.write_text(SOURCE)
        command = [compiler, source, "-shared", "-fPIC", "-o", f"{folder}/try.so", f"-I{headers}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError as error:
            return str(error)
    return done.stderr.strip()[-400:] or f"exit code {done.returncode}" if done.returncode else ""
