"""A draft model: always right if it is the model itself, and with any other one the same answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from request_fields.fields import StopCondition
from tests.speculating import NoTimes, System
from tests.unit.engine.models import make_model
from tests.unit.engine.test_speculation import answers_of, make_runner, prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.draft_model import DraftModel
from worker_svc.engine.speculation.sampler import DraftKind


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("speculating"), "qwen3")


@pytest.fixture(scope="module")
def near_dir(model_dir, tmp_path_factory):
    """A model that is nearly the same."""
    folder = tmp_path_factory.mktemp("near") / "model"
    shutil.copytree(model_dir, folder)
    torch.manual_seed(3)
    for file in folder.glob("*.safetensors"):
        tensors = {name: x + 0.05 * x.std() * torch.randn_like(x) for name, x in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


def make_drafting(model_dir: Path, draft_dir: Path, **settings) -> ModelRunner:
    runner = make_runner(model_dir, speculate=f"draft:{draft_dir}", **settings)
    runner._drafts._times = NoTimes()
    return runner


def proposer_of(runner: ModelRunner) -> DraftModel:
    proposer = runner._drafts._proposer
    assert isinstance(proposer, DraftModel)
    return proposer


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_the_model_itself_is_always_right(model_dir, dtype):
    """With penalties, seeds and forks, in small pools: what is preempted, copied, shared or lost is computed again."""
    plain = answers_of(make_runner(model_dir, dtype))
    runner = make_drafting(model_dir, model_dir, dtype=dtype, num_blocks=40, max_num_batched_tokens=24)
    rng, marks, execute = np.random.default_rng(1), proposer_of(runner)._marks, runner.execute

    def execute_with_losses(batch):
        marks[rng.integers(0, len(marks), 2)] = 0
        return execute(batch)

    runner.execute = execute_with_losses
    for depth in (2, 3):
        assert answers_of(runner, depth, burst_s=0.02) == plain
    counts = runner.draft_counts
    assert counts.drafted[:4].all()
    assert counts.accepted.tolist() == counts.drafted.tolist()


def test_a_shared_prefix_is_computed_once_by_both_models(model_dir):
    runner = make_drafting(model_dir, model_dir)
    proposer, lens = proposer_of(runner), []
    forward = proposer._model.forward

    def counting(batch, pool):
        lens.append(len(batch.token_ids))
        return forward(batch, pool)

    proposer._model.forward = counting
    prompt, counts = list(range(10, 50)), []
    for tail in (60, 61):
        lens.clear()
        system = System(runner)
        system.add([*prompt, tail], StopCondition(3, ignore_eos=True))
        system.run()
        counts.append(sum(lens))
    assert counts[0] > 40
    assert counts[1] < 20


def test_noise_agrees_more_often_than_the_most_likely_token(model_dir, near_dir):
    shares, answers = [], []
    for is_greedy in (False, True, None):
        runner = make_drafting(model_dir, near_dir)
        proposer_of(runner)._sampler.kind.is_greedy = is_greedy
        system = System(runner)
        for seed in range(8):
            system.add(prompts()[seed], StopCondition(40, ignore_eos=True), seed=seed, temperature=1.0)
        answers.append(list(system.run().values()))
        shares.append(runner.draft_counts.accepted[0] / runner.draft_counts.drafted[0])
    assert answers[0] == answers[1] == answers[2]
    assert 1 > shares[0] > shares[1] > 0
    assert shares[2] > shares[1]


def test_the_scheduler_counts_tokens_that_were_drafts(model_dir):
    runner = make_drafting(model_dir, model_dir)
    system = System(runner)
    system.add(prompts()[0], StopCondition(30, ignore_eos=True), seed=1)
    system.run()
    assert system.scheduler._counts.accepted_draft_tokens == runner.draft_counts.accepted.sum() > 10


def test_the_kind_of_drafts_that_was_right_more_often_is_chosen():
    kind, row, sampled, likely = DraftKind(), np.array([0]), np.array([5], np.uint32), np.array([6], np.uint32)
    for token, chosen in ((6, 6), (5, 5), (5, 5), (6, 6), (7, 6)):
        kind.note(row, np.array([1]), sampled, likely)
        kind.learn(0, np.array([3, token], np.uint32))
        assert kind.choose(sampled, likely) == chosen


def test_another_model_changes_no_answer(model_dir, near_dir):
    runner = make_drafting(model_dir, near_dir)
    assert answers_of(runner) == answers_of(make_runner(model_dir))
    counts = runner.draft_counts
    assert 0 < counts.accepted.sum() < counts.drafted.sum()


@pytest.mark.parametrize("size", [195, 256])
def test_vocabularies_may_be_padded_differently(model_dir, tmp_path, size):
    """A row with an id that the draft model does not have gets no drafts."""
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    vocabulary = {f"t{id_}": id_ for id_ in range(100)}
    folders = tmp_path / "model", tmp_path / "draft"
    for folder in folders:
        shutil.copytree(model_dir, folder)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    config = json.loads((folders[1] / "config.json").read_text()) | {"vocab_size": size}
    (folders[1] / "config.json").write_text(json.dumps(config))
    file = next(folders[1].glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.shape[0] == vocab_size and tensor.dim() == 2:
            padding = torch.zeros(max(0, size - vocab_size), tensor.shape[1], dtype=tensor.dtype)
            tensors[name] = torch.cat([tensor, padding])[:size].contiguous()
    save_file(tensors, file, {"format": "pt"})
    runner = make_drafting(*folders)
    assert answers_of(runner) == answers_of(make_runner(model_dir))
    assert runner.draft_counts.accepted.sum() > 0


def test_models_that_cannot_propose_are_refused(model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match=r"only .* exists: .* must have the same tokenizer"):
        make_runner(model_dir, speculate=f"draft:{other}")
    both = tmp_path / "both"
    shutil.copytree(model_dir, both)
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<s>"}]}
    (both / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="first in token '<s>' with id 1"):
        make_runner(both, speculate=f"draft:{other}")
    recurrent = make_model(tmp_path / "recurrent", "lfm2")
    with pytest.raises(ValueError, match="has recurrent layers"):
        make_runner(model_dir, speculate=f"draft:{recurrent}")
    with pytest.raises(ValueError, match="is not a folder"):
        make_runner(model_dir, speculate=f"draft:{tmp_path / 'missing'}")
    for text in ("draft", "draft:", "suffix:x", "none"):
        with pytest.raises(ValueError, match="speculate must be"):
            EngineConfig(model_dir, speculate=text)


def test_both_pools_fit_the_memory(model_dir):
    plain, drafting = (
        ModelRunner(EngineConfig(model_dir, "float32", threads=1, kv_cache_memory=1 << 20, speculate=speculate))
        for speculate in (None, f"draft:{model_dir}")
    )
    assert drafting.info.num_blocks == plain.info.num_blocks // 2
    assert drafting.info.revision == plain.info.revision
