"""The training run of examples/grpo.py ends with the same bits when workers and the scheduler are killed meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from quire_client.demo import demo_model_dir

from tests.processes.stack import ROOT, Service, Stack

FLAGS = ("--num-blocks", "96", "--max-num-seqs", "8", "--max-adapters", "2", "--max-num-batched-tokens", "48")


def trained(
    gateway: Service, adapters: Path, updates: int, kills: random.Random | None, services: list[Service]
) -> bytes:
    """The adapter at the end of a run. With `kills`, a service is killed and started again after some updates."""
    command = [sys.executable, ROOT / "examples/grpo.py", adapters, "--target", gateway.address]
    process = subprocess.Popen([*command, "--updates", str(updates)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        lines = [_after(line, kills, services) for line in process.stdout]
    assert (process.returncode, len(lines)) == (0, updates)
    return (adapters / "final" / "adapter_model.safetensors").read_bytes()


def _after(line: str, kills: random.Random | None, services: list[Service]) -> str:
    if kills is not None and kills.random() < 0.6:
        service = kills.choice(services)
        service.kill()
        service.start()
    return line


@pytest.mark.parametrize("updates", [2, pytest.param(30, marks=pytest.mark.deep)])
def test_kills_change_no_bit_of_the_trained_weights(tmp_path: Path, updates: int) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        flags = (*FLAGS, "--adapter-dir", str(adapters))
        workers = [stack.start_worker(scheduler, demo_model_dir(), *flags) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        for service in stack.services:
            service.wait_ready()
        services = [*workers, scheduler]
        calm = trained(gateway, adapters, updates, None, services)
        disturbed = trained(gateway, adapters, updates, random.Random(3), services)
    assert disturbed == calm
    first = (adapters / "policy-0/adapter_model.safetensors").read_bytes()
    assert first != calm, "the run trains"
