"""Weights as int8: the kernel against plain torch, rows that stay alone, and how little the answers move."""

from __future__ import annotations

import pytest
import torch
from quire_client.demo import demo_model_dir
from transformers import AutoTokenizer

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import make_model
from tests.unit.engine.test_engine_models import prompts
from worker_svc.engine import cpu_backend
from worker_svc.engine.backend import BackendUnavailableError, make_backend
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu_backend import CpuBackend, declare
from worker_svc.engine.kernel_linear import BFLOAT16, INT8
from worker_svc.engine.kernels.build import load_kernels
from worker_svc.engine.linear import Int8Linear, PackedLinear
from worker_svc.engine.model_runner import ModelRunner

SHAPES = [(1024, 256), (57, 33), (96, 40), (1000, 2000), (64, 8192), (31, 3)]
QUESTIONS = (
    "What does json.dumps do?", "What does len do?", "Explain str.upper.", "What does os.path.join do?",
    "What is the csv module?", "What does heapq.heappush do?", "What is ZeroDivisionError?", "Thank you!",
    "Who are you?", "What does shutil.copytree do?",
)  # fmt: skip


def supports(kind):
    return bool(declare(load_kernels()).quire_linear_supports(kind))


needs_int8 = pytest.mark.skipif(not supports(INT8), reason="no AVX512-VNNI here")
needs_bfloat16 = pytest.mark.skipif(not supports(BFLOAT16), reason="no AVX512-BF16 here")


@pytest.fixture
def backend_name():
    """The backend that computes int8 here."""
    return "cpu" if supports(INT8) else "reference"


def make_layer(out_size, in_size, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype)
    return weight, bias, (torch.randn(131, in_size, generator=generator) * 3).to(dtype)


def assert_rows_are_alone(linear, x, expected):
    for start, rows in ((0, 1), (7, 1), (1, 2), (3, 11), (0, 12), (5, 13), (2, 64), (0, 130)):
        part = linear(x[start : start + rows].contiguous())
        assert torch.equal(part, expected[start : start + rows]), rows


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_int8_kernel_is_plain_torch_bit_for_bit(out_size, in_size, dtype):
    weight, bias, x = make_layer(out_size, in_size, dtype)
    weight[0], x[5] = 0, 0
    for threads in (1, 2):
        linear = make_backend("cpu", threads, "exact", "int8").make_linear(weight, bias)
        expected = Int8Linear(weight, bias)(x)
        assert torch.equal(linear(x), expected)
        assert_rows_are_alone(linear, x, expected)


@needs_bfloat16
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_bfloat16_kernel_matches_onednn(out_size, in_size):
    weight, bias, x = make_layer(out_size, in_size, torch.bfloat16)
    for threads in (1, 2):
        linear = make_backend("cpu", threads, "exact").make_linear(weight, bias)
        found, expected = linear(x), PackedLinear(weight, bias)(x)
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
        assert_rows_are_alone(linear, x, found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_what_is_not_finite_stays_so_and_in_its_row(name, value):
    if name == "cpu" and not supports(INT8):
        pytest.skip("no AVX512-VNNI here")
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
def test_a_row_alone_is_the_row_among_64_and_in_chunks(folder, backend_name, dtype):
    runner = make_runner(folder, dtype=dtype, quantize="int8", backend=backend_name)
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


def test_logits_stay_near_float32(folder, backend_name):
    (prompt,) = prompts([60])
    exact = decode_alone(make_runner(folder, dtype="float32"), prompt, 0).logits[0, 60]
    rounded = decode_alone(
        make_runner(folder, dtype="float32", quantize="int8", backend=backend_name), prompt, 0
    ).logits[0, 60]
    assert 0.001 < (rounded - exact).norm() / exact.norm() < 0.06


def test_the_demo_model_still_knows_its_answers(backend_name):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    answers = []
    for quantize in (None, "int8"):
        runner = make_runner(demo_model_dir(), quantize=quantize, backend=backend_name)
        driver = Driver(runner)
        for row, question in enumerate(QUESTIONS):
            messages = [{"role": "user", "content": question}]
            driver.open(row, tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
            driver.prefill(row)
        driver.decode(list(range(len(QUESTIONS))), 12)
        answers.append([state.output for state in driver.rows.values()])
    num_equal = sum(plain == rounded for plain, rounded in zip(*answers, strict=True))
    assert num_equal >= len(QUESTIONS) - 2


def test_workers_that_quantize_are_of_another_revision(folder):
    plain, rounded = (make_runner(folder, backend="reference", quantize=q).info for q in (None, "int8"))
    assert (plain.quantize, rounded.quantize) == (None, "int8")
    assert plain.revision != rounded.revision


def test_a_processor_without_the_instructions_is_refused(folder, monkeypatch):
    class OldProcessor:
        def __init__(self, library):
            self._library = library
            self.quire_linear_supports = lambda kind: 0

        def __getattr__(self, name):
            return getattr(self._library, name)

    monkeypatch.setattr(cpu_backend, "load_kernels", lambda: OldProcessor(load_kernels()))
    monkeypatch.setattr(cpu_backend, "declare", lambda library: library)
    with pytest.raises(BackendUnavailableError, match=r"int8.*AVX512-VNNI.*leave it unset"):
        CpuBackend(1, "exact", "int8")
    assert isinstance(CpuBackend(1, "exact").make_linear(torch.eye(8, dtype=torch.bfloat16), None), PackedLinear)


def test_a_layer_too_wide_for_32_bits_is_refused(backend_name):
    with pytest.raises(ValueError, match="65536 inputs"):
        make_backend(backend_name, 1, "exact", "int8").make_linear(torch.zeros(1, 70_000), None)


@pytest.mark.parametrize(("quantize", "backend"), [("int4", "cpu"), ("int8", "cuda")])
def test_settings_that_cannot_be_are_named(tmp_path, quantize, backend):
    with pytest.raises(ValueError, match="quantize"):
        EngineConfig(tmp_path, quantize=quantize, backend=backend)
