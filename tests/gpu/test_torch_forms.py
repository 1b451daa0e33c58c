"""`--kernels torch`: the whole GPU runner in plain torch, on a CPU, without Triton's interpreter."""

from __future__ import annotations

import pytest
import triton

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import MODELS, SMALL, run_mixed
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against


@pytest.fixture(autouse=True)
def _no_kernel_is_launched(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("a kernel of Triton was launched")

    monkeypatch.setattr(type(triton.jit(lambda: None)), "__getitem__", refuse)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
def test_mixed_batches_match_transformers(tmp_path, name, determinism):
    architecture, block_size, overrides = MODELS[name]
    folder = make_model(tmp_path, architecture, **(SMALL | overrides))
    settings = {"block_size": block_size, "num_blocks": 256 // block_size, "determinism": determinism}
    driver = DeviceDriver(load(folder, kernels="torch", **settings))
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])
