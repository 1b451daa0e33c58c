"""What Triton needs of the machine to compile its launcher: a C compiler and Python's headers. Asked for first, because
every section would fail without, each in its own words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

VENDOR = Path(__file__).resolve().parent / "vendor"  # filled by bench/gpu/pack
SOURCE = "#include <Python.h>\nint quire_has_headers(void) { return PY_VERSION_HEX != 0; }\n"


def prepare_toolchain(vendor: Path = VENDOR) -> str:
    """Which compiler serves; the packed compiler and headers fill in what is missing. Exits with what to do if nothing
    does."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton asks on Debian
    headers = Path(sysconfig.get_paths(scheme)["include"])
    packed = vendor / "include" / headers.name
    if not (headers / "Python.h").exists() and (packed / "Python.h").exists():
        places = str(packed), str(packed.parent), os.environ.get("CPATH")
        os.environ["CPATH"] = os.pathsep.join(filter(None, places))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None and (vendor / "cc").exists():
        compiler = os.environ["CC"] = str(vendor / "cc")
    if compiler is None:
        sys.exit("Triton needs a C compiler: there is no gcc and no clang, and CC is not set. "
                 "Install one, or pack one on a machine with a network: bench/gpu/pack VERSION --compiler")  # fmt: skip
    complaint = _complaint(compiler, headers)
    if complaint:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(f"Triton cannot compile its launcher: {compiler} does not compile a file that includes Python.h of "
                 f"{headers}. Install python{version}-dev, or pack where python{version} has its headers. "
                 f"It said: {complaint}")  # fmt: skip
    return compiler


def _complaint(compiler: str, headers: Path) -> str:
    """The compiler's last words about a small file; empty if it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.c"
        source.write_text(SOURCE)
        command = [compiler, source, "-shared", "-fPIC", "-o", f"{folder}/try.so", f"-I{headers}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError as error:
            return str(error)
    return done.stderr.strip()[-400:] or f"exit code {done.returncode}" if done.returncode else ""
