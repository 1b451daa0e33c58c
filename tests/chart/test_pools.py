"""Pools of one model must be accepted by one scheduler, and downloads of a model must be complete."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm_python.chart import values_from_yaml
from helm_python.errors import HelmError

from scheduler_svc.workers.agreement import SHARED_FACTS
from tests.chart.chart import ROOT, SCENARIOS, read_values, render
from tests.chart.test_docs import PAGES, blocks
from tests.chart.test_values import all_values

GPU = {"gpuCount": 1, "determinism": "best_effort"}
# Two values of a setting that must be equal for all workers, and the other values of both pools.
DIFFERENT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dtype": ("float32", "bfloat16", {}), "quantize": ("", "int8", {}), "kvCacheDtype": ("auto", "fp8", GPU),
    "determinism": ("exact", "best_effort", {}), "gpuCount": (0, 1, {}), "nodesPerWorker": (1, 2, {"gpuCount": 2}),
    "backend": ("", "reference", {}), "executor": ("model", "sim", {}), "blockSize": (16, 32, {}),
    "maxModelLen": (0, 64, {}), "kvCacheMemory": ("1G", "2G", {}), "numBlocks": (0, 8, {}),
}  # fmt: skip
# By shared fact: the values of a pool that determine it. The other facts depend on `models`.
VALUES_OF_FACTS = {
    "model": (), "dtype": ("dtype",), "quantization": ("quantize",), "kv_cache_dtype": ("kvCacheDtype",),
    "determinism": ("determinism",), "numerics": ("gpuCount", "nodesPerWorker", "backend"), "weights_digest": (),
    "revision": ("executor",), "block_size": ("blockSize",),
    "max_model_len": ("maxModelLen", "kvCacheMemory", "numBlocks"), "vocab_size": (), "bundle_digest": (),
    "eos_token_ids": (), "attention_window": (), "encoder": (),
}  # fmt: skip


def test_every_shared_fact_has_its_values() -> None:
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


def test_pools_of_different_sizes_are_accepted_with_one_length() -> None:
    sizes = [{"name": "big", "kvCacheMemory": "48G"}, {"name": "small", "kvCacheMemory": "4G"}]
    defaults = GPU | {"model": "demo", "maxModelLen": 16384}
    objects = render({"workerDefaults": defaults, "workers": [{"model": "demo"} | size for size in sizes]})
    for name in ("worker-big", "worker-small"):
        args = objects.get("StatefulSet", name)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--max-model-len=16384" in args


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_upgrade_guide_and_the_values_name_shared_values(name: str) -> None:
    guide = (ROOT / "docs" / "upgrade.md").read_text()
    section = guide.partition("## Values that all pods of a model share\n")[2].partition("\n## ")[0]
    assert f"`{name}`" in section
    (comment,) = [value.comment for value in all_values() if value.path == f"workerDefaults.{name}"]
    assert "docs/upgrade.md" in comment


# -- downloads ---------------------------------------------------------------------------------------------------------


def downloads() -> list[Any]:
    """Every `download.command` of the scenarios and the guides, with the folder of its model."""
    texts = {path.stem: read_values(path) for path in SCENARIOS}
    texts |= {
        f"{page.stem}-{i}": dict(values_from_yaml(text))
        for page in PAGES
        for i, text in enumerate(blocks(page, "yaml"))
    }
    return [
        pytest.param(model["download"]["command"], model["path"], id=name)
        for name, values in texts.items()
        for model in values.get("models", [])
        if "command" in model.get("download", {})
    ]


def test_there_are_downloads() -> None:
    assert len(downloads()) == 2


class Download:
    """The command with a folder as /models, and fake tools that write a small file and exit with a given code."""

    TOOLS = ("aws", "pip", "python")

    def __init__(self, command: list[str], model: str, folder: Path) -> None:
        self.model = folder / model.removeprefix("/")
        self._command = [word.replace("/models/", f"{folder}/models/") for word in command]
        self._tools, self._calls = folder / "bin", folder / "calls"
        self._tools.mkdir()

    def run(self, *, fails: bool) -> int:
        self._calls.unlink(missing_ok=True)
        for name in self.TOOLS:
            status = int(fails and name != "pip")
            tool = self._tools / name
            tool.write_text(
                f"#!/bin/sh\necho {name} >>{self._calls}\nmkdir -p {self.model}\ntouch {self.model}/config.json\n"
                f"exit {status}\n"
            )
            tool.chmod(0o755)
        environment = {"PATH": f"{self._tools}:{os.environ['PATH']}"}
        return subprocess.run(self._command, env=environment, timeout=60).returncode

    @property
    def was_called(self) -> bool:
        return self._calls.exists()


@pytest.mark.parametrize(("command", "model"), downloads())
def test_a_failed_download_is_retried(command: list[str], model: str, tmp_path: Path) -> None:
    download = Download(command, model, tmp_path)
    for _ in range(2):
        assert download.run(fails=True) != 0
        assert download.was_called
    assert download.run(fails=False) == 0
    assert download.was_called


@pytest.mark.parametrize(("command", "model"), downloads())
def test_a_complete_download_exits_at_once(command: list[str], model: str, tmp_path: Path) -> None:
    download = Download(command, model, tmp_path)
    assert download.run(fails=False) == 0
    assert download.run(fails=True) == 0
    assert not download.was_called
