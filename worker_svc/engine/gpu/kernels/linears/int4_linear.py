"""Products with weights in int4, whose scales and zero points belong to groups of inputs.

    weight = (step - 8) * scale + zero, for steps from 0 to 15

The words have the order of torch's own kernel (torch._weight_int4pack_mm, known as tinygemm), so that one copy of a
weight serves it and the kernels here. With `shift = 16 low + 8 tile + 4 half`, the word
[n // 8, k // 128, n % 8 * 4 + lane, pair] has at bit `shift` the step of output n and of input
128 (k // 128) + 32 pair + 16 tile + 8 half + 2 lane + low.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.linear import Tile, torch_linear

DEPTH = 128  # inputs whose words are neighbours: the innermost tiles of torch's kernel, 8 of 16 inputs
OUTPUTS = 8  # of a tile of torch's kernel
PAIR = 32  # inputs that share words; no group may be shorter
GROUPS = (32, 64, 128, 256)  # that torch's kernel has
MIDDLE = 8


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [out, in] in int4."""

    words: torch.Tensor  # int32 [out / 8, in / 128, 32, 4]
    scales_and_zeros: torch.Tensor  # [groups, out, 2], in the dtype of the model
    group: int  # inputs
    order: torch.Tensor | None = None  # [in] the input that each column of the weight belongs to; None: its own

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.words.shape[0] * OUTPUTS, self.words.shape[1] * DEPTH


EXACT = Tile(64, 64, DEPTH, num_stages=3)  # for every number of rows
FEW_ROWS = Tile(16, 64, DEPTH, num_stages=3)
WIDENED_OUTPUTS = 32  # of a program that writes a weight in a float type


@triton.jit
def widened_tile(words, scales, zeros, BLOCK_N: tl.constexpr):
    """float32 [BLOCK_N, 128] of words [BLOCK_N, 16]; scales and zeros are [BLOCK_N, 1 or 16]."""
    # [n, (lane, pair)] -> [n, (lane, pair), low, half, tile]
    first = tl.join(tl.join(words & 15, (words >> 16) & 15), tl.join((words >> 4) & 15, (words >> 20) & 15))
    second = tl.join(tl.join((words >> 8) & 15, (words >> 24) & 15), tl.join((words >> 12) & 15, (words >> 28) & 15))
    steps = (tl.join(first, second) - 8).to(tl.float32)
    wide = steps * scales[:, :, None, None, None] + zeros[:, :, None, None, None]
    parts = tl.reshape(wide, [BLOCK_N, 4, 4, 2, 2, 2])  # [n, lane, pair, low, half, tile]
    return tl.reshape(tl.permute(parts, [0, 2, 5, 4, 1, 3]), [BLOCK_N, 128])


@triton.jit
def load_tile(words_ptr, scale_ptr, output, tile, N, K, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """float32 [BLOCK_N, 128]: the weight of outputs [BLOCK_N] and the inputs of one tile."""
    word = tl.arange(0, 16)[None, :]
    line = output[:, None]
    is_in = line < N
    place = (line // 8).to(tl.int64) * K + tile * 128 + line % 8 * 16 + word  # 8 outputs have K words
    words = tl.load(words_ptr + place, mask=is_in, other=0)
    if GROUP % 128 == 0:
        group = tile * 128 // GROUP
        scale_ptrs = scale_ptr + (group * N + line) * 2
    else:
        group = (tile * 128 + word % 4 * 32) // GROUP
        scale_ptrs = scale_ptr + (group * N + line) * 2
    scales = tl.load(scale_ptrs, mask=is_in, other=0.0).to(tl.float32)
    zeros = tl.load(scale_ptrs + 1, mask=is_in, other=0.0).to(tl.float32)
    return widened_tile(words, scales, zeros, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def int4_linear_kernel(
    x_ptr, words_ptr, scale_ptr, bias_ptr, out_ptr, M, N, K,
    GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + row.to(tl.int64) * K + tl.arange(0, 128)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(K // 128):
        x = tl.load(x_ptrs + tile * 128, mask=row < M, other=0.0)
        weight = load_tile(words_ptr, scale_ptr, output, tile, N, K, GROUP, BLOCK_N).to(x.dtype)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    column = output[None, :]
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * N + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < M) & (column < N))


@triton.jit
def widen_kernel(words_ptr, scale_ptr, out_ptr, N, K, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Writes the weight [N, K] in a float type."""
    if PDL:
        after_predecessor()
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    weight = load_tile(words_ptr, scale_ptr, output, tile, N, K, GROUP, BLOCK_N)
    target = out_ptr + output[:, None].to(tl.int64) * K + tile * 128 + tl.arange(0, 128)[None, :]
    tl.store(target, weight.to(out_ptr.dtype.element_ty), mask=output[:, None] < N)


def tile_for(num_rows: int, *, is_exact: bool) -> Tile:
    return FEW_ROWS if num_rows <= FEW_ROWS.rows and not is_exact else EXACT


def reference(weight: Int4Weight) -> torch.Tensor:
    """As `widened`, in float32."""
    blocks, depth = weight.words.shape[:2]
    words = weight.words.view(blocks, depth, OUTPUTS, 4, 4, 1)  # .., lane, pair
    parts = ((words >> _shifts(words.device)) & 15).unflatten(5, (2, 2, 2))  # .., tile, half, low
    steps = parts.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(weight.shape)
    scales, zeros = (part.T.repeat_interleave(weight.group, 1) for part in weight.scales_and_zeros.float().unbind(-1))
    found: torch.Tensor = (steps - MIDDLE) * scales + zeros
    return found


def torch_widened(weight: Int4Weight) -> torch.Tensor:
    return reference(weight).to(weight.scales_and_zeros.dtype)


def torch_int4_linear(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, *, is_exact: bool
) -> torch.Tensor:
    wide = torch_widened(weight).to(x.dtype)
    return torch_linear(x, wide, bias) if is_exact else F.linear(x, wide, bias)


@kernel("int4_linear", torch_int4_linear)
def int4_linear(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, *, is_exact: bool) -> torch.Tensor:
    """x [n, in], with inputs in the order of the weight, @ weight [out, in].T + bias. With `is_exact`, one tile serves
    every number of rows."""
    (n, in_size), out_size = x.shape, weight.shape[0]
    out = x.new_empty(n, out_size)
    if n == 0:
        return out
    tile = tile_for(n, is_exact=is_exact)
    int4_linear_kernel[(triton.cdiv(out_size, tile.columns), triton.cdiv(n, tile.rows))](
        x, weight.words, weight.scales_and_zeros, weight.words if bias is None else bias, out, n, out_size, in_size,
        GROUP=weight.group, BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(),
    )  # fmt: skip
    return out


@kernel("widen", torch_widened)
def widened(weight: Int4Weight) -> torch.Tensor:
    """The weight [out, in] in the dtype of its scales, with inputs in its own order."""
    out_size, in_size = weight.shape
    out = weight.scales_and_zeros.new_empty(out_size, in_size)
    widen_kernel[(triton.cdiv(out_size, WIDENED_OUTPUTS), in_size // DEPTH)](
        weight.words, weight.scales_and_zeros, out, out_size, in_size, GROUP=weight.group, BLOCK_N=WIDENED_OUTPUTS,
        num_warps=4, **dependent(),
    )  # fmt: skip
    return out


def unit_of(group: int, in_size: int) -> int:
    """The inputs that share a scale in the kernels: a group, or a part of it if torch's kernel needs shorter ones."""
    is_served = group in GROUPS and in_size % group == 0
    return group if is_served or group % DEPTH else DEPTH


def _shifts(device: torch.device) -> torch.Tensor:
    """The bits of a word's steps, in the order (tile, half, low)."""
    shifts = [16 * low + 8 * tile + 4 * half for tile in (0, 1) for half in (0, 1) for low in (0, 1)]
    return torch.tensor(shifts, dtype=torch.int32, device=device)


def packed(steps: torch.Tensor) -> torch.Tensor:
    """The words of steps [out, in] from 0 to 15."""
    out_size, in_size = steps.shape
    parts = steps.view(out_size // OUTPUTS, OUTPUTS, in_size // DEPTH, 4, 2, 2, 4, 2)  # .., pair, tile, half, lane, low
    ordered = parts.permute(0, 2, 1, 6, 3, 4, 5, 7).flatten(5)  # [out / 8, in / 128, 8, lane, pair, (tile, half, low)]
    words = (ordered.int() << _shifts(steps.device)).sum(-1, dtype=torch.int32)
    return words.flatten(2, 3).contiguous()


def scales_and_zeros(scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[groups, out, 2] of scales and zero points in steps, both [out, groups]."""
    return torch.stack((scales, (MIDDLE - zeros) * scales), -1).transpose(0, 1).to(dtype).contiguous()
