"""CUDA graphs of steps: padded to their bucket, replayed for other lengths, within memory bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, seeded
from tests.unit.engine.models import make_model
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu import compute, loading
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.compute import mixed_sizes
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.step import graphs
from worker_svc.engine.gpu.step.graphs import CudaRecorder, GraphError, Graphs
from worker_svc.engine.gpu.step.step_buffer import Bucket

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


@pytest.fixture
def recorder(monkeypatch):
    """Replaces the CUDA recorder. Small mixed steps get graphs."""
    monkeypatch.setattr(compute, "MIN_MIXED", 16)
    made = FakeRecorder() if not torch.cuda.is_available() else CudaRecorder(torch.device("cuda"))
    monkeypatch.setattr(loading, "make_recorder", lambda device: made)
    return made


def run(engine):
    """Mixed steps of one bucket with different rows, lengths and samples, then decode steps."""
    driver = DeviceDriver(engine)
    prompts = small_prompts([9, 22, 30])
    for row, sampling in enumerate((seeded(1), GREEDY, seeded(4, 0.7))):
        driver.open(row, prompts[row], sampling)
    driver.step({0: 9, 1: 11})  # 20 tokens, one sample
    driver.step({0: 1, 1: 11, 2: 10})  # 22 tokens, after contexts
    driver.step({2: 20, 1: 1, 0: 1})  # 22 tokens, three samples
    driver.decode([2, 0, 1], 1)
    driver.decode([1, 2, 0], 1)
    assert driver.errors == []
    return [driver.rows[row].tokens for row in range(3)], engine._pool.tensors[0]


@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
def test_replayed_steps_equal_unpadded_steps(folder, recorder, determinism):
    """Compares every key, value and token; each depends on all earlier steps."""
    plain, pool = run(load(folder, determinism=determinism, cuda_graphs="off"))
    replayed, other = run(load(folder, determinism=determinism, cuda_graphs="lazy", cuda_graph_tokens=24))
    assert replayed == plain
    if determinism == "exact":
        assert torch.equal(other, pool)
    assert torch.allclose(other, pool, atol=1e-5)
    if isinstance(recorder, FakeRecorder):
        assert recorder.num_replays >= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the names are those of the fake")
def test_launches_of_a_step(folder, recorder):
    """A graph has nine kernels per layer, ten with prompts, and a few others."""
    load(folder, cuda_graphs="lazy", cuda_graph_tokens=16)
    decode, mixed = (Counter(names) for names in recorder.recordings)
    per_layer = {
        "norm_kernel": 2, "linear.default": 4, "rope_store_kernel": 1, "paged_attention_kernel": 1,
        "gated_activation_kernel": 1,
    }  # fmt: skip
    once = {
        "prepare_kernel": 1, "embedding.default": 1, "work_list_kernel": 1, "index_select.default": 2,
        "norm_kernel": 1, "linear.default": 1, "chunk_scores_kernel": 1, "pick_kernel": 1,
    }  # fmt: skip
    assert sum(per_layer.values()) == 9
    layers = SMALL["num_hidden_layers"]
    expected = Counter(once) + Counter({name: layers * count for name, count in per_layer.items()})
    assert decode == expected
    assert all(names[0] == "prepare_kernel" for names in recorder.recordings)  # it waits for everything before the step
    assert mixed == expected + Counter({"paged_attention_kernel": layers, "work_list_kernel": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="replays are counted by the fake")
def test_larger_steps_and_steps_beyond_the_memory_limit_run_without_graphs(folder, recorder, monkeypatch, caplog):
    engine = load(folder, cuda_graphs="lazy", cuda_graph_tokens=16)
    at_start = recorder.num_replays
    driver = DeviceDriver(engine)
    driver.open(0, small_prompts([40])[0])
    driver.step({0: 20})
    driver.step({0: 18})
    assert recorder.num_replays == at_start
    monkeypatch.setattr(engine._compute._graphs, "_limit", 0)
    driver.step({0: 2})  # its bucket was recorded at start-up
    assert recorder.num_replays == at_start + 1
    driver.open(1, small_prompts([4])[0], seeded(1, top_k=3))
    driver.step({1: 4})
    assert "no more are recorded" in caplog.text
    assert driver.errors == []


def bucket(size):
    return Bucket(size, size, size, is_decode=True, is_filtered=False)


def make_graphs(recorder, limit, *, is_lazy=False):
    computed = []
    return computed, Graphs(computed.append, [bucket(n) for n in (4, 2, 1)], recorder, limit, Group(), is_lazy=is_lazy)


def test_recording_at_start_up_stops_at_its_memory_limit(caplog):
    computed, made = make_graphs(FakeRecorder(bytes_per_graph=10), 20)
    parts = []
    made.record_at_start(parts.append)
    assert [made.serves(bucket(n)) for n in (4, 2, 1)] == [True, True, False]
    assert parts == [1 / 3, 2 / 3]
    assert computed == [bucket(4), bucket(4), bucket(2), bucket(2)]  # warm-up, recording
    assert "2 of 3 CUDA graphs are recorded" in caplog.text
    assert made.replay(bucket(2))
    assert not made.replay(bucket(1))


class Failing(FakeRecorder):
    """The nth recordings fail."""

    def __init__(self, *failing, error=None):
        super().__init__()
        self._failing, self._error = failing, error or GraphError("capture failed")

    def record(self, step, **_):
        self.recordings.append([])
        if len(self.recordings) in self._failing:
            raise self._error
        step()
        return step


def test_steps_that_cannot_be_recorded_continue_without_a_graph(caplog):
    _, made = make_graphs(Failing(*range(9)), 1, is_lazy=True)
    made.record_after(bucket(2))
    assert "continue without a graph: capture failed" in caplog.text
    assert not made.serves(bucket(2))
    with pytest.raises(GraphError, match="capture failed"):
        made.record_at_start(lambda part: None)
    assert not made.serves(bucket(1))  # it would fail as well, at a step of a request
    made.record_after(bucket(2))


@pytest.mark.parametrize("error", [GraphError("capture failed"), torch.OutOfMemoryError("out of memory")])
def test_graphs_that_were_recorded_before_one_failed_are_used(error):
    _, made = make_graphs(Failing(2, 3, error=error), 1)
    with pytest.raises(GraphError, match=str(error)):
        made.record_at_start(lambda part: None)
    assert [made.replay(bucket(n)) for n in (4, 2, 1)] == [True, False, False]


def test_a_graph_that_fails_is_recorded_without_overlap(caplog):
    overlaps = []

    def compute(bucket):
        overlaps.append(forms.chosen().may_overlap)

    made = Graphs(compute, [bucket(4), bucket(2), bucket(1)], Failing(2), 1, Group(), is_lazy=False)
    made.record_at_start(lambda part: None)
    assert len(made) == 3
    assert overlaps == [True, True, True, False, False, False, False]  # kernels without overlap are compiled first
    assert "recorded without overlap of kernels: capture failed" in caplog.text
    assert forms.chosen().may_overlap


RARE = replace(bucket(4), ends_at_logits=True)


def test_rare_graphs_are_recorded_when_idle(monkeypatch):
    recorder, other = FakeRecorder(), replace(bucket(2), ends_at_logits=True)
    made = Graphs(lambda bucket: None, [bucket(4)], recorder, 1, Group(), is_lazy=False, rare_buckets=[RARE, other])
    assert not made.has_used
    for used in (RARE, other, other):
        made.record_after(used)
    assert len(recorder.recordings) == 0
    assert made.has_used
    assert made.record_used()
    assert (made.replay(RARE), made.replay(other)) == (False, True)  # the most used graph comes first
    assert recorder.while_serving == [True]
    assert made.record_used()
    assert not made.has_used
    assert not made.record_used()


def test_a_rare_graph_of_a_worker_that_is_never_idle_is_recorded_at_last(monkeypatch):
    monkeypatch.setattr(graphs, "PATIENCE", 3)
    made = Graphs(lambda bucket: None, [], FakeRecorder(), 1, Group(), is_lazy=False, rare_buckets=[RARE])
    for expected in (0, 0, 1, 1):
        made.record_after(RARE)
        assert len(made) == expected


def test_ranks_agree_on_what_is_recorded():
    class OtherFails(Group):
        def all_reduce_min(self, value):
            return 0 if value and made is not None and len(made) else value

    made = None
    made = Graphs(lambda bucket: None, [bucket(2), bucket(1)], Failing(), 1, OtherFails(), is_lazy=True)
    made.record_at_start(lambda part: None)
    made.record_after(bucket(1))
    assert [made.serves(bucket(n)) for n in (2, 1)] == [True, False]


@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.deep) for number in (2, 3, 4))])
def test_a_worker_whose_graphs_cannot_be_recorded_serves_without(folder, recorder, monkeypatch, caplog, number):
    """Each of its recordings fails in turn, with and without overlap."""
    plain, _ = run(load(folder, cuda_graphs="off"))
    record, num_calls = recorder.record, 0

    def fail(step, **_):
        nonlocal num_calls
        num_calls += 1
        if num_calls >= number:
            raise GraphError("capture failed")
        return record(step)

    monkeypatch.setattr(recorder, "record", fail)
    engine = load(folder, cuda_graphs="start", cuda_graph_tokens=24)
    assert f"capture failed; {number - 1} CUDA graphs are recorded, and steps of other sizes" in caplog.text
    assert engine._compute.num_graphs == number - 1
    assert run(engine)[0] == plain
    if number == 1:
        with pytest.raises(BackendUnavailableError, match="capture failed; use --cuda-graphs off"):
            load(folder, cuda_graphs="lazy", cuda_graph_tokens=24, kernels="triton")


@pytest.mark.parametrize(("limit", "sizes"), [
    (0, []), (100, [100]), (128, [128]), (700, [128, 192, 256, 384, 512, 700]),
])  # fmt: skip
def test_sizes_of_mixed_steps(limit, sizes):
    assert mixed_sizes(limit) == sizes
