"""Two ranks over gloo give what one rank gives; a rank's death ends the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, seeded
from tests.unit.engine.models import make_model
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.ranks import EXIT_RANK_LOST, ParallelRunner
from worker_svc.engine.gpu.weights import shard_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCAB = 98  # two ranks share it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Biases everywhere, and a vocabulary in two parts.
    overrides = SMALL | HEADS_4_2 | {"vocab_size": VOCAB, "attention_bias": True, "mlp_bias": True}
    return make_model(tmp_path_factory.mktemp("model"), "llama", **overrides)


def run(driver):
    for row, (prompt, sampling) in enumerate(zip(small_prompts([9, 20]), (seeded(5), GREEDY), strict=True)):
        driver.open(row, prompt, sampling)
    driver.step({0: 9, 1: 12})
    driver.step({0: 1, 1: 8})
    driver.decode([1, 0], 2)
    assert driver.errors == []
    return [driver.rows[row].tokens for row in (0, 1)], driver.logits


def test_two_ranks_give_what_one_gives(folder):
    expected_tokens, expected = run(DeviceDriver(load(folder)))
    runner = load(folder, tensor_parallel_size=2, make=ParallelRunner)
    try:
        for _ in range(2):  # again after a new lease: rows are closed on every rank
            tokens, logits = run(DeviceDriver(runner))
            assert tokens == expected_tokens
            for place, row in expected.items():
                assert torch.allclose(logits[place], row, atol=1e-5)
            runner.reset_rows()
    finally:
        runner.close()
    assert [process.exitcode for process in runner._followers] == [0]


LOSE_A_RANK = """
import sys, time
from pathlib import Path
from tests.gpu.driver import load
from worker_svc.engine.gpu.ranks import ParallelRunner

if __name__ == "__main__":
    runner = load(Path(sys.argv[1]), tensor_parallel_size=2, make=ParallelRunner)
    runner._followers[0].kill()
    time.sleep(60)
"""


def test_the_death_of_a_rank_ends_the_worker(folder, tmp_path):
    script = tmp_path / "lose_a_rank.py"
    script.write_text(LOSE_A_RANK)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, script, folder], cwd=root, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/protos:{root}/client"},
    )  # fmt: skip
    assert done.returncode == EXIT_RANK_LOST, done.stderr
    assert "rank-1 ended, so this worker ends" in done.stderr


def test_sizes_that_ranks_cannot_share_are_refused(folder):
    from worker_svc.engine.architectures import parse_config
    from worker_svc.engine.checkpoint import Checkpoint

    config = parse_config(Checkpoint(folder).config)
    with pytest.raises(BackendUnavailableError, match="tensor_parallel_size 4 does not divide num_key_value_heads 2"):
        shard_config(config, Group(0, 4))
