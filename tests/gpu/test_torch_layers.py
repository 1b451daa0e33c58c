"""Images, encoders and encoder-decoder models on backend cuda: torch on a CPU stands for the device. Results equal
those of the CPU engine, in exact mode whatever else runs in a step, and nothing leaves the device on the way."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from step_protocol.features import ImageSteps, ImageWork
from step_protocol.types import Pooling, PoolingKind, PoolingTask
from tests.embedding_models import MAX_LENGTH, VOCAB_SIZE, make_cross_encoder
from tests.gpu.driver import DeviceDriver
from tests.gpu.driver import load as load_device
from tests.gpu.fake_graphs import FakeRecorder
from tests.processes.encoder_models import TEXT_SHAPES, make_speech_checkpoint, make_text_checkpoint
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_encoder_decoder import Steps, spoken
from tests.unit.engine.test_engine_images import (
    NONE,
    ONE,
    SCENES,
    TWO,
    check,
    check_deepstack_after_the_last_layers,
    open_row,
    run_scenes,
)
from tests.unit.engine.vision_models import TOWERS, load_vision_reference, make_vision_model
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.engines import load_runner
from worker_svc.engine.gpu import loading, torch_layers
from worker_svc.engine.gpu.torch_layers import TorchLayers
from worker_svc.engine.vision.tower import VisionTower

load = partial(load_device, kernels="torch", determinism="exact", block_size=8, num_blocks=80, max_num_seqs=6)


RECURRENT = ["qwen3_5"]  # towers before recurrent layers, whose rows continue only from snapshots


@pytest.fixture(scope="module", params=sorted(TOWERS.keys() - set(RECURRENT)))
def folder(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("model"), request.param)


def test_images_in_mixed_batches_match_transformers(folder):
    driver = DeviceDriver(load(folder, determinism="best_effort"))
    run_scenes(driver)
    check(load_vision_reference(folder), driver, SCENES)
    assert (driver.runner.images.num_encoded, driver.runner.images.num_hits) == (3, 0)


def test_bits_of_rows_with_images_do_not_depend_on_batch_and_chunks(folder):
    """Nor on where the work on an image is done, on prefix hits, and on whether output is computed again."""
    crowd, alone = DeviceDriver(load(folder)), DeviceDriver(load(folder))
    run_scenes(crowd)
    start = ONE.spans[0].start
    for row, found in SCENES.items():
        open_row(alone, row, found)
        if found is ONE:
            alone.step({row: start})
            for done in (11, 30):
                alone.add(parts=(ImageSteps((ImageWork(row, start, done, 30),)),))
                alone.step({})
        alone.prefill(row)
        alone.decode([row], len(crowd.rows[row].output) - 1)
        assert alone.rows[row].tokens == crowd.rows[row].tokens
    assert all(torch.equal(alone.logits[key], logits) for key, logits in crowd.logits.items())
    open_row(alone, 3, ONE, output=crowd.rows[1].output[:3])
    alone.prefill(3, 10)
    open_row(alone, 5, TWO, shared=alone.rows[2].blocks[:2])
    alone.prefill(5, 9)
    for row, other in ((3, 1), (5, 2)):
        end = max(position for found, position in alone.logits if found == row)
        assert torch.equal(alone.logits[row, end], crowd.logits[other, end])


@pytest.mark.parametrize("name", RECURRENT)
def test_images_before_recurrent_layers_match_transformers(tmp_path, name):
    folder = make_vision_model(tmp_path, name)
    driver = DeviceDriver(load(folder))
    run_scenes(driver)
    check(load_vision_reference(folder).double(), driver, SCENES)


def test_deepstack_after_the_last_layers_matches_transformers(tmp_path):
    folder = make_vision_model(tmp_path, "qwen3_vl", num_hidden_layers=2)
    check_deepstack_after_the_last_layers(folder, DeviceDriver(load(folder)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_kernels_and_graphs_know_the_positions_after_images(tmp_path, monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    folder = make_vision_model(tmp_path, "qwen3_vl", num_hidden_layers=1)
    driver = DeviceDriver(load(folder, kernels="triton", determinism="best_effort", max_num_seqs=3))
    for row, found in ((0, NONE), (1, ONE)):
        open_row(driver, row, found)
        driver.prefill(row)
    replays = recorder.num_replays
    driver.decode([1, 0], 2)
    assert recorder.num_replays == replays + 2
    check(load_vision_reference(folder), driver, {0: NONE, 1: ONE})


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_encoders_give_the_numbers_of_the_cpu_engine(tmp_path, kind):
    make_cross_encoder(tmp_path, kind, num_labels=3)
    rng, found = np.random.default_rng(1), {}
    prompts = [rng.integers(4, VOCAB_SIZE, length).tolist() for length in (1, 70, 33, MAX_LENGTH - 1)]
    for backend, determinism in (("cpu", "exact"), ("cuda", "exact"), ("cuda", "best_effort")):
        config = EngineConfig(
            tmp_path, backend=backend, kernels="torch", dtype="float32", block_size=16, max_num_seqs=4,
            max_num_batched_tokens=512, threads=1, determinism=determinism,
        )  # fmt: skip
        driver = Driver(load_runner(config, lambda _: None))
        for task in (PoolingTask.CLASSES, PoolingTask.VECTOR):
            for row, prompt in enumerate(prompts):
                second = len(prompt) // 2 if kind == "bert" else 0
                driver.open(row, prompt, pooling=Pooling(task, PoolingKind.MEAN, second_text=second))
            driver.step({row: len(prompt) for row, prompt in enumerate(prompts)})
            assert driver.errors == []
            found[backend, determinism, task] = [driver.pooled[row] for row in range(len(prompts))]
            for row in range(len(prompts)):
                driver.close(row)
            if determinism == "exact":
                driver.open(0, prompts[1], pooling=Pooling(task, PoolingKind.MEAN, second_text=second and 35))
                driver.step({0: len(prompts[1])})
                assert np.array_equal(driver.pooled[0], found[backend, determinism, task][1])
                driver.close(0)
    for (_, _, task), values in found.items():
        for mine, expected in zip(values, found["cpu", "exact", task], strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"), ({"quantize": "fp8"}, "quantize is fp8"),
     ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8")],
)  # fmt: skip
def test_settings_of_decoders_are_refused_by_name(tmp_path, settings, name):
    make_cross_encoder(tmp_path, "bert")
    config = EngineConfig(tmp_path, backend="cuda", kernels="torch", **settings)
    with pytest.raises(BackendUnavailableError, match=f"{name}, but encoders .* leave it out"):
        load_runner(config, lambda _: None)


@pytest.fixture
def meta(monkeypatch):
    """A device whose tensors have no content: an operation that mixes them with others fails, as on a GPU, and so does
    the copy to the host."""
    device = torch.device("meta")
    monkeypatch.setattr(torch_layers, "find_device", lambda config: device)
    return device


NO_CONTENT = pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor")


@pytest.mark.usefixtures("meta")
def test_an_encoder_computes_on_its_device(tmp_path):
    make_cross_encoder(tmp_path, "modernbert")
    driver = Driver(load_runner(EngineConfig(tmp_path, backend="cuda", block_size=16), lambda _: None))
    driver.open(0, [5, 6, 7], pooling=Pooling(PoolingTask.CLASSES, PoolingKind.MEAN))
    with NO_CONTENT:
        driver.step({0: 3})


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
def test_an_encoder_decoder_computes_on_its_device(tmp_path, determinism):
    steps = Steps(make_text_checkpoint(tmp_path, TEXT_SHAPES[1]), "cuda", determinism=determinism)
    assert {tensor.device.type for tensor in steps.runner._pool.tensors} == {"meta"}
    steps.run([steps.open(0, [5, 6, 7], [3, 9])], {0: (0, 16, False)})
    with NO_CONTENT:
        steps.run([], {0: (16, 18, True)})


@pytest.mark.usefixtures("meta")
def test_a_speech_model_computes_on_its_device(tmp_path):
    steps = Steps(make_speech_checkpoint(tmp_path), "cuda")
    ids, carried = spoken()
    steps.run([steps.open(0, ids, [3, 20], inputs=(carried,))], {0: (0, 112, False)})
    with NO_CONTENT:
        steps.run([], {0: (112, 114, True)})


def test_a_tower_computes_on_its_device(folder, meta):
    config = parse_config(Checkpoint(folder).config).vision
    tower = VisionTower(Checkpoint(folder), config, TorchLayers(meta, "exact"), torch.float32)
    run = tower.start(TWO.pictures[0].pixels)
    run.advance_to(config.num_layers)
    assert run.result().is_meta


def test_speech_gives_the_logits_of_the_cpu_engine(tmp_path):
    make_speech_checkpoint(tmp_path)
    ids, carried = spoken()
    found = []
    for backend in ("cpu", "cuda"):
        steps = Steps(tmp_path, backend)
        steps.run([steps.open(0, ids, [3, 20], inputs=(carried,))], {0: (0, 112, False)})
        steps.run([], {0: (112, 114, True)})
        found.append(steps.logits[-1])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
