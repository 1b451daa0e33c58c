"""Prompt embeddings in the GPU engine: against transformers, and the same bits as tokens with these embeddings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefix_index.hashing import content_ids
from step_protocol.types import Pooling, PoolingKind, PoolingTask
from tests.carried import embeddings, random_embeddings, with_content_ids
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, Driver, u32
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_inputs import check_mixed_inputs, logits_at
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu import loading
from worker_svc.engine.gpu.runner import PENDING
from worker_svc.engine.model_runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Neither, scaled embeddings, learned positions.
MODELS = {"qwen3": SMALL | HEADS_4_2, "gemma2": SMALL | HEADS_4_2, "gpt2": {"n_embd": 64, "n_inner": 40}}


def make(folder, name="qwen3"):
    return make_model(folder, name, **MODELS[name] | {"vocab_size": 97})


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(name, marks=pytest.mark.deep) for name in ("qwen3", "gpt2"))]
)
def test_inputs_in_mixed_batches_match_transformers(tmp_path, name):
    folder = make(tmp_path, name)
    reference, driver = load_reference(folder), DeviceDriver(load(folder))
    hidden = driver.runner.info.hidden_size
    whole = random_embeddings(25, hidden, seed=1)
    parts = [random_embeddings(5, hidden, seed=2, start=3), random_embeddings(9, hidden, seed=3, start=8)]
    mixed, plain = small_prompts([20, 11])
    chunks = ({0: 16, 1: 5}, {1: 14, 2: 4}, {0: 9, 2: 7, 1: 1})
    check_mixed_inputs(reference, driver, whole, mixed, parts, plain, chunks)


def test_embeddings_of_tokens_give_the_bits_of_the_tokens(tmp_path):
    """In exact mode, in other chunks, as means too; and a prefix hit that needs no input."""
    folder = make(tmp_path)
    table = load_reference(folder).get_input_embeddings().weight.detach()
    prompt = small_prompts([40])[0]
    driver = DeviceDriver(load(folder, determinism="exact"))
    item = embeddings(table[torch.tensor(prompt[5:30])], 5)
    late = embeddings(table[torch.tensor(prompt[36:38])], 36)
    ids = with_content_ids(prompt, item, late)
    mean = Pooling(PoolingTask.VECTOR, PoolingKind.MEAN)
    driver.open(0, prompt)
    driver.open(1, ids, inputs=(item, late))
    driver.step({0: 40, 1: 17})
    driver.step({1: 23})
    driver.open(3, ids, inputs=(item, late), pooling=mean)
    driver.open(4, prompt, pooling=mean)
    driver.step({4: 40, 3: 20})
    driver.step({3: 20})
    driver.decode([0, 1], 1)
    driver.open(2, ids, inputs=(late,), shared=driver.rows[1].blocks[:2])
    driver.prefill(2, 3)
    driver.decode([2], 1)
    assert driver.errors == []
    assert np.array_equal(driver.pooled[3], driver.pooled[4])
    for row in (1, 2):
        assert all(map(torch.equal, logits_at(driver, row), logits_at(driver, 0)))
        assert driver.rows[row].output == driver.rows[0].output
    driver.add(commit_blocks=u32(driver.rows[1].blocks[0]), commit_digests=[b"h" * 16])
    driver.step({})
    _, _, tokens = next(driver.runner.committed_blocks())
    assert tokens[0].tolist() == ids[:16]  # content ids, by which a later prefix is compared


def test_a_step_with_inputs_does_not_use_its_graph(tmp_path, monkeypatch):
    """A graph reads the embeddings of the vocabulary. The graph of the same step without inputs is used."""
    recorder = FakeRecorder()
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    folder = make(tmp_path)
    driver, eager = DeviceDriver(load(folder)), DeviceDriver(load(folder, cuda_graphs="off"))
    item = random_embeddings(3, 32, seed=5)
    replays = []
    for each in (driver, eager):
        each.open(0, with_content_ids([1, 2, 3], item), inputs=(item,))
        for _ in range(3):
            each.step({0: 1})
            replays.append(recorder.num_replays)
        each.decode([0], 2)
    assert replays[:3] == [0, 0, 0] < [recorder.num_replays] * 3
    assert driver.rows[0].tokens == eager.rows[0].tokens


def test_penalties_count_tokens_only(tmp_path):
    """A position of an input has no token. The CPU engine agrees."""
    folder = make(tmp_path)
    penalized = replace(GREEDY, repetition_penalty=1.7, frequency_penalty=0.3)
    item = random_embeddings(10, 32, start=4)
    ids = with_content_ids(small_prompts([18])[0], item)
    cpu = Driver(ModelRunner(EngineConfig(folder, "float32", num_blocks=64, max_num_seqs=5, threads=1)))
    drivers = DeviceDriver(load(folder)), cpu
    for driver in drivers:
        driver.open(0, ids, penalized, inputs=(item,))
        driver.prefill(0)
        driver.decode([0], 8)
        assert driver.errors == []
    assert drivers[0].rows[0].output == drivers[1].rows[0].output


def test_a_bad_input_fails_its_row_only(tmp_path):
    driver = DeviceDriver(load(make(tmp_path)))
    wide = random_embeddings(5, 33)
    driver.open(0, with_content_ids([0] * 8, wide), inputs=(wide,))
    driver.open(1, small_prompts([5])[0])
    driver.step({0: 8, 1: 5})
    assert [(error.row, error.message) for error in driver.errors] == [
        (0, "inputs[0] has shape (5, 33), expected (5, 32)")
    ]
    assert len(driver.rows[1].output) == 1


def test_no_content_id_is_the_mark_of_a_pending_token():
    assert min(np.frombuffer(content_ids(b"\0" * 16, 4096), "<u4")) > PENDING
