#!/usr/bin/env python
"""Generate the synchronous client, quire_client/sync, from the asyncio client, quire_client/aio.

`--check` only compares and exits with 1 on a difference. transport.py is not generated: the two gRPC stacks differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "client" / "quire_client"
MODULES = ("calls", "client", "stream")
HEADER = "# Generated from quire_client/aio/{name}.py by scripts/gen_sync.py. Edit that file.\n"

# Applied in this order. The last rules rewrite docstrings.
RULES = [
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"import grpc\.aio\n", ""),
    (r"InferenceServiceAsyncStub", "InferenceServiceStub"),
    (r"\bgrpc\.aio\.", "grpc."),
    (r"\bquire_client\.aio\b", "quire_client.sync"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bAwaitable, ", ""),
    (r"\bAsync([A-Z]\w+)", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"for asyncio\. It belongs to one event loop; close it", ". Threads may share it; close it"),
    (r"gateways \.", "gateways."),
    (r"The asyncio client", "The synchronous client"),
    (r"Safe to call after the end", "Safe to call from any thread and after the end"),
]


def sync_source(name: str) -> str:
    """The synchronous form of a module, formatted."""
    source = (PACKAGE / "aio" / f"{name}.py").read_text()
    for pattern, replacement in RULES:
        source = re.sub(pattern, replacement, source)
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        source = _ruff(*command, source=HEADER.format(name=name) + source if command[0] == "check" else source)
    return source


def _ruff(*command: str, source: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    path = str(PACKAGE / "sync" / "module.py")  # for ruff's settings only
    done = subprocess.run(
        [str(ruff), *command, "--stdin-filename", path, "-"],
        input=source,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> int:
    stale = []
    for name in MODULES:
        path, source = PACKAGE / "sync" / f"{name}.py", sync_source(name)
        if path.exists() and path.read_text() == source:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(source)
    if stale and "--check" in sys.argv:
        print(f"quire_client/sync: {', '.join(stale)} differ from quire_client/aio; run scripts/gen_sync.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
