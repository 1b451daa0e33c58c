"""Triton and its language. Where Triton cannot be imported, stand-ins declare kernels that cannot be launched, so that
`--kernels torch` needs no Triton. Modules of the engine import both from here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["target", "tl", "triton", "why_not_launched"]

FIRST_CAPABILITY = (8, 0)  # before it, tensor cores do not multiply bfloat16, and loads are not asynchronous


def _declared(*functions: Any, **_: Any) -> Any:
    """`triton.jit`, with or without options."""
    return functions[0] if functions else _declared


class _Language:
    """Names of `triton.language` that modules use outside kernels."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"triton is not installed, so there is no triton.language.{name}")


try:
    import triton
    import triton.language as tl
except ImportError as error:
    why_not_imported: str | None = f"triton cannot be imported: {error}"
    triton = SimpleNamespace(
        jit=_declared,
        cdiv=lambda x, y: -(-x // y),
        next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
    )
    tl = _Language()
else:
    why_not_imported = None


def target() -> Any:
    """The GPU for which kernels are compiled. Raises what Triton raises if it cannot launch kernels here."""
    from triton.runtime.driver import driver

    return driver.active.get_current_target()


def why_not_launched(device: torch.device) -> str | None:
    """Why no kernel can run on a device; None: they can. Triton compiles its launcher at the first use."""
    if why_not_imported is not None or device.type != "cuda":
        return why_not_imported
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < FIRST_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, FIRST_CAPABILITY))
        return f"the GPU has compute capability {found}, Triton's kernels need {needed}"
    try:
        target()
    except Exception as error:  # of a compiler, a linker or the driver, each with its own type
        return f"triton cannot launch kernels here: {str(error).strip().splitlines()[0]}"
    return None
