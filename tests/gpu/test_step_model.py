"""The model of a step counts the bytes and the launches of the engine, and predicts plausible times."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.gpu import model as bench_model
from bench.gpu import step_model
from bench.gpu.costs import GPUS
from bench.gpu.report import Report
from bench.gpu.step_model import (
    FORMER,
    MODELS,
    MODES,
    Shape,
    Step,
    calibrated,
    comparison,
    launches,
    one_row_ms,
    one_row_table,
    parts_ms,
    step_ms,
    workload_s,
)
from bench.workloads import QWEN3_06B, nano, weight_shapes
from tests.gpu.fake_graphs import FakeRecorder
from worker_svc.engine.gpu import compute, loading

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
H200 = GPUS["H200"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A tiny engine with graphs, and the recordings by bucket."""
    report = Report(is_smoke=True, scratch=tmp_path_factory.mktemp("model"))
    folder = bench_model.make_checkpoint(report)
    recorder = FakeRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "make_recorder", lambda device: recorder)
        patch.setattr(compute, "decode_sizes", lambda max_rows: [2, max_rows])
        engine = bench_model.load(folder, report, cuda_graph_tokens=128)
    return engine, dict(zip(engine._compute.buckets(), recorder.recordings, strict=True))


def tensors(value, seen: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """All matrices that an object of the engine refers to, each once."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 2:
            seen[value.data_ptr()] = value
    elif isinstance(value, list | tuple):
        for item in value:
            tensors(item, seen)
    elif type(value).__module__.startswith("worker_svc"):
        names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", {})]
        for name in names:
            tensors(getattr(value, name), seen)
    return seen


def test_weights_have_the_size_of_the_engine_s_matrices(recorded):
    engine, _ = recorded
    decoder = engine._compute._model
    found = {**tensors(decoder.layers, {}), **tensors(decoder._head, {})}
    numbers = sum(matrix.numel() for matrix in found.values())
    assert Shape.of(bench_model.TINY).weight_bytes() == 2 * numbers


def test_weights_of_a_real_model():
    matrices = [size for size in weight_shapes(QWEN3_06B).values() if len(size) == 2]
    shape = Shape.of(QWEN3_06B)
    assert shape.weight_bytes() == 2 * sum(rows * columns for rows, columns in matrices) == 1_191_968_768
    assert shape.token_bytes() == 112 << 10


def test_a_token_takes_the_size_of_a_slot(recorded):
    engine, _ = recorded
    pool = engine._pool
    slots = engine.info.num_blocks * engine.info.block_size
    assert Shape.of(bench_model.TINY).token_bytes(pool.itemsize) * slots == pool.nbytes


def test_launches_are_those_of_recorded_steps(recorded):
    _, recordings = recorded
    shape = Shape.of(bench_model.TINY)
    assert {bucket.is_decode for bucket in recordings} == {True, False}
    for bucket, names in recordings.items():
        expected = launches(shape, is_decode=bucket.is_decode, is_filtered=bucket.is_filtered)
        assert Counter(names) == expected, bucket


def test_a_large_batch_is_bound_by_its_keys_and_a_single_row_by_linear_layers_and_launches():
    shape = Shape.of(QWEN3_06B)
    many, one = (parts_ms(shape, Step((1024,) * count, (1,) * count), H200) for count in (256, 1))
    assert max(many, key=many.get) == "attention"
    assert sorted(one, key=one.get)[-2:] == ["launches", "linear layers"]
    least = 256 * 1025 * shape.token_bytes() / H200.bandwidth * 1e3
    assert 1 < many["attention"] / least < 1.3


def test_fewer_bytes_and_early_starts_take_less_time():
    shape = Shape.of(QWEN3_06B)
    step = Step((1024,) * 64, (1,) * 64)
    plain = step_ms(shape, step, H200)
    assert step_ms(shape, step, H200, has_pdl=True) < plain
    assert step_ms(shape, Step(step.contexts, step.queries, cache_bytes=1), H200) < plain
    assert step_ms(shape, Step(step.contexts, step.queries, "filtered"), H200) > plain
    verified = step_ms(shape, Step((1024,) * 16, (4,) * 16, verifies=True), H200)
    assert step_ms(shape, Step((1024,) * 16, (1,) * 16), H200) < verified < plain
    assert step_ms(shape, step, GPUS["L40S"]) > step_ms(shape, step, GPUS["H100"]) > plain


def test_the_workload_generates_all_tokens():
    seconds, tokens = workload_s(Shape.of(QWEN3_06B), H200)
    assert tokens == sum(request.num_output for request in nano().requests)
    assert 15_000 < tokens / seconds < 36_200  # the keys and weights alone take 3.7 s


def test_measured_figures_are_compared_with_predictions(monkeypatch):
    monkeypatch.setattr(step_model, "WORKLOADS", {})  # their steps take seconds to predict
    figures = {"device": "NVIDIA H200", "step_ms_b1_ctx512": 2.0, "copy_gb_s": 4300.0, "launch_us": 4.0}
    (header, line) = comparison(figures)
    assert header.split() == ["predicted", "calibrated", "measured", "measured/predicted"]
    name, predicted, after, measured, ratio = line.split()
    assert (name, measured) == ("step_ms_b1_ctx512", "2.00")
    assert float(ratio) == pytest.approx(2 / float(predicted), rel=0.01)
    assert float(after) > float(predicted)  # because launches took longer
    assert calibrated(H200, figures).bandwidth == pytest.approx(4.3e12)
    assert comparison({"device": "cpu (smoke)", "step_ms_b1_ctx512": 2.0}) == []


def test_long_contexts_of_one_row_are_not_bound_by_what_runs_in_series():
    for model in MODELS:
        for mode in MODES:
            parts = one_row_ms(model, 131_072, H200, mode)
            assert 0 < parts["attention in series"] < 0.3 * sum(parts.values()), (model, mode)
    assert sum(one_row_ms("0.6B", 32_768, H200, "exact").values()) < 4.0


def test_int8_weights_are_read_in_half_the_time():
    plain, int8 = (one_row_ms("8B", 512, H200, mode) for mode in ("best_effort", "exact, int8"))
    assert plain["linear layers"] / 2 < int8["linear layers"] < 0.55 * plain["linear layers"]
    assert int8["head"] > 0.99 * plain["head"]
    assert plain["launches"] < int8["launches"] < 1.6 * plain["launches"]


def test_every_expectation_of_the_former_reading_is_printed_beside_its_prediction():
    text = "\n".join(one_row_table(H200))
    assert text.count("\n") == 1 + len(MODELS) * 4 * len(MODES)
    assert all(f"| {former} |" in text for former in FORMER.values())
