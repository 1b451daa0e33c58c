"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream ends.

Without it the GPU starts a kernel when the previous one has ended and its memory is written, which costs one or two
microseconds per kernel. With it, the programs of a kernel may start as soon as all programs of its predecessor have
ended or called `after_predecessor`. A kernel launched with `dependent()` must follow three rules:

1. Every program calls `after_predecessor` before it writes to memory and before it returns. It thus ends after its
   predecessor, which ended after its own, so a kernel whose wait is over comes after all earlier kernels. It cannot
   overwrite a buffer that an earlier kernel still reads.
2. Before the call a program reads only what no kernel of a step writes: weights. A linear layer has them read into the
   L2 cache (`prefetch_rows`), so that they arrive while the predecessor computes.
3. The first kernel of a step (`prepare`) is launched without `dependent()`. It starts when everything before it has
   ended, so weights are complete, however they were written.

Kernels launched without `dependent()`, such as those of libraries, start after their predecessor as always. A CUDA
graph records which of its kernels start early.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.language import target, tl, triton

FIRST_ARCHITECTURE = 90  # sm_90 (Hopper) and newer have the instructions
DISABLE = "QUIRE_DISABLE_PDL"
EARLY_BYTES = 16 << 20  # of a weight that is read early: a part of the L2 cache, which has 50 MB on an H100
MAX_OF_PROGRAM = 2 << 20  # in four reads, each of less than 1 MiB


@triton.jit
def after_predecessor():
    """Waits until the previous kernel has ended and its results are visible, then lets the next kernel start."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(weight_ptr, K, N, most_bytes, BLOCK_N: tl.constexpr):
    """Starts to read this program's BLOCK_N rows of a weight [N, K], at most `most_bytes`, into the L2 cache."""
    offset, size = early_part(K, N, most_bytes, BLOCK_N, weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [weight_ptr.to(tl.int64) + offset, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def early_part(K, N, most_bytes, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Byte offsets and sizes, one per thread, of this program's early reads. The threads of a warp have the same.

    Programs for other rows of the input need the same weight, so only the first ones read.
    """
    first = tl.program_id(0) * BLOCK_N
    most_bytes = tl.minimum(most_bytes, tl.minimum(N - first, BLOCK_N) * K * WIDTH)
    quarter = tl.where(tl.program_id(1) == 0, most_bytes // 64 * 16, 0)
    part = tl.arange(0, 128) // 32
    return first.to(tl.int64) * K * WIDTH + part * quarter, part * 0 + quarter


def early_bytes(weight: torch.Tensor, num_programs: int) -> int:
    """`most_bytes` of `prefetch_rows` for a weight that this number of programs reads."""
    if weight.data_ptr() % 16 or not _is_available():
        return 0
    return min(EARLY_BYTES // num_programs, MAX_OF_PROGRAM)


def dependent() -> dict[str, Any]:
    """Arguments for the launch of a kernel with a constant PDL, which says whether to call `after_predecessor`."""
    return {"PDL": True, "launch_pdl": True} if forms.chosen().may_overlap and _is_available() else {"PDL": False}


@cache
def _is_available() -> bool:
    if triton.knobs.runtime.interpret or os.environ.get(DISABLE, "") not in ("", "0"):
        return False
    gpu = target()
    return bool(gpu.backend == "cuda" and gpu.arch >= FIRST_ARCHITECTURE)
