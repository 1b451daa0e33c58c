"""Memory in huge pages (worker_svc/engine/kernels/memory.py)."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from worker_svc.engine.cpu import backend as cpu_backend
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels.memory import (
    HUGE_PAGE,
    aligned_zeros,
    collapse,
    lazy_zeros,
    release_files,
)


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 4097])
def test_memory_is_zero_writable_and_as_long_as_asked(num_bytes: int) -> None:
    memory = lazy_zeros(num_bytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_memory_keeps_its_contents_in_huge_pages() -> None:
    memory = [aligned_zeros(num_bytes) for num_bytes in (100, HUGE_PAGE, 3 * HUGE_PAGE + 5000)]
    generator = torch.Generator().manual_seed(1)
    for zeros in memory:
        zeros.random_(generator=generator)
    before = [zeros.clone() for zeros in memory]
    collapse(memory)
    assert all(map(torch.equal, memory, before))


def test_the_weights_of_a_loaded_model_move_to_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background: a load does not wait for huge pages, which a virtual machine may have to get from its host."""
    moved: queue.SimpleQueue[Sequence[torch.Tensor]] = queue.SimpleQueue()
    monkeypatch.setattr(cpu_backend, "collapse", moved.put)
    backend = make_backend("cpu", 1, "exact")
    linears = [backend.make_linear(torch.zeros(32, 64), None) for _ in range(2)]
    backend.end_load()
    (memory,) = moved.get(timeout=60)
    assert memory.data_ptr() == linears[0].packed.data_ptr()
    assert len(memory) == sum(len(linear.packed) for linear in linears)
    backend.end_load()
    assert moved.get(timeout=60) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
@pytest.mark.parametrize("is_changed", [False, True])
def test_released_files_keep_their_contents(tmp_path: Path, is_changed: bool) -> None:
    link = tmp_path / "weights.safetensors"
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 4096)
    link.symlink_to(tmp_path / "blob")  # like a file in the cache of the Hub
    tensor = torch.from_file(str(link), shared=False, size=1 << 20, dtype=torch.uint8)
    if is_changed:
        tensor[:9] = 1
    before = tensor.clone()
    assert resident_of(link) >= 1 << 20
    release_files([link])
    assert (resident_of(link) == 0) is not is_changed
    assert torch.equal(tensor, before)


def resident_of(path: Path) -> int:
    """Bytes of the mappings of a file."""
    mapping = re.compile(rf"^[0-9a-f]+-.* {re.escape(str(path.resolve()))}\n(?s:.*?)^Rss: +(\d+) kB", re.MULTILINE)
    return sum(int(kib) << 10 for kib in mapping.findall(Path("/proc/self/smaps").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
def test_a_loaded_model_holds_its_weights_once_and_no_tables_of_grammars() -> None:
    code = """
import sys
from pathlib import Path
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
folder = Path("client/quire_client/demo_model").resolve()
runner = ModelRunner(EngineConfig(folder, num_blocks=4, max_model_len=32))
smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
of_weights = [mapping for mapping in smaps if str(folder) in mapping]
assert of_weights and all("Rss:                   0 kB" in mapping for mapping in of_weights), of_weights
assert "llguidance" not in sys.modules
assert runner.memory["weights"] > 1 << 20, runner.memory
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
