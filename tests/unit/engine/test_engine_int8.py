"""int8 weights: the kernel against plain torch, independence of rows, and accuracy."""

from __future__ import annotations

import pytest
import torch
from quire_client.demo import demo_model_dir
from transformers import AutoTokenizer

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import make_model
from tests.unit.engine.test_engine_models import prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels.build import LINEAR_SOURCES, load_kernels_built_with
from worker_svc.engine.kernels.linear import INT8, KernelLinear
from worker_svc.engine.kernels.machine import instruction_sets
from worker_svc.engine.kernels.torch_linear import Int8Linear
from worker_svc.engine.model_runner import ModelRunner

SHAPES = [(1024, 256), (57, 33), (96, 40), (1000, 2000), (64, 8192), (31, 3)]
QUESTIONS = (
    "What does json.dumps do?", "What does len do?", "Explain str.upper.", "What does os.path.join do?",
    "What is the csv module?", "What does heapq.heappush do?", "What is ZeroDivisionError?", "Thank you!",
    "Who are you?", "What does shutil.copytree do?",
)  # fmt: skip


def make_layer(out_size, in_size, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype)
    return weight, bias, (torch.randn(131, in_size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_int8_kernel_equals_plain_torch_bit_for_bit(kernel_build, out_size, in_size, dtype):
    weight, bias, x = make_layer(out_size, in_size, dtype)
    weight[0], weight[1], x[5], x[6] = 0, 1e-37, 0, 1e-37
    for threads in (1, 2):
        linear = make_backend("cpu", threads, "exact", "int8").make_linear(weight, bias)
        assert torch.equal(linear(x), Int8Linear(weight, bias)(x))


@pytest.mark.skipif("avx_vnni" not in instruction_sets(), reason="this processor has no avx_vnni")
def test_int8_kernel_with_avx_vnni_equals_plain_torch():
    kernels = load_kernels_built_with("-mavx2", "-mfma", "-mavxvnni", "-Og", sources=LINEAR_SOURCES)
    for out_size, in_size in SHAPES[:4]:
        weight, bias, x = make_layer(out_size, in_size, torch.bfloat16)
        assert torch.equal(KernelLinear(kernels, INT8, weight, bias, 1)(x), Int8Linear(weight, bias)(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_row_that_is_not_finite_affects_no_other_row(kernel_build, name, value):
    weight, _, x = make_layer(40, 50, torch.bfloat16)
    linear = make_backend(name, 1, "exact", "int8").make_linear(weight, None)
    expected = linear(x)
    x[3, 49] = value
    found = linear(x)
    assert not torch.isfinite(found[3]).any()
    assert torch.equal(found[4:], expected[4:])


def make_runner(folder, **settings):
    fields = {"num_blocks": 512, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "threads": 1} | settings
    return ModelRunner(EngineConfig(folder, **fields))


def decode_alone(runner, prompt, steps, chunk=10**6):
    runner.reset_rows()
    driver = Driver(runner)
    driver.open(0, prompt)
    driver.prefill(0, chunk)
    driver.decode([0], steps)
    return driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
    return make_model(tmp_path_factory.mktemp("int8"), "qwen3", num_attention_heads=8, **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_gives_the_same_bits_alone_among_64_and_in_chunks(folder, dtype):
    runner = make_runner(folder, dtype=dtype, quantize="int8")
    prompt, *others = prompts([45, *range(2, 65)])
    alone = decode_alone(runner, prompt, 4)
    in_chunks = decode_alone(runner, prompt, 4, chunk=7)
    runner.reset_rows()
    crowd = Driver(runner)
    for row, mate in enumerate(others):
        crowd.open(row, mate)
    crowd.open(63, prompt)
    crowd.step({row: len(state.tokens) for row, state in crowd.rows.items()})
    crowd.decode(list(crowd.rows), 4)
    for (_, position), logits in alone.logits.items():
        assert torch.equal(in_chunks.logits[0, position], logits)
        assert torch.equal(crowd.logits[63, position], logits)


def test_logits_stay_near_float32(folder):
    (prompt,) = prompts([60])
    exact = decode_alone(make_runner(folder, dtype="float32"), prompt, 0).logits[0, 60]
    rounded = decode_alone(make_runner(folder, dtype="float32", quantize="int8"), prompt, 0).logits[0, 60]
    assert 0.001 < (rounded - exact).norm() / exact.norm() < 0.06


def test_the_demo_model_keeps_its_answers():
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    answers = []
    for quantize in (None, "int8"):
        runner = make_runner(demo_model_dir(), quantize=quantize)
        driver = Driver(runner)
        for row, question in enumerate(QUESTIONS):
            messages = [{"role": "user", "content": question}]
            driver.open(row, tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
            driver.prefill(row)
        driver.decode(list(range(len(QUESTIONS))), 12)
        answers.append([state.output for state in driver.rows.values()])
    num_equal = sum(plain == rounded for plain, rounded in zip(*answers, strict=True))
    assert num_equal >= len(QUESTIONS) - 2


def test_quantization_changes_the_revision(folder):
    plain, rounded = (make_runner(folder, backend="reference", quantize=q).info for q in (None, "int8"))
    assert (plain.quantize, rounded.quantize) == (None, "int8")
    assert plain.revision != rounded.revision


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_layer_too_wide_for_32_bits_is_refused(name):
    with pytest.raises(ValueError, match=r"at most 65536 inputs.*a layer with 70000"):
        make_backend(name, 1, "exact", "int8").make_linear(torch.zeros(1, 70_000), None)


@pytest.mark.parametrize(("quantize", "backend"), [("int4", "cpu"), ("fp8", "cpu")])
def test_impossible_settings_are_named(tmp_path, quantize, backend):
    with pytest.raises(ValueError, match="quantize"):
        EngineConfig(tmp_path, quantize=quantize, backend=backend)
