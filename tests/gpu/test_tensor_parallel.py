"""Two ranks over gloo give the results of one rank; the death of a rank ends the worker."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from step_protocol.messages import NO_RULES, TokenRules
from step_protocol.types import Pooling, PoolingKind, PoolingTask
from tests.carried import random_embeddings, with_content_ids
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, seeded, u32
from tests.unit.engine.models import make_model
from tests.unit.engine.processor_cases import f32
from tests.unit.engine.test_engine_images import run_scenes
from tests.unit.engine.vision_models import make_vision_model
from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.collectives.rendezvous import make_store, open_store
from worker_svc.engine.gpu.layers.weights import shard_config
from worker_svc.engine.gpu.ranks.local import EXIT_BAD_SETTING, EXIT_RANK_LOST, LocalRanks
from worker_svc.engine.gpu.ranks.parallel_runner import ParallelRunner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCAB = 98  # 52 ids of the first rank, 46 of the second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Biases everywhere, a vocabulary in two parts, and one KV head that both ranks hold.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    one = {"num_hidden_layers": 1}
    overrides = SMALL | heads | one | {"vocab_size": VOCAB, "attention_bias": True, "mlp_bias": True}
    return make_model(tmp_path_factory.mktemp("model"), "llama", **overrides)


def run(driver):
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2}
    samplings = (seeded(5), GREEDY, seeded(6, top_k=30, top_p=0.9, **penalties))
    rules = (
        NO_RULES,
        NO_RULES,
        TokenRules(u32(*range(0, VOCAB, 2)), u32(4, 60), (u32(2), u32(70)), u32(6, 80), f32(3, 4)),
    )
    hidden = random_embeddings(4, driver.runner.info.hidden_size, start=2)
    for row, (prompt, sampling) in enumerate(zip(small_prompts([9, 20, 3]), samplings, strict=True)):
        inputs = (hidden,) if row == 1 else ()
        driver.open(
            row, with_content_ids(prompt, *inputs), sampling, rules=rules[row], inputs=inputs,
            logprobs=(None, 2, 0)[row],  # gathers over ranks
        )  # fmt: skip
    ids = u32(70, 4, 97)  # ids of both ranks
    driver.open(3, small_prompts([6])[0], pooling=Pooling(PoolingTask.LOGITS, token_ids=ids))
    driver.open(4, small_prompts([7])[0], pooling=Pooling(PoolingTask.VECTOR, PoolingKind.MEAN))
    driver.step({0: 9, 1: 12, 2: 3, 3: 6, 4: 5})
    driver.step({0: 1, 1: 8, 4: 2})
    driver.decode([1, 0, 2], 2)
    assert driver.errors == []
    return [driver.rows[row].tokens for row in (0, 1, 2)], driver.logits, driver.pooled


def check_pooled(found, expected):
    assert found.keys() == expected.keys() == {3, 4}
    for row, numbers in expected.items():
        np.testing.assert_allclose(found[row], numbers, atol=1e-5)


def test_two_ranks_give_the_results_of_one(folder):
    expected_tokens, expected, expected_pooled = run(DeviceDriver(load(folder)))
    runner = load(folder, tensor_parallel_size=2, make=ParallelRunner)
    try:
        tokens, logits, pooled = run(DeviceDriver(runner))
        assert tokens == expected_tokens
        for place, row in expected.items():
            assert torch.allclose(logits[place], row[: len(logits[place])], atol=1e-5)
        check_pooled(pooled, expected_pooled)
        runner.reset_rows()
        driver = DeviceDriver(runner)  # after a new lease: rows are closed on every rank
        driver.open(0, tokens[1][:20], GREEDY, inputs=(random_embeddings(4, runner.info.hidden_size, start=2),))
        driver.prefill(0)
        assert driver.rows[0].tokens == tokens[1][:21]
    finally:
        runner.close()
    assert [process.exitcode for process in runner._followers.processes] == [0]


@pytest.mark.deep
@pytest.mark.parametrize(("architecture", "overrides"), [
    ("gemma2", SMALL | {"sliding_window": 7, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("gpt2", {"n_embd": 64, "n_inner": 40}),
    ("qwen2_moe", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("glm4_moe", {"num_attention_heads": 4, "num_key_value_heads": 2}),
])  # fmt: skip
def test_two_ranks_of_other_decoders_give_the_results_of_one(tmp_path, architecture, overrides):
    """Norms of outputs and soft caps; fused, transposed and biased weights, learned positions; whole experts of a rank
    and, where their number is odd, parts of each, with parts of the shared one."""
    folder = make_model(tmp_path, architecture, **overrides | {"vocab_size": VOCAB})
    expected_tokens, expected, expected_pooled = run(DeviceDriver(load(folder)))
    runner = load(folder, tensor_parallel_size=2, make=ParallelRunner)
    try:
        tokens, logits, pooled = run(DeviceDriver(runner))
    finally:
        runner.close()
    assert tokens == expected_tokens
    check_pooled(pooled, expected_pooled)
    for place, row in expected.items():
        assert torch.allclose(logits[place], row[: len(logits[place])], atol=1e-5)


HURT_A_RANK = """
import os, signal, sys
from pathlib import Path
from tests.carried import random_embeddings, with_content_ids
from tests.gpu.driver import DeviceDriver, load
from worker_svc.engine.gpu.ranks import parallel_runner as ranks

if __name__ == "__main__":
    ranks.STUCK_AFTER_S = 1.0
    leader = load(Path(sys.argv[1]), tensor_parallel_size=2, make=ranks.ParallelRunner)
    follower = leader._followers.processes[0].pid
    print("follower", follower, flush=True)
    if sys.argv[2] == "lead":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(follower, signal.SIGSTOP)
    driver = DeviceDriver(leader)
    driver.open(0, [1, 2, 3])
    driver.step({0: 3})
"""


@pytest.fixture
def hurt_a_rank(folder, tmp_path):
    """Loads two ranks in a separate process, then kills rank 0 or suspends rank 1 in a step."""

    def hurt(which):
        script = tmp_path / "hurt_a_rank.py"
        script.write_text(HURT_A_RANK)
        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/protos:{root}/client"}
        log = tmp_path / "log"
        with log.open("w") as file:  # no pipe: a surviving follower would keep it open
            done = subprocess.run(
                [sys.executable, script, folder, which], cwd=root, stdout=file, stderr=file, timeout=120,
                env=environment,
            )  # fmt: skip
        pid = re.search(r"^follower (\d+)$", log.read_text(), re.MULTILINE)
        assert pid is not None, log.read_text()
        return done.returncode, int(pid[1]), log.read_text()

    return hurt


def test_a_stuck_rank_ends_the_worker(hurt_a_rank):
    """Rank 1 is suspended in a step in which rank 0 waits for it; both processes end."""
    exit_code, follower, log = hurt_a_rank("follower")
    assert exit_code == EXIT_RANK_LOST, log
    assert "a step did not finish within 1 s: a rank is stuck; this worker exits" in log
    wait_gone(follower)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ("the GPU is too small", ("rank-1: the GPU is too small", EXIT_BAD_SETTING)),
        (None, ("rank-1 ended (exit code -9)", EXIT_RANK_LOST)),
    ],
)
def test_the_error_of_a_rank_is_the_reported_reason(refusal, expected):
    ranks = LocalRanks(None, (), make_store(2))
    if refusal:
        open_store(ranks._store.port, 2).set("rank-1", refusal)
    assert ranks._reason([SimpleNamespace(name="rank-1", exitcode=-9, join=lambda: None)]) == expected


def test_the_store_listens_on_the_loopback_interface_only():
    """A process of another host could otherwise change what the ranks tell each other."""
    port = make_store(2).port
    for family, host in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as client, pytest.raises(ConnectionRefusedError):
            client.connect((host, port))


def test_no_rank_outlives_rank_0(hurt_a_rank):
    exit_code, follower, log = hurt_a_rank("lead")
    assert exit_code == -signal.SIGKILL, log
    wait_gone(follower)


def wait_gone(pid):
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_exact_sums_have_one_order(monkeypatch):
    """The order of a library depends on the length of the message."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 8, 16, generator=generator).bfloat16()

    def gather(out, x):
        out.copy_(parts[:, : len(x)].reshape(-1, 16))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    group = Group(0, 4, is_exact=True)
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(group.all_reduce(parts[0].clone()), expected)
    assert torch.equal(group.all_reduce(parts[0, :1].clone()), expected[:1])


def test_models_that_cannot_be_sharded_are_refused(folder):
    from worker_svc.engine.checkpoint.tensors import Checkpoint
    from worker_svc.engine.decoder.parse import parse_config

    config = parse_config(Checkpoint(folder).config)
    with pytest.raises(
        BackendUnavailableError, match="num_attention_heads 4 is not divisible by tensor_parallel_size 3"
    ):
        shard_config(config, Group(0, 3))
    shape = HeadShape(num_q_heads=36, num_kv_heads=6, head_dim=16)
    layers = tuple(replace(layer, heads=shape) for layer in config.layers)
    with pytest.raises(
        BackendUnavailableError, match="size 4 must be a divisor or a multiple of num_key_value_heads 6"
    ):
        shard_config(replace(config, layers=layers), Group(0, 4))
    wide = replace(config, architecture=replace(config.architecture, qk_norm="projection"))
    with pytest.raises(BackendUnavailableError, match=r"norms of queries and keys .* use tensor_parallel_size 1"):
        shard_config(wide, Group(0, 2))
    with pytest.raises(BackendUnavailableError, match="vocab_size 9 is too small for tensor_parallel_size 4"):
        shard_config(replace(config, vocab_size=9), Group(0, 4))


@pytest.mark.deep
def test_two_ranks_read_images_as_one_does(tmp_path):
    """Each rank has the whole tower. Chunks that begin in an image, and rows with and without images in a step."""
    folder = make_vision_model(tmp_path, "qwen3_vl")
    settings = {"kernels": "torch", "determinism": "exact", "block_size": 8, "num_blocks": 80, "max_num_seqs": 6}
    alone = DeviceDriver(load(folder, **settings))
    run_scenes(alone)
    runner = load(folder, tensor_parallel_size=2, make=ParallelRunner, **settings)
    try:
        driver = DeviceDriver(runner)
        run_scenes(driver)
    finally:
        runner.close()
    assert [row.tokens for row in driver.rows.values()] == [row.tokens for row in alone.rows.values()]
    assert (runner.images.num_encoded, runner.images.num_hits) == (3, 0)
    for place, row in alone.logits.items():
        assert torch.allclose(driver.logits[place], row[: len(driver.logits[place])], atol=1e-5)
