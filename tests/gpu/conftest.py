"""Fixtures of the GPU engine's tests, which run on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import triton
import triton.language as tl

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _patch_the_language_once_per_launch():
    """Triton's interpreter patches tl at every call within a kernel. Once per launch is enough and much faster."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    interpreter, done = importlib.import_module("triton.runtime.interpreter"), set()
    patch_lang, call = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(fn):
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules in done:
            return None
        done.add(modules)
        return patch_lang(fn)

    def launch(executor, *args, **kwargs):
        done.clear()
        return call(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield


@pytest.fixture
def plant_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the kernels of a module by kernels compiled from its source with one place changed."""

    def plant(module: ModuleType, old: str, new: str) -> None:
        source = inspect.getsource(module)
        assert source.count(old) == 1
        name = f"mutant_{next(_numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(name, path)
        mutant = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, mutant)  # needed by dataclasses
        spec.loader.exec_module(mutant)
        for kernel in vars(module):
            if kernel.endswith("_kernel"):
                monkeypatch.setattr(module, kernel, getattr(mutant, kernel))

    return plant
