"""Packages that the processes of a stack load at their start. Heavy ones without use would delay the first token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svc_common import OLDER_POLLER

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "safetensors"}
TEXT = {"tokenizers", "jinja2"}
HTTP = {"starlette", "uvicorn"}


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("gateway_svc.service", HEAVY | HTTP | {"numpy", "redis", "llguidance"}),
        ("scheduler_svc.service", HEAVY | TEXT | HTTP | {"redis", "llguidance"}),
        ("worker_svc.service", HEAVY | TEXT | HTTP | {"redis", "llguidance"}),
        ("worker_svc.engine.model_runner", TEXT | HTTP | {"transformers", "redis", "grpc", "triton"}),
        ("quire_cli.commands.up", HEAVY | TEXT | HTTP | {"numpy", "redis"}),
    ],
)
def test_a_process_starts_without_packages_that_it_does_not_need(module: str, not_loaded: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({not_loaded!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize("module", ["gateway_svc.service", "scheduler_svc.service", "worker_svc.service"])
def test_a_service_selects_the_poller_before_it_imports_grpc(module: str) -> None:
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_EXPERIMENTS'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"import {module}"
    )
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert (done.stdout.split(), done.stderr) == ([OLDER_POLLER], "")
