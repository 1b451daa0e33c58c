#!/usr/bin/env python
"""Generate the gRPC stubs beside their .proto files, and the dataclasses that repeat messages (gen_types.py).

The build hook, developers and CI all call this script. It generates no stubs if they are newer than the protos and this
script, except with `--force`.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import resources
from pathlib import Path

import gen_types

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "protos"


def proto_files() -> list[Path]:
    return sorted(PROTO_ROOT.glob("quire/**/*.proto"))


def is_fresh() -> bool:
    sources = [*proto_files(), Path(__file__)]
    stubs = [p.with_name(p.stem + suffix) for p in proto_files() for suffix in ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")]
    if not all(stub.exists() for stub in stubs):
        return False
    return min(s.stat().st_mtime for s in stubs) >= max(s.stat().st_mtime for s in sources)


def find_plugin(name: str) -> str:
    """The plugin beside this Python, else on the PATH: pip's isolated builds install tools elsewhere."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"{name} was not found; run `pip install mypy-protobuf`")
    return found


def generate() -> None:
    from grpc_tools import protoc  # slow to import, and not installed by default

    well_known = str(resources.files("grpc_tools") / "_proto")
    plugins = [f"--plugin={name}={find_plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    out = str(PROTO_ROOT)
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            *plugins,
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *map(str, proto_files()),
        ]
    )
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


if __name__ == "__main__":
    if "--force" in sys.argv or not is_fresh():
        generate()
        print(f"generated stubs for {len(proto_files())} protos in {PROTO_ROOT}")
    gen_types.generate()
