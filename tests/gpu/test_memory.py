"""Division of device memory, on a fake device whose steps take given amounts of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from request_fields.sizes import largest_pool
from tests.gpu.driver import load
from tests.gpu.test_runner import HEADS_4_2, SMALL
from tests.unit.engine.models import make_model
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu import loading
from worker_svc.engine.gpu.start import memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MIB = 1 << 20
BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, dim, float32
STEP = 300 * MIB


class Device:
    """A device with memory held by weights and another process, and a model whose steps take given amounts."""

    def __init__(self, total: int = 4096 * MIB, weights: int = 1000 * MIB, others: int = 200 * MIB) -> None:
        self.total, self.weights, self.others = total, weights, others
        self.peak = weights

    def use_cache(self, pool: object) -> None: ...

    def buckets(self) -> list[object]:
        return []

    def warm_up(self, max_tokens: int) -> None:
        if self.weights + self.others + STEP > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 300.00 MiB.\nmore words")
        self.peak = max(self.peak, self.weights + STEP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


@pytest.fixture
def divide(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = parse_config(Checkpoint(folder).config)

    def run(device: Device, **settings: object) -> int:
        monkeypatch.setattr(memory, "make_pool", lambda *_: None)
        meter = {
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda _: setattr(device, "peak", device.weights),
            "memory_allocated": lambda _: device.weights,
            "max_memory_allocated": lambda _: device.peak,
            "mem_get_info": lambda _: (device.total - device.weights - device.others, device.total),
        }
        for name, found in meter.items():
            monkeypatch.setattr(torch.cuda, name, found)
        config = EngineConfig(folder, dtype="float32", backend="cuda", cuda_graphs="off", **settings)
        return memory.divide_memory(config, model, torch.float32, device, torch.device("cuda", 0)).num_blocks

    return run


def test_the_pool_gets_the_memory_that_weights_others_and_the_largest_step_leave(divide):
    assert divide(Device(), gpu_memory_utilization=0.5) == (2048 - 1200 - 300) * MIB // BLOCK
    assert divide(Device(), gpu_memory_utilization=0.9) > divide(Device(), gpu_memory_utilization=0.5)
    assert divide(Device(others=0), gpu_memory_utilization=0.5) == (2048 - 1000 - 300) * MIB // BLOCK


def test_explicit_sizes_are_used_as_given(divide):
    assert divide(Device(), kv_cache_memory=64 * MIB) == 64 * MIB // BLOCK
    assert divide(Device(), kv_cache_memory=64 * MIB, num_blocks=7) == 7


def test_a_pool_is_no_larger_than_a_scheduler_accepts(divide):
    assert divide(Device(total=512 << 30), kv_cache_memory=300 << 30) == largest_pool(16)


def test_too_little_memory_names_the_settings_to_change(divide):
    with pytest.raises(
        ValueError, match=r"^0 bytes are left for the KV cache, but one block takes .*raise gpu_memory_utilization"
    ):
        divide(Device(), gpu_memory_utilization=0.3)
    message = (
        "too little memory for a step of max_num_batched_tokens 8192, max_num_seqs 64; lower one.*Tried to allocate"
    )
    with pytest.raises(ValueError, match=message) as caught:
        divide(Device(weights=3900 * MIB), max_num_batched_tokens=8192)
    assert "more words" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "DeviceDecoder",
            "has too little memory for the weights; raise tensor_parallel_size, or use a smaller dtype or model",
        ),
        ("make_pool", "has too little memory for 64 blocks; lower num_blocks or kv_cache_memory"),
    ],
)
def test_weights_and_pools_that_do_not_fit_name_the_settings_to_change(folder, monkeypatch, part, message):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loading, part, fail)
    with pytest.raises(ValueError, match=message):
        load(folder)
