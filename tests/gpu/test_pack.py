"""bench/gpu/pack collects every package that the services import and that the GPU machine may lack."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
PACKAGES = [ROOT / path for path in SETTINGS["hatch"]["build"]["targets"]["wheel"]["packages"]]
OWN = {path.name for path in PACKAGES}
ON_THE_MACHINE = {"torch", "triton", "numpy", "safetensors", "tokenizers"}  # safetensors, tokenizers: by transformers
ONLY_IF_ASKED_FOR = {"opentelemetry", "av"}  # imported with --trace-endpoint, and to decode speech
MODULES = {
    "protobuf": "google", "googleapis-common-protos": "google", "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection",
}  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """Packages that a module imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def packed() -> set[str]:
    script = (ROOT / "bench/gpu/pack").read_text()
    command = next(part for part in script.split("\n\n") + script.split("\npython ") if "'grpcio>=" in part)
    names = re.findall(r"(?<=[ '])([a-z][\w-]*)(?=[>' ][=']|$)", command, re.M)
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def test_all_imports_are_packed():
    needed = {name for root in PACKAGES for path in root.rglob("*.py") for name in imported(path)}
    needed -= OWN | set(sys.stdlib_module_names) | ON_THE_MACHINE | ONLY_IF_ASKED_FOR
    assert {"grpc", "llguidance", "starlette", "redis"} <= needed
    assert needed - packed() == set()
