"""Pools of one model must be able to serve under one scheduler, and a model must get whole to where they read it."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python.errors import HelmError

from scheduler_svc.worker_pool import SHARED_FACTS
from tests.chart.chart import render

GPU = {"gpuCount": 1, "determinism": "best_effort"}
# Two values of a pool that make workers differ in a fact, with what else both pools have.
DIFFERENT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dtype": ("float32", "bfloat16", {}),
    "quantize": ("", "int8", {}),
    "kvCacheDtype": ("auto", "fp8", GPU),
    "determinism": ("exact", "best_effort", {}),
    "gpuCount": (0, 1, {}),
    "executor": ("model", "sim", {}),
    "blockSize": (16, 32, {}),
    "maxModelLen": (0, 64, {}),
    "kvCacheMemory": ("1G", "2G", {}),
    "numBlocks": (0, 8, {}),
}
# Which values of a pool decide each fact. Of the others decides `models`, which a pool only names.
VALUES_OF_FACTS = {
    "model": (),
    "dtype": ("dtype",),
    "quantization": ("quantize",),
    "kv_cache_dtype": ("kvCacheDtype",),
    "determinism": ("determinism",),
    "numerics": ("gpuCount",),
    "revision": ("executor",),
    "block_size": ("blockSize",),
    "max_model_len": ("maxModelLen", "kvCacheMemory", "numBlocks"),
    "vocab_size": (),
    "bundle_digest": (),
    "eos_token_ids": (),
}


def test_no_fact_of_schedulers_is_forgotten() -> None:
    assert VALUES_OF_FACTS.keys() == set(SHARED_FACTS)
    assert {name for names in VALUES_OF_FACTS.values() for name in names} == DIFFERENT.keys()


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["", "reversed"])
def test_pools_that_a_scheduler_would_refuse_are_refused(name: str, is_reversed: bool) -> None:
    one, other, common = DIFFERENT[name]
    values = (other, one) if is_reversed else (one, other)
    entries = [{"name": f"p{i}", "model": "demo", **common, name: value} for i, value in enumerate(values)]
    with pytest.raises(HelmError, match=name):
        render({"workers": entries})


def test_pools_of_several_models_may_differ() -> None:
    one, other, common = DIFFERENT["blockSize"]
    entries = [{"name": f"p{i}", "model": f"m{i}", **common, "blockSize": size} for i, size in enumerate((one, other))]
    assert render({"models": [{"name": "m0"}, {"name": "m1"}], "workers": entries}).has("StatefulSet")


def test_pools_of_other_sizes_serve_together_with_one_length() -> None:
    sizes = [{"name": "big", "kvCacheMemory": "48G"}, {"name": "small", "kvCacheMemory": "4G"}]
    defaults = GPU | {"model": "demo", "maxModelLen": 16384}
    objects = render({"workerDefaults": defaults, "workers": [{"model": "demo"} | size for size in sizes]})
    for name in ("worker-big", "worker-small"):
        args = objects.get("StatefulSet", name)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--max-model-len=16384" in args
