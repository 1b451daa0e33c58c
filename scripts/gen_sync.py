#!/usr/bin/env python
"""Generate the synchronous client, quire_client/sync, from the asyncio client, quire_client/aio.

The build hook, developers and CI all call this script. transport.py is not generated: the two gRPC stacks differ.
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "client" / "quire_client"
MODULES = ("client", "session", "stream", "turn_log")
HEADER = "# Generated from quire_client/aio/{name}.py by scripts/gen_sync.py. Edit that file.\n"

# Applied in this order. The last rules rewrite docstrings.
RULES = [
    (r"\basync (def|with|for)\b", r"\1"), (r"\bawait ", ""), (r"import grpc\.aio\n", ""),
    (r"InferenceServiceAsyncStub", "InferenceServiceStub"), (r"\bgrpc\.aio\.", "grpc."),
    (r"\bquire_client\.aio\b", "quire_client.sync"), (r"\bAwaitable\[(\w+)\]", r"\1"), (r"\bAwaitable, ", ""),
    (r"\bAsync([A-Z]\w+)", r"\1"), (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"for asyncio\. It belongs to one event loop; close it", ". Threads may share it; close it"),
    (r"gateways \.", "gateways."), (r"The asyncio client", "The synchronous client"),
    (r"Safe to call after the end", "Safe to call from any thread and after the end"),
]  # fmt: skip


def sync_source(name: str) -> str:
    """The synchronous form of a module."""
    source = (PACKAGE / "aio" / f"{name}.py").read_text()
    for pattern, replacement in RULES:
        source = re.sub(pattern, replacement, source)
    return HEADER.format(name=name) + source


if __name__ == "__main__":
    for name in MODULES:
        path, source = PACKAGE / "sync" / f"{name}.py", sync_source(name)
        if not path.exists() or path.read_text() != source:
            path.write_text(source)
            print(f"generated {path}")
    for path in (PACKAGE / "sync").glob("*.py"):
        if path.stem not in MODULES and path.read_text().startswith("# Generated from"):
            path.unlink()  # its source has moved; type checkers would still read it
