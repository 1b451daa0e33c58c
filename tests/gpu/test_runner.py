"""The whole GPU engine: mixed batches of small models against transformers, tokens, block contents, faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from step_protocol.types import RowErrorCode
from tests.gpu.builders import relative_error
from tests.gpu.driver import DeviceDriver, load
from tests.unit.engine.banned import SAMPLINGS, check_banned_ids
from tests.unit.engine.driver import GREEDY, Driver, seeded, u32
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.processed import check_all_tokens_excluded, check_batch, check_fork, seeded_case, tokens_of
from tests.unit.engine.processor_cases import CASES
from tests.unit.engine.test_engine_models import LLAMA3_ROPE, check_against, prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.runner import PENDING
from worker_svc.engine.model_runner import ModelRunner

# Padding rows hold uninitialized memory; numpy warns about it where a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 2}
HEADS_4_2 = {"num_attention_heads": 4, "num_key_value_heads": 2}

MODELS = {
    "qwen3": ("qwen3", 16, HEADS_4_2),
    "qwen2-gqa7": ("qwen2", 4, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    "llama-biased": (
        "llama", 64,
        HEADS_4_2 | {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True,
                     "tie_word_embeddings": True},
    ),
    "mistral-gelu": ("mistral", 1, HEADS_4_2 | {"hidden_act": "gelu", "sliding_window": None, "head_dim": 24}),
}  # fmt: skip


def small_prompts(lengths, seed=0):
    return prompts(lengths, vocab=97, seed=seed)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL, **HEADS_4_2)


def run_forced(driver):
    """Prompts in chunks. Sampled tokens are dropped, so that logits of different engines can be compared."""
    for row, prompt in enumerate(small_prompts([9, 18])):
        driver.open(row, prompt[:-3], output=prompt[-3:])
    driver.step({0: 8, 1: 10})
    driver.step({0: 1, 1: 8})
    assert driver.errors == []
    for row in driver.rows.values():
        row.tokens.pop()  # the sampled token


def run_mixed(driver, longest=18):
    """Chunks, whole prompts and single queries in one batch, across block boundaries, in changing order."""
    for row, prompt in enumerate(small_prompts([1, 9, longest])):
        driver.open(row, prompt)
    driver.step({0: 1, 2: longest - 9})
    driver.step({0: 1, 1: 9, 2: 7})
    driver.step({2: 2, 0: 1, 1: 1})
    driver.decode([2, 0, 1], 2)
    assert driver.errors == []


@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_match_transformers(tmp_path, name):
    architecture, block_size, overrides = MODELS[name]
    folder = make_model(tmp_path, architecture, **(SMALL | overrides))
    driver = DeviceDriver(load(folder, block_size=block_size, num_blocks=256 // block_size))
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def worst_error(driver, expected):
    """The largest error of the logits relative to those of another driver with the same tokens."""
    assert [row.tokens for row in driver.rows.values()] == [row.tokens for row in expected.rows.values()]
    return max(relative_error(logits, expected.logits[place]) for place, logits in driver.logits.items())


def test_errors_of_float16_and_of_an_fp8_cache(qwen3, monkeypatch):
    """The error of an fp8 cache compared with float16, because the interpreter has no bfloat16. The attention of this
    model is peaked, so typical models lose less."""
    drivers = {}
    for name, settings in {
        "float32": {}, "float16": {"dtype": "float16"}, "fp8": {"dtype": "float16", "kv_cache_dtype": "fp8"},
        "fp8 torch": {"kv_cache_dtype": "fp8", "attention": "torch"},
    }.items():  # fmt: skip
        drivers[name] = driver = DeviceDriver(load(qwen3, **settings))
        run_forced(driver)
    infos = {name: driver.runner.info for name, driver in drivers.items()}
    assert infos["fp8"].kv_cache_dtype == "fp8"
    assert len({info.revision for info in infos.values()}) == 4
    assert drivers["fp8"].runner._pool.tensors[0].nbytes * 2 == drivers["float16"].runner._pool.tensors[0].nbytes
    errors = {name: worst_error(driver, drivers["float32"]) for name, driver in drivers.items()}
    assert errors["float16"] < 5e-3
    assert errors["fp8"] < 0.06
    assert abs(errors["fp8"] - errors["fp8 torch"]) < 0.02


def test_torch_attention_matches_transformers(qwen3):
    driver = DeviceDriver(load(qwen3, attention="torch"))
    run_mixed(driver)
    assert driver.runner.info.backend == "cuda/torch"
    check_against(load_reference(qwen3), driver, [0, 1, 2])


def test_prefix_hit_preemption_and_reused_blocks_match_transformers(qwen3):
    driver = DeviceDriver(load(qwen3, block_size=8, num_blocks=7))
    first, second = small_prompts([10, 20])
    driver.open(0, first)
    driver.prefill(0, 6)
    driver.open(1, [*first[:8], 5], shared=driver.rows[0].blocks[:1])
    driver.step({0: 1, 1: 1})
    driver.decode([1, 0], 2)
    kept = driver.rows[0]
    driver.close(1, keep_blocks=True)
    driver.close(0)
    driver.open(2, second)
    driver.open(0, first, output=kept.output)
    driver.step({2: 20, 0: len(kept.tokens)})
    driver.decode([2, 0], 2)
    assert driver.errors == []
    check_against(load_reference(qwen3), driver, [0, 2])


def test_sampled_tokens_are_those_of_the_cpu_engine(qwen3):
    """Both engines follow one noise specification: seeded rows with and without filters."""
    outputs = []
    for make in (lambda: DeviceDriver(load(qwen3)), lambda: Driver(
        ModelRunner(EngineConfig(qwen3, "float32", num_blocks=64, max_num_seqs=5, threads=1, backend="reference"))
    )):  # fmt: skip
        driver = make()
        samplings = [seeded(7), seeded(2**63 + 1, 0.7, top_k=5), seeded(3, 1.5, top_p=0.8), GREEDY]
        for row, (prompt, sampling) in enumerate(zip(small_prompts([5, 1, 3, 2]), samplings, strict=True)):
            driver.open(row, prompt, sampling)
        driver.step({0: 5, 1: 1, 2: 3, 3: 2})
        driver.decode([3, 1, 0, 2], 3)
        assert driver.errors == []
        outputs.append([driver.rows[row].output for row in range(4)])
    assert outputs[0] == outputs[1]


def test_a_fork_samples_from_its_parents_logits(qwen3):
    tokens = []
    for is_forked in (True, False):
        driver = DeviceDriver(load(qwen3))
        (prompt,) = small_prompts([10])
        driver.open(0, prompt, seeded(4))
        driver.open(1, prompt, seeded(4), sample_index=1)
        if is_forked:
            driver.add(fork_rows=u32(1), fork_parents=u32(0))
            driver.step({0: 10})
        else:
            driver.step({0: 10, 1: 10})
        tokens.append([driver.rows[row].tokens[10] for row in (0, 1)])
    assert tokens[0] == tokens[1]


def test_steps_in_flight_do_not_change_tokens(qwen3):
    """Steps launched before the previous one is read give the same tokens, history and block contents."""
    seen = []
    for is_pipelined in (False, True):
        runner = load(qwen3, block_size=4)
        driver = DeviceDriver(runner)
        if is_pipelined:
            # No step settles before the end, as on a device that is slower than its host.
            runner._settle_finished = lambda: None
        for row, prompt in enumerate(small_prompts([4, 5])):
            driver.open(row, prompt, seeded(row))
        driver.step({0: 4, 1: 5})
        driver.decode([1, 0], 5)
        driver.add(commit_blocks=u32(*driver.rows[0].blocks[:2]), commit_digests=[b"a" * 16, b"b" * 16])
        driver.decode([0], 1)
        known = runner._rows.tokens[1, 5 : len(driver.rows[1].tokens)].tolist()
        assert (known[-1] == PENDING) == is_pipelined
        blocks = [(ids.tolist(), hashes, tokens.tolist()) for ids, hashes, tokens in runner.committed_blocks()]
        assert blocks[0][2] == [driver.rows[0].tokens[:4], driver.rows[0].tokens[4:8]]
        assert runner._rows.tokens[1, : len(driver.rows[1].tokens)].tolist() == driver.rows[1].tokens
        seen.append((driver.rows[0].tokens, driver.rows[1].tokens, blocks))
    assert seen[0] == seen[1]


def test_a_reopened_row_keeps_its_own_history(qwen3):
    runner = load(qwen3)
    driver = DeviceDriver(runner)
    runner._settle_finished = lambda: None
    first, second = small_prompts([6, 6])
    driver.open(0, first)
    driver.step({0: 6})
    driver.close(0)
    driver.open(0, second, output=[11])
    driver.step({0: 7})
    list(runner.committed_blocks())
    assert runner._rows.tokens[0, :8].tolist() == driver.rows[0].tokens


def test_bad_rows_fail_alone(qwen3):
    driver = DeviceDriver(load(qwen3))
    good, bad = small_prompts([20, 4])
    driver.open(0, good)
    driver.open(1, bad)
    driver.step({0: 20, 1: 4})
    runner = driver.runner
    with torch.inference_mode():
        runner._pool.tensors[0][:, :, driver.rows[1].blocks[0]] = float("nan")
    output = driver.step({0: 1, 1: 1})
    assert [(error.row, error.code) for error in output.errors] == [(1, RowErrorCode.NAN)]
    assert output.rows.tolist() == [0]
    driver.close(1)
    output = driver.step({0: 1})
    assert output.errors == []
    driver.add(slot_mapping=u32(5))
    assert driver.step({0: 1}).errors[0].code is RowErrorCode.BAD_INPUT


def test_poisoned_blocks_are_never_read(qwen3):
    driver = DeviceDriver(load(qwen3))
    with torch.inference_mode():
        driver.runner._pool.tensors[0].fill_(float("nan"))
    run_mixed(driver)
    check_against(load_reference(qwen3), driver, [0, 1, 2])


def test_copied_blocks_have_equal_contents(qwen3):
    runner = load(qwen3)
    driver = DeviceDriver(runner)
    (prompt,) = small_prompts([16])
    driver.open(0, prompt)
    driver.prefill(0)
    source, target = driver.rows[0].blocks[0], driver.free.pop()
    driver.add(copy_src=u32(source), copy_dst=u32(target))
    driver.step({0: 1})
    driver.add(commit_blocks=u32(target), commit_digests=[b"x" * 16])
    driver.step({0: 1})
    assert torch.equal(runner._pool.tensors[0][:, :, source], runner._pool.tensors[0][:, :, target])
    ((ids, _, tokens),) = runner.committed_blocks()
    assert ids.tolist() == [target]
    assert tokens.tolist() == [prompt]


def test_rows_of_a_step_that_runs_out_of_memory_fail(qwen3, monkeypatch):
    driver = DeviceDriver(load(qwen3))
    driver.open(0, small_prompts([5])[0])
    compute = driver.runner._compute
    with monkeypatch.context() as patch:
        patch.setattr(compute, "run", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
        output = driver.step({0: 5})
        assert [error.code for error in output.errors] == [RowErrorCode.INTERNAL]
        driver.step({0: 5})
        with pytest.raises(torch.OutOfMemoryError):
            driver.step({0: 5})
    assert np.array_equal(driver.step({0: 5}).rows, [0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_other_device_errors_are_not_treated_as_out_of_memory(qwen3, monkeypatch, num_ranks):
    """Other errors end the worker. With several ranks, out-of-memory also ends it: the other ranks have continued."""
    runner = load(qwen3)
    driver = DeviceDriver(runner)
    driver.open(0, small_prompts([5])[0])
    monkeypatch.setattr(runner._group, "size", num_ranks)
    monkeypatch.setattr(runner._group, "send", lambda message: None)
    message = "CUDA error: device-side assert triggered" if num_ranks == 1 else "CUDA error: out of memory"
    monkeypatch.setattr(runner._compute, "run", lambda *_, **__: (_ for _ in ()).throw(torch.AcceleratorError(message)))
    with pytest.raises(torch.AcceleratorError, match=message):
        driver.step({0: 5})


# The interpreter takes long for whole models, so one layer, and most cases are left to the tests of the kernels.
@pytest.mark.parametrize("name", ["all", *(pytest.param(n, marks=pytest.mark.deep) for n in CASES if n != "all")])
def test_processed_rows_get_the_same_tokens_at_any_position(tmp_path, name):
    folder = make_model(tmp_path, "qwen3", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})
    driver = DeviceDriver(load(folder))
    whole = tokens_of(driver, CASES[name])
    assert whole == tokens_of(Driver(ModelRunner(EngineConfig(folder, "float32", num_blocks=64))), CASES[name])
    for position in (1, 5):
        assert tokens_of(driver, CASES[name], whole[:position]) == whole


# In torch: rows of the kernels are compared in test_process_kernels.py.
@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.deep)])
def test_processed_rows_do_not_affect_each_other(tmp_path, kernels):
    folder = make_model(tmp_path, "qwen3", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})
    driver = DeviceDriver(load(folder, kernels=kernels))
    check_batch(driver, [CASES["all"], CASES["none"], CASES["min_tokens"], seeded_case("frequency_penalty")])
    check_fork(driver, "repetition_penalty")
    check_all_tokens_excluded(driver)


# The interpreter needs several seconds for each, and all use the same masking kernel. One layer is enough.
@pytest.mark.parametrize(
    "name", ["top_k", *(pytest.param(n, marks=pytest.mark.deep) for n in ("greedy", "seeded", "top_p"))]
)
def test_banned_ids_are_not_sampled_before_their_position(tmp_path, name):
    folder = make_model(tmp_path, "qwen3", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})
    check_banned_ids(DeviceDriver(load(folder)), SAMPLINGS[name])
