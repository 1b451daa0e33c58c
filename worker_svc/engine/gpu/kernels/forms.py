"""The two forms of a kernel: Triton's, and the same operation in torch with the same arguments.

    @kernel("norm", torch_add_norm, writes="x out")
    def add_norm(x, residual, norm, out): ...        # launches Triton's kernel

`using` chooses the forms of a thread. Torch forms run on every device and in every dtype, without Triton's interpreter;
in exact mode a row does not depend on the others. At the start both forms are compared, and a kernel that fails is
replaced (check.py). Torch forms may wait for the device, so no CUDA graph contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: the function that launches it, its torch form, and the names of the arguments that both write to."""

    name: str
    launch: Callable[..., Any]
    torch_form: Callable[..., Any]
    writes: tuple[str, ...]


ALL = "all kernels"


@dataclass(frozen=True)
class Forms:
    """Which kernels run in torch; the others run in Triton."""

    in_torch: tuple[str, ...] = ()  # names, or ALL
    may_overlap: bool = True  # programmatic dependent launch (launch.py)
    has_one_tile: bool = False  # the linear layer, for every number of rows (linear.py)

    def is_in_torch(self, kernel: Kernel) -> bool:
        return bool(self.in_torch) and (kernel.name in self.in_torch or ALL in self.in_torch)

    def call(self, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
        return (kernel.torch_form if self.is_in_torch(kernel) else kernel.launch)(*args, **kwargs)


TRITON, TORCH = Forms(), Forms((ALL,))
_chosen: ContextVar[Forms] = ContextVar("forms", default=TRITON)


@contextmanager
def using(forms: Forms) -> Iterator[None]:
    """Chooses the forms of the kernels that this thread launches within."""
    token = _chosen.set(forms)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> Forms:
    return _chosen.get()


def kernel(name: str, torch_form: Callable[..., Any], writes: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Gives a function that launches kernels a torch form with the same arguments, whose types the function declares.
    `writes`: the arguments that it changes."""

    def decorate(launch: Callable[P, T]) -> Callable[P, T]:
        pair = Kernel(name, launch, torch_form, tuple(writes.split()))

        @wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            found: T = _chosen.get().call(pair, *args, **kwargs)
            return found

        return call

    return decorate
