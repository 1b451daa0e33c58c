"""CUDA graphs without CUDA: the launches of a step are recorded with their addresses and scalar arguments, not run.

A replay runs the recorded launches, so values that a step takes from the host stay as they were during recording, as in
a CUDA graph. Uninitialized memory holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}


class FakeRecorder:
    """Records launches and keeps their names per recording, in order."""

    def __init__(self, bytes_per_graph: int = 0) -> None:
        self.recordings: list[list[str]] = []
        self.num_replays = 0
        self.while_serving: list[bool] = []
        self._bytes_per_graph = bytes_per_graph

    def record(self, step: Callable[[], None], *, while_serving: bool = False) -> Callable[[], None]:
        self.while_serving.append(while_serving)
        tape = Tape()
        with tape, noting_kernels(tape):
            step()
        self.recordings.append(tape.names)

        def replay() -> None:
            self.num_replays += 1
            for call in tape.calls:
                call()

        return replay

    def bytes_taken(self) -> int:
        return self._bytes_per_graph * len(self.recordings)


class Tape(TorchDispatchMode):
    """Records operations of torch. Those without side effects also run once, for the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.names: list[str] = []

    def note(self, name: str, call: Callable[[], object]) -> None:
        self.names.append(name)
        self.calls.append(call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.note(func.__name__, lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        result = func(*args, **kwargs)
        if func in EMPTY:
            self.calls.append(lambda: result.fill_(torch.nan) if result.is_floating_point() else result.fill_(-1))
        elif not is_view(result, args):
            self.note(func.__name__, lambda: result.copy_(func(*args, **kwargs)))
        return result


def is_view(result, args) -> bool:
    """Whether the operation returns views of an argument; torch may return several."""
    first = result[0] if isinstance(result, list | tuple) else result
    addresses = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
    return first.untyped_storage().data_ptr() in addresses


@contextmanager
def noting_kernels(tape: Tape):
    original = GridExecutor.__call__

    def note(executor, *args, **kwargs):
        tape.note(executor.fn.__name__, lambda: original(executor, *args, **kwargs))

    GridExecutor.__call__ = note
    try:
        yield
    finally:
        GridExecutor.__call__ = original
