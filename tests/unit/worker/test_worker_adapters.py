"""The adapters of a worker: paths that may be loaded, announcements, memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from svc_common.errors import InvalidRequestError, NotConfiguredError
from tests.unit.engine.adapters import make_adapter, targets_of
from tests.unit.engine.models import make_model
from worker_svc.adapters import WorkerAdapters
from worker_svc.engine.adapters.config import AdapterError
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.lifecycle import Lifecycle


@dataclass(frozen=True)
class Content:
    digest: bytes
    num_bytes: int = 1


def read(folder: Path) -> Content:
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder")
    return Content(folder.name.encode().ljust(16))


def make_store(max_resident: int = 2) -> AdapterStore[Content, Content]:
    return AdapterStore(read, lambda content: content, max_resident=max_resident, max_loaded=3)


def make_adapters(folder: Path | None, store: AdapterStore[Content, Content] | None) -> WorkerAdapters:
    return WorkerAdapters(lambda: store, Lifecycle(), folder)


async def test_only_folders_below_the_adapter_dir_are_loaded(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    (root / "good").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    adapters = make_adapters(root, make_store())
    assert (await adapters.load("one", "good")).path == str((root / "good").resolve())
    assert (await adapters.load("one", str(root / "good"))).name == "one"
    for path in ("", ".", "..", "../outside", "link", str(tmp_path / "outside"), "good/../../outside", "a\0b"):
        with pytest.raises(InvalidRequestError, match=r"below"):
            await adapters.load("two", path)
    with pytest.raises(InvalidRequestError, match=r"missing is not a folder"):
        await adapters.load("two", "missing")
    adapters.close()


async def test_without_a_folder_or_a_store_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(NotConfiguredError, match=r"loads adapters only at its start \(--adapter\)"):
        await make_adapters(None, make_store()).load("one", "good")
    for store in (None, make_store(max_resident=0)):
        with pytest.raises(NotConfiguredError, match=r"this worker loads no adapters; start it with --adapter-dir"):
            await make_adapters(tmp_path, store).load("one", "good")


async def test_changes_are_announced(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    store, lifecycle = make_store(), Lifecycle()
    adapters = WorkerAdapters(lambda: store, lifecycle, tmp_path)
    await adapters.load("one", "good")
    assert [adapter.name for adapter in lifecycle.adapters] == ["one"]
    assert lifecycle.changed.is_set()
    await adapters.swap(b"good".ljust(16), [])
    with pytest.raises(InvalidRequestError, match=r"no adapter with digest .* is loaded on this worker"):
        await adapters.swap(bytes(16), [])
    assert await adapters.unload("one")
    assert not await adapters.unload("one")
    assert not lifecycle.adapters
    assert store.num_resident == 0
    adapters.close()


def test_a_swap_that_a_new_lease_interrupts_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    store: AdapterStore[Content, Content]

    def pack(content: Content) -> Content:
        store.reset()  # a scheduler leases the worker meanwhile
        return content

    store = AdapterStore(read, pack, max_resident=1, max_loaded=1)
    digest = store.load("one", tmp_path / "good").digest
    store.swap(digest)
    assert store.find(digest) is None


def test_loading_and_unloading_500_times_leaves_memory_flat(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    folder = make_adapter(model, tmp_path / "adapter", r=32, target_modules=targets_of("qwen3"))
    runner = ModelRunner(EngineConfig(model, "float32", num_blocks=16, max_num_seqs=2, threads=1, max_adapters=2))
    store, process = runner.adapters, psutil.Process()

    def cycle(times: int) -> int:
        for _ in range(times):
            digest = store.load("one", folder).digest
            store.swap(digest)
            assert store.find(digest) is not None
            assert store.unload("one")
        gc.collect()
        return int(process.memory_info().rss)

    before = cycle(100)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert cycle(400) - before < 20 * size  # leaking one copy per cycle would be 400 times the size
    assert (store.num_resident, store.num_bytes, store.num_swaps) == (0, 0, 500)
