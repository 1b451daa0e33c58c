"""Fixtures of the GPU engine's tests: on a machine with a GPU they run there, elsewhere in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

_numbers = itertools.count()


@pytest.fixture
def plant_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the kernels of a module with those of its source with one place changed."""

    def plant(module: ModuleType, old: str, new: str) -> None:
        source = inspect.getsource(module)
        assert source.count(old) == 1
        name = f"mutant_{next(_numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(name, path)
        mutant = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, mutant)  # dataclasses look their module up
        spec.loader.exec_module(mutant)
        for kernel in vars(module):
            if kernel.endswith("_kernel"):
                monkeypatch.setattr(module, kernel, getattr(mutant, kernel))

    return plant
