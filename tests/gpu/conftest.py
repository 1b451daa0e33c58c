"""Fixtures of the GPU engine's tests, which run on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _a_faster_interpreter():
    """Triton's interpreter, which does per call within a kernel what is enough once per launch or once."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    interpreter, done = importlib.import_module("triton.runtime.interpreter"), set()
    patch_lang, call = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.cache
    def languages_of(fn):
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_once(fn):
        if (languages := languages_of(fn)) in done:
            return None
        done.add(languages)
        return patch_lang(fn)

    def launch(executor, *args, **kwargs):
        done.clear()
        return call(executor, *args, **kwargs)

    builtins = functools.cache(lambda package: inspect.getmembers(package, tl.core.is_builtin))

    def patch_builtin(package, builder, scope):
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype))
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        # Checks of each addition for overflow, which no GPU makes.
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(tl.block_type, "__init__", _block_types(tl.block_type.__init__))
        patch.setattr(tl.tensor, "__init__", _tensors())
        patch.setattr(interpreter, "np", _numpy_of_rows())
        yield


def _numpy_dtypes(find: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """`find` with a cache for scalar types and blocks of them."""
    by_name: dict[str, np.dtype] = {}

    def get(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return find(scalar)
        if (found := by_name.get(scalar.name)) is None:
            found = by_name[scalar.name] = find(scalar)
        return found

    return get


def _block_types(make: Callable[..., None]) -> Callable[..., None]:
    """`make` with a cache of what it sets, for blocks of numbers."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        if isinstance(element_ty, tl.pointer_type):
            make(self, element_ty, shape)
            return
        key = (id(element_ty), *[size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if (found := known.get(key)) is None:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))  # it holds element_ty, so that its id stays its own
        else:
            vars(self).update(found)

    return init


def _tensors() -> Callable[..., None]:
    """The constructor of tensors with a cache of their shapes, which are made of many small objects."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if (found := known.get(sizes)) is None:
            shape = tl.tuple([tl.constexpr(size) for size in sizes])
            found = known[sizes] = (tl.constexpr(math.prod(sizes)), shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    return init


def _numpy_of_rows() -> ModuleType:
    """numpy for the interpreter, whose products compute each row alone, as a GPU's tiles do.

    On some processors the bits of a row in a product of the BLAS library depend on the row's place and the other rows.
    """
    module = ModuleType("numpy")
    vars(module).update(vars(np))

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.matmul(a[..., None, :], b[..., None, :, :], dtype=dtype)[..., 0, :]

    vars(module)["matmul"] = matmul
    return module


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
