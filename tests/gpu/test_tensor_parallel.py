"""Two ranks over gloo give what one rank gives; a rank's death ends the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, seeded
from tests.unit.engine.models import make_model
from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.ranks import EXIT_RANK_LOST, ParallelRunner
from worker_svc.engine.gpu.weights import shard_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCAB = 98  # 52 ids of the first rank, 46 of the second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Biases everywhere, a vocabulary in two parts, and one key-value head that both ranks need.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    overrides = SMALL | heads | {"vocab_size": VOCAB, "attention_bias": True, "mlp_bias": True}
    return make_model(tmp_path_factory.mktemp("model"), "llama", **overrides)


def run(driver):
    samplings = (seeded(5), GREEDY, seeded(6, top_k=30, top_p=0.9))
    for row, (prompt, sampling) in enumerate(zip(small_prompts([9, 20, 3]), samplings, strict=True)):
        driver.open(row, prompt, sampling)
    driver.step({0: 9, 1: 12, 2: 3})
    driver.step({0: 1, 1: 8})
    driver.decode([1, 0, 2], 2)
    assert driver.errors == []
    return [driver.rows[row].tokens for row in (0, 1, 2)], driver.logits


def test_two_ranks_give_what_one_gives(folder):
    expected_tokens, expected = run(DeviceDriver(load(folder)))
    runner = load(folder, tensor_parallel_size=2, make=ParallelRunner)
    try:
        for _ in range(2):  # again after a new lease: rows are closed on every rank
            tokens, logits = run(DeviceDriver(runner))
            assert tokens == expected_tokens
            for place, row in expected.items():
                assert torch.allclose(logits[place], row[: len(logits[place])], atol=1e-5)
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
    with pytest.raises(BackendUnavailableError, match="size 3 does not divide num_attention_heads 4; use a size that"):
        shard_config(config, Group(0, 3))
    shape = HeadShape(num_q_heads=36, num_kv_heads=6, head_dim=16)
    with pytest.raises(BackendUnavailableError, match="size 4 neither divides num_key_value_heads 6 nor is a multiple"):
        shard_config(replace(config, heads=shape), Group(0, 4))
    with pytest.raises(BackendUnavailableError, match="vocab_size 9 is too small for tensor_parallel_size 4"):
        shard_config(replace(config, vocab_size=9), Group(0, 4))
