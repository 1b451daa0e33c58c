"""Pooled rows of the GPU engine: embeddings, logits of ids and classes against transformers; their independence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from step_protocol.types import Pooling, PoolingKind, PoolingTask, RowErrorCode
from tests.gpu.builders import DEVICE
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.adapters import load_merged, make_adapter, targets_of
from tests.unit.engine.driver import seeded, u32
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_adapters import place
from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.collectives.group import ALONE
from worker_svc.engine.gpu.step.logprobs import Scorer
from worker_svc.engine.gpu.step.pooling import DevicePooling
from worker_svc.engine.pooling.weights import PoolingWeights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LAST, MEAN, CLS = (Pooling(PoolingTask.VECTOR, kind) for kind in (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.CLS))
CLASSES = Pooling(PoolingTask.CLASSES)
ANSWERS = Pooling(PoolingTask.LOGITS, token_ids=u32(5, 96, 0))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL, **HEADS_4_2)


def states_of(model, ids):
    """The hidden states [n, dim] of a text after the final norm."""
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def check(found, expected):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_vectors_and_logits_match_transformers(qwen3):
    """All kinds of pooling and rows that sample in the same steps, with prompts in chunks."""
    driver, reference = DeviceDriver(load(qwen3)), load_reference(qwen3)
    first, second, third, fourth, fifth = small_prompts([22, 19, 9, 12, 7])
    normal = Pooling(PoolingTask.VECTOR, PoolingKind.MEAN, normalize=True, dimensions=10)
    driver.open(0, first, pooling=MEAN)
    driver.open(1, second, pooling=CLS)
    driver.open(2, third, logprobs=1, prompt_logprobs=1)
    driver.open(3, fourth, pooling=ANSWERS)
    driver.step({0: 10, 2: 4, 1: 18, 3: 11})
    assert not driver.pooled
    driver.step({0: 7, 2: 5, 3: 1})
    driver.step({1: 1, 2: 1})  # the first token was computed before
    driver.step({0: 5, 2: 1})
    for row in (0, 1, 3):
        driver.close(row)
    driver.open(1, fifth, pooling=LAST)
    driver.open(0, fifth, pooling=normal)  # nothing of the former row is left
    driver.step({1: 7, 0: 7})
    assert driver.errors == []
    states = [states_of(reference.model, ids) for ids in (first, second, fifth)]
    with torch.no_grad():
        logits = reference(torch.tensor([fourth])).logits[0, -1]
    short = states[2].mean(0)[:10]
    check(driver.pooled[3], logits[[5, 96, 0]])
    check(driver.pooled[1], states[2][-1])
    check(driver.pooled[0], short / short.norm())
    alone = DeviceDriver(load(qwen3))
    for row, (ids, pooling) in enumerate(((first, MEAN), (second, CLS))):
        alone.open(row, ids, pooling=pooling)
    alone.step({0: 22, 1: 19})
    check(alone.pooled[0], states[0].mean(0))
    check(alone.pooled[1], states[1][0])
    alone.open(2, third)
    alone.prefill(2)
    alone.decode([2], 2)
    assert driver.rows[2].tokens == alone.rows[2].tokens  # the row that sampled beside pooled rows


def test_numbers_do_not_depend_on_batch_and_chunks(tmp_path):
    folder = make_embedder(tmp_path / "model", "mean", dense=12)
    ids, other = small_prompts([37, 11])
    found = []
    for chunks in ([37], [1, 20, 16], [16, 21]):
        driver = DeviceDriver(load(folder, determinism="exact"))
        driver.open(3, ids, pooling=MEAN)
        driver.open(1, ids, pooling=LAST)
        for chunk in chunks:
            if len(chunks) == 3:
                driver.open(0, other, pooling=MEAN)
            driver.step(({0: 11} if len(chunks) == 3 else {}) | {1: chunk, 3: chunk})
            if len(chunks) == 3:
                driver.close(0)
        assert driver.errors == []
        found.append((driver.pooled[3].tobytes(), driver.pooled[1].tobytes()))
    assert found[1:] == found[:1] * 2


def make_embedder(folder: Path, mode: str, dense: int) -> Path:
    """A decoder without head as sentence-transformers saves it, with a dense layer."""
    make_model(folder.with_name("base"), "qwen3", **SMALL, **HEADS_4_2)
    base = transformers.AutoModel.from_pretrained(folder.with_name("base"))
    base.save_pretrained(folder)
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in types.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"1_Pooling": {"pooling_mode": mode}, "2_Dense": {"in_features": 32, "out_features": dense}}
    for path, fields in settings.items():
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "linear.weight": torch.randn(dense, 32, generator=generator),
        "linear.bias": torch.randn(dense, generator=generator),
    }
    safetensors.torch.save_file(tensors, folder / "2_Dense/model.safetensors")
    return folder


def test_a_model_without_head_returns_the_output_of_its_dense_layer(tmp_path):
    folder = make_embedder(tmp_path / "model", "mean", dense=12)
    driver = DeviceDriver(load(folder, determinism="exact"))
    info = driver.runner.info.pooling
    assert (info.kind, info.dimensions, info.normalize, info.generates) == (PoolingKind.MEAN, 12, True, False)
    ids = small_prompts([20])[0]
    driver.open(0, ids, pooling=Pooling(PoolingTask.VECTOR, PoolingKind.MEAN, normalize=True))
    driver.open(1, ids, seeded(1))
    driver.open(2, ids, pooling=ANSWERS)
    driver.open(3, ids, pooling=CLASSES)
    driver.step({0: 15})
    driver.step({0: 5})
    assert {error.row: error.message for error in driver.errors} == {
        1: "this model generates no tokens", 2: "the model has no logits", 3: "the model has no classification head",
    }  # fmt: skip
    dense = safetensors.torch.load_file(folder / "2_Dense/model.safetensors")
    states = states_of(transformers.AutoModel.from_pretrained(folder), ids)
    expected = torch.tanh(dense["linear.weight"] @ states.mean(0) + dense["linear.bias"])
    check(driver.pooled[0], expected / expected.norm())


def test_classes_match_transformers(tmp_path):
    make_model(tmp_path / "base", "qwen3", **SMALL, **HEADS_4_2)
    torch.manual_seed(4)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model.save_pretrained(tmp_path / "model")
    driver = DeviceDriver(load(tmp_path / "model"))
    assert driver.runner.info.pooling.num_classes == 1
    texts = small_prompts([1, 18])
    for row, ids in enumerate(texts):
        driver.open(row, ids, pooling=CLASSES)
    driver.step({0: 1, 1: 11})
    driver.step({1: 7})
    assert driver.errors == []
    for row, ids in enumerate(texts):
        with torch.no_grad():
            check(driver.pooled[row], model(torch.tensor([ids])).logits[0])


def test_rows_with_and_without_an_adapter_are_pooled_in_one_step(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3", **SMALL, **HEADS_4_2)
    adapter = make_adapter(folder, tmp_path / "adapter", seed=1, r=4, target_modules=targets_of("qwen3"))
    driver = DeviceDriver(load(folder, max_adapters=1, max_adapter_rank=8))
    ids = small_prompts([20])[0]
    driver.open(0, ids, adapter=place(driver.runner, "one", adapter), pooling=MEAN)
    driver.open(1, ids, pooling=MEAN)
    driver.step({0: 9, 1: 20})
    driver.step({0: 11})
    assert driver.errors == []
    for row, reference in enumerate((load_merged(folder, adapter), load_reference(folder))):
        check(driver.pooled[row], states_of(reference.model, ids).mean(0))


def test_a_row_with_nan_fails_alone(qwen3):
    driver = DeviceDriver(load(qwen3))
    good, bad = small_prompts([8, 20])
    with torch.inference_mode():
        driver.runner._compute._model.parts.embedding[bad[3]] = torch.nan
    good = [token if token != bad[3] else 5 for token in good]
    for row, (ids, pooling) in enumerate(((good, MEAN), (bad, MEAN), (bad, LAST), (bad, ANSWERS))):
        driver.open(row, ids, pooling=pooling)
    driver.step({0: 8, 1: 8, 2: 20, 3: 20})
    driver.step({1: 12})
    assert [(error.row, error.code) for error in driver.errors] == [
        (2, RowErrorCode.NAN), (3, RowErrorCode.NAN), (1, RowErrorCode.NAN),
    ]  # fmt: skip
    assert set(driver.pooled) == {0}


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer"])
def test_sums_of_the_largest_states_do_not_overflow(kind):
    size, max_tokens = 7, 1 << 17
    weight = torch.tensor([3.0, -2, 0.5, 0.25, 1, 1, 1], device=DEVICE)
    norm = Norm(weight, torch.full_like(weight, -0.5) if kind == "layer" else None, 1e-6, kind)
    weights = PoolingWeights((), None, PoolingKind.LAST, size, 97, generates=True)
    pooling = DevicePooling(weights, norm, max_tokens, 2, Scorer(range(97), ALONE, DEVICE))
    largest = math.sqrt(size) * (3 + (kind == "rms_offset")) + (0.5 if kind == "layer" else 0)
    state = torch.linspace(-largest, largest, size, device=DEVICE).expand(1 << 12, size)
    rows = torch.ones(len(state), dtype=torch.int64, device=DEVICE)
    for _ in range(max_tokens // len(state)):
        pooling._add(state, rows)
    found = pooling._means(rows[:1], np.array([max_tokens]))
    torch.testing.assert_close(found[0], state[0], rtol=1e-6, atol=1e-6)
