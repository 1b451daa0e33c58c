"""Packages that the processes of a stack load at their start. Heavy ones without use would delay the first token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "safetensors"}
TEXT = {"tokenizers", "jinja2"}
HTTP = {"starlette", "uvicorn"}


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("gateway_svc.server", HEAVY | HTTP | {"numpy", "llguidance"}),
        ("scheduler_svc.server", HEAVY | TEXT | HTTP | {"llguidance"}),
        ("worker_svc.server", HEAVY | TEXT | HTTP | {"redis", "llguidance"}),
        ("worker_svc.engine.model_runner", TEXT | HTTP | {"transformers", "redis", "grpc", "triton"}),
        ("quire_client.cli.up", HEAVY | TEXT | HTTP | {"numpy", "redis"}),
    ],
)
def test_a_process_starts_without_packages_that_it_does_not_need(module: str, not_loaded: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({not_loaded!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([], "")
