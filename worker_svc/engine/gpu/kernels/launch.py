"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream ends.

Without it the GPU starts a kernel when the previous one has ended and its memory is written, which costs one or two
microseconds per kernel. With it, the programs of a kernel may start as soon as all programs of its predecessor have
ended or called `after_predecessor`. A kernel launched with `dependent()` must follow three rules:

1. Every program calls `after_predecessor` before it writes to memory and before it returns. It thus ends after its
   predecessor, which ended after its own, so a kernel whose wait is over comes after all earlier kernels. It cannot
   overwrite a buffer that an earlier kernel still reads.
2. Before the call a program reads only what no kernel of a step writes: weights.
3. The first kernel of a step (`prepare`) is launched without `dependent()`. It starts when everything before it has
   ended, so weights are complete, however they were written.

Kernels launched without `dependent()`, such as those of libraries, start after their predecessor as always. A CUDA
graph records which of its kernels start early.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.driver import driver

FIRST_ARCHITECTURE = 90  # sm_90 (Hopper) and newer have the instructions
DISABLE = "QUIRE_DISABLE_PDL"


@triton.jit
def after_predecessor():
    """Waits until the previous kernel has ended and its results are visible, then lets the next kernel start."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


def dependent() -> dict[str, Any]:
    """Arguments for the launch of a kernel with a constant PDL, which says whether to call `after_predecessor`."""
    return {"PDL": True, "launch_pdl": True} if _is_available() else {"PDL": False}


@cache
def _is_available() -> bool:
    if triton.knobs.runtime.interpret or os.environ.get(DISABLE, "") not in ("", "0"):
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_ARCHITECTURE)
