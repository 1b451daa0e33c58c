"""Unmodified clients against the HTTP and gRPC APIs, each a program in the environment of scripts/install_clients."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from quire_client.demo import demo_model_dir

from tests.clients.conftest import MODEL
from tests.processes.stack import ROOT

PYTHON = ROOT / os.environ.get("CLIENTS_VENV", ".clients") / "bin/python"
OVER_GRPC = ("smg_router", "triton_grpc")
NOT_HERE = 77  # the exit code of a program whose client does not run with this Python
PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist; run scripts/install_clients .venv/bin"),
]


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_a_client(addresses: tuple[str, str], weights_dir: Path, program: str) -> None:
    command = [PYTHON, PROGRAMS / f"{program}.py", addresses[program in OVER_GRPC], MODEL]
    if program == "lm_eval_scores" or program.endswith("_rollouts"):
        command.append(demo_model_dir())
    if program.endswith("_rollouts"):
        command.append(weights_dir)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    if done.returncode == NOT_HERE:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
