"""Updates of the row records on the device: single words at any offsets."""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton

BLOCK = 256


@triton.jit(do_not_specialize=["num_deltas"])
def deltas_kernel(state_ptr, delta_ptr, num_deltas, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_item = item < num_deltas
    index = tl.load(delta_ptr + 2 * item, mask=is_item, other=0)
    value = tl.load(delta_ptr + 2 * item + 1, mask=is_item, other=0)
    tl.store(state_ptr + index, value, mask=is_item)


def torch_deltas(state: torch.Tensor, deltas: torch.Tensor) -> None:
    state.view(-1)[deltas[:, 0].long()] = deltas[:, 1]


@kernel("deltas", torch_deltas, writes="state")
def apply_deltas(state: torch.Tensor, deltas: torch.Tensor) -> None:
    """state.view(-1)[deltas[:, 0]] = deltas[:, 1], all int32. No index may occur twice."""
    count = len(deltas)
    deltas_kernel[(triton.cdiv(count, BLOCK),)](state, deltas, count, BLOCK=BLOCK, num_warps=4)
