"""Adapters on the GPU engine: equal to weights that PEFT merged, beside rows without one, and swapped."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.adapters import load_merged, make_adapter, targets_of
from tests.unit.engine.driver import seeded
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.quantized import awq, fp8, quantize_model
from tests.unit.engine.test_engine_adapters import place
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.adapters.config import AdapterError
from worker_svc.engine.gpu import compute, loading
from worker_svc.engine.gpu.ranks.parallel_runner import ParallelRunner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")

ADAPTED = {"max_adapters": 3, "max_adapter_rank": 40, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A model and three adapters of it, of different ranks and targets."""
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)
    targets = (targets_of("qwen3"), ["q_proj", "v_proj", "up_proj"], ["o_proj", "down_proj"])
    return folder, [
        make_adapter(folder, tmp_path_factory.mktemp("adapter"), seed=rank, r=rank, target_modules=target)
        for rank, target in zip((4, 33, 17), targets, strict=True)
    ]


def run_batch(driver, adapters, *, num_steps=3, temperature=0.0):
    """Rows of all adapters and of none: chunks, mixed steps, decode steps, rows in changing order."""
    lengths = [9, 18, 5, 12]
    for row, (adapter, prompt) in enumerate(zip([*adapters, None], small_prompts(lengths), strict=True)):
        digest = b"" if adapter is None else place(driver.runner, str(row), adapter)
        driver.open(row, prompt, seeded(row, temperature), adapter=digest)
    driver.step({1: 10, 3: 4})
    driver.step({0: 9, 1: 8, 2: 5, 3: 8})
    driver.decode([3, 1, 0, 2], num_steps)
    assert driver.errors == []


def check_rows(driver, folder, adapters):
    for row, adapter in enumerate(adapters):
        check_against(load_merged(folder, adapter), driver, [row])
    check_against(load_reference(folder), driver, [len(adapters)])


@pytest.mark.parametrize("determinism", [pytest.param("exact", marks=pytest.mark.deep), "best_effort"])
def test_rows_of_several_adapters_equal_merged_weights(qwen3, determinism):
    folder, adapters = qwen3
    driver = DeviceDriver(load(folder, determinism=determinism, **ADAPTED))
    run_batch(driver, adapters)
    check_rows(driver, folder, adapters)
    assert driver.runner.info.max_adapters == 3


OTHERS = {
    "phi3": SMALL | HEADS_4_2, "gpt2": {"n_embd": 64, "n_inner": 40, "vocab_size": 97},
    "gemma2": SMALL | HEADS_4_2 | {"sliding_window": 7}, "qwen3_moe": SMALL | HEADS_4_2,
}  # fmt: skip


@pytest.mark.parametrize(
    "architecture", ["phi3", *(pytest.param(name, marks=pytest.mark.deep) for name in OTHERS if name != "phi3")]
)
def test_adapters_of_other_decoders(tmp_path, architecture):
    """Fused, transposed and plain layers, norms of outputs, and attention beside experts."""
    folder = make_model(tmp_path / "model", architecture, **OTHERS[architecture])
    adapter = make_adapter(folder, tmp_path / "adapter", r=5, target_modules=targets_of(architecture))
    driver = DeviceDriver(load(folder, **ADAPTED))
    run_batch(driver, [adapter] * 3, num_steps=1)
    check_rows(driver, folder, [adapter] * 3)


def test_bits_do_not_depend_on_the_batch(qwen3):
    folder, adapters = qwen3
    together = DeviceDriver(load(folder, determinism="exact", **ADAPTED))
    run_batch(together, adapters, num_steps=2, temperature=0.5)
    engine = load(folder, determinism="exact", **ADAPTED)
    for row, (adapter, length) in enumerate(zip([*adapters, None], [9, 18, 5, 12], strict=True)):
        engine.reset_rows()
        alone = DeviceDriver(engine)
        digest = b"" if adapter is None else place(engine, str(row), adapter)
        alone.open(row, together.rows[row].tokens[:length], seeded(row, 0.5), adapter=digest)
        alone.prefill(row)
        alone.decode([row], 2)
        assert alone.rows[row].tokens == together.rows[row].tokens
        for place_of, logits in alone.logits.items():
            assert torch.equal(together.logits[place_of], logits)


def test_a_step_without_adapters_launches_nothing_more(qwen3, monkeypatch):
    folder, adapters = qwen3
    driver = DeviceDriver(load(folder, **ADAPTED))
    monkeypatch.setattr("worker_svc.engine.gpu.layers.device_slots.add_low_rank", None)
    place(driver.runner, "one", adapters[0])
    driver.open(0, small_prompts([9])[0])
    driver.prefill(0)
    assert driver.errors == []
    driver.open(1, small_prompts([9])[0], adapter=place(driver.runner, "one", adapters[0]))
    with pytest.raises(TypeError, match="not callable"):
        driver.step({1: 9})


@pytest.mark.skipif(torch.cuda.is_available(), reason="replays are counted by the fake")
def test_steps_with_adapters_get_graphs_when_the_worker_is_idle(qwen3, monkeypatch):
    folder, adapters = qwen3
    monkeypatch.setattr(compute, "MIN_MIXED", 16)
    recorder = FakeRecorder()
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    driver = DeviceDriver(load(folder, cuda_graphs="lazy", cuda_graph_tokens=16, determinism="exact", **ADAPTED))
    at_start = len(recorder.recordings)
    run_batch(driver, adapters, num_steps=2)
    assert len(recorder.recordings) == at_start
    while driver.runner.work_when_idle():
        driver.runner.reset_rows()
    replayed = DeviceDriver(driver.runner)
    run_batch(replayed, adapters, num_steps=2)
    driver.runner.reset_rows()
    eager = DeviceDriver(driver.runner)
    with driver.runner._compute.eager():
        run_batch(eager, adapters, num_steps=2)
    for other in (driver, replayed):
        assert [row.tokens for row in other.rows.values()] == [row.tokens for row in eager.rows.values()]
    recorded = recorder.recordings[at_start:]
    assert len(recorded) == 2  # the first step, and decode steps; the other step is too long
    for names in recorded:
        assert names.count("shrink_kernel") == names.count("expand_kernel") == 4 * SMALL["num_hidden_layers"]
    assert recorder.num_replays == 3


def test_prompt_tokens_are_scored_with_their_adapter(qwen3):
    """Layers of the last positions see other tokens than the rest: those that sample and those that are scored."""
    folder, adapters = qwen3
    driver = DeviceDriver(load(folder, **ADAPTED))
    prompts = small_prompts([9, 7])
    driver.open(0, prompts[0], adapter=place(driver.runner, "one", adapters[0]), prompt_logprobs=0)
    driver.open(1, prompts[1], prompt_logprobs=0)
    driver.step({0: 9, 1: 7})
    assert driver.errors == []
    for row, model in enumerate((load_merged(folder, adapters[0]), load_reference(folder))):
        scores = model(torch.tensor([prompts[row]])).logits[0].log_softmax(-1)
        for position, token in enumerate(prompts[row][1:], start=1):
            assert driver.scores[row, position].values[0] == pytest.approx(float(scores[position - 1, token]), abs=1e-3)


QUANTIZED = {"fp8": (fp8(24), {}), "int4": (awq(64), {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32})}


@pytest.mark.parametrize("name", QUANTIZED)
def test_adapters_beside_quantized_weights(tmp_path, name):
    """An adapter's part is computed from inputs that are not rounded, so it equals that of a float model."""
    target, sizes = QUANTIZED[name]
    folder = make_model(tmp_path / "model", "llama", **(SMALL | HEADS_4_2 | sizes))
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=targets_of("llama"), strength=2.0)
    plain = quantize_model(folder, target)
    logits = []
    for is_adapted in (True, False):
        driver = DeviceDriver(load(folder, **ADAPTED))
        driver.open(0, small_prompts([12])[0], adapter=place(driver.runner, "one", adapter) if is_adapted else b"")
        driver.prefill(0)
        logits.append(driver.logits[0, 12])
    assert driver.errors == []
    expected = load_merged(plain, adapter)(torch.tensor(small_prompts([12]))).logits[0, -1]
    assert (logits[0] - expected).abs().max() < 0.1 * (logits[1] - expected).abs().max()


def test_rows_without_adapter_keep_their_bits_with_fp8_weights(qwen3):
    """The norm that rounds to fp8 does not keep what the adapters need."""
    folder, adapters = qwen3
    engine = load(folder, quantize="fp8", determinism="exact", **ADAPTED)
    prompts, logits = small_prompts([9, 7]), []
    for adapter in (adapters[0], None):
        engine.reset_rows()
        driver = DeviceDriver(engine)
        driver.open(0, prompts[0])
        if adapter is not None:
            driver.open(1, prompts[1], adapter=place(engine, "one", adapter))
        driver.step({0: 9} if adapter is None else {0: 9, 1: 7})
        assert driver.errors == []
        logits.append(driver.logits[0, 9])
    assert torch.equal(*logits)


def test_more_adapters_than_slots_are_swapped(qwen3):
    folder, adapters = qwen3
    engine = load(folder, **(ADAPTED | {"max_adapters": 1}))
    driver, prompt = DeviceDriver(engine), small_prompts([9])[0]
    for row, adapter in enumerate((adapters[0], adapters[1], adapters[0])):
        digest = engine.adapters.load(adapter.name, adapter).digest
        driver.open(row, prompt, adapter=digest)
        driver.step({})
        assert [error.message for error in driver.errors] == [
            f"adapter {digest.hex()} is not in use by this worker; place it first"
        ]
        driver.errors.clear()
        engine.adapters.swap(digest)
        driver.open(row, prompt, adapter=digest)
        driver.prefill(row)
        driver.decode([row], 1)
        check_against(load_merged(folder, adapter), driver, [row])
        driver.close(row)
    assert engine.adapters.num_swaps == 3


def test_a_row_keeps_its_adapter_and_no_other_takes_its_slot(qwen3):
    folder, adapters = qwen3
    engine = load(folder, **(ADAPTED | {"max_adapters": 1}))
    driver, prompt = DeviceDriver(engine), small_prompts([9])[0]
    driver.open(0, prompt, adapter=place(engine, "one", adapters[0]))
    driver.prefill(0)
    digest = engine.adapters.load("two", adapters[1]).digest
    engine.adapters.swap(digest)  # evicts the adapter of the open row
    driver.open(1, prompt, adapter=digest)
    driver.step({})
    assert [error.message for error in driver.errors] == [
        f"adapter {digest.hex()}: open rows already use 1 adapters, the limit of --max-adapters; close their rows first"
    ]
    driver.errors.clear()
    driver.decode([0], 2)
    check_against(load_merged(folder, adapters[0]), driver, [0])


def test_a_worker_without_adapters_refuses_rows_with_one(qwen3):
    driver = DeviceDriver(load(qwen3[0]))
    assert driver.runner.adapters is None
    driver.open(0, small_prompts([9])[0], adapter=b"d" * 16)
    driver.step({})
    assert [error.message for error in driver.errors] == ["this worker computes no adapters"]


def test_adapters_of_the_start(qwen3):
    folder, adapters = qwen3
    engine = load(folder, adapters=(("one", adapters[0]),), **ADAPTED)
    assert [entry.name for entry in engine.adapters.entries()] == ["one"]
    with pytest.raises(AdapterError, match="this worker allows at most 2; raise --max-adapter-rank"):
        load(folder, adapters=(("one", adapters[0]),), **(ADAPTED | {"max_adapter_rank": 2}))


@pytest.mark.deep
def test_two_ranks_give_the_results_of_one(tmp_path):
    """One KV head, which both ranks hold. Rank 1 has no folder: rank 0 sends it the matrices."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 98}
    folder = make_model(tmp_path / "model", "llama", **SMALL | heads)
    adapters = [
        make_adapter(folder, tmp_path / str(rank), seed=rank, r=rank, target_modules=targets_of("llama"))
        for rank in (4, 17, 8)
    ]
    expected = DeviceDriver(load(folder, **ADAPTED))
    run_batch(expected, adapters, num_steps=1)
    parallel = load(folder, tensor_parallel_size=2, make=ParallelRunner, **ADAPTED)
    try:
        driver = DeviceDriver(parallel)
        run_batch(driver, adapters, num_steps=1)
        driver.close(1)
        parallel.adapters.unload("1")
        driver.open(4, small_prompts([9])[0], adapter=b"x" * 16)  # refused on both ranks
        driver.open(5, small_prompts([9])[0], adapter=place(parallel, "again", adapters[1]))
        driver.step({5: 9})
    finally:
        parallel.close()
    assert [error.row for error in driver.errors] == [4]
    for row in (0, 2, 3):
        assert driver.rows[row].tokens[: len(expected.rows[row].tokens)] == expected.rows[row].tokens
    for place_of, logits in expected.logits.items():
        assert torch.allclose(driver.logits[place_of], logits[: len(driver.logits[place_of])], atol=1e-5)
    assert [process.exitcode for process in parallel._followers.processes] == [0]
