"""torch._weight_int4pack_mm in plain Python, as torch's CUDA source reads its words: lane by lane, tile by tile."""

from __future__ import annotations

import torch

GROUPS = (32, 64, 128, 256)
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # a word holds, from its lowest bits, these of the eight values of a lane


def weight_int4pack_mm(x, words, group, scales_and_zeros):
    n_tiles, k_tiles, lanes, pairs = words.shape
    assert x.dtype is torch.bfloat16
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert words.dtype is torch.int32
    assert (k_tiles, lanes, pairs) == (x.shape[1] // 128, 32, 4)
    assert group in GROUPS
    assert x.shape[1] % group == 0
    assert scales_and_zeros.shape == (x.shape[1] // group, n_tiles * 8, 2)
    assert scales_and_zeros.dtype is torch.bfloat16
    weight = torch.empty(n_tiles * 8, k_tiles * 128)
    for lane in range(lanes):
        for pair in range(pairs):
            first = pair * 32 + lane % 4 * 2
            inputs = [first, first + 1, first + 8, first + 9, first + 16, first + 17, first + 24, first + 25]
            for place, value in enumerate(NIBBLES):
                steps = (words[:, :, lane, pair] >> (4 * place)) & 15
                weight[lane // 4 :: 8, inputs[value] :: 128] = steps.float() - 8
    scales, zeros = scales_and_zeros.float().repeat_interleave(group, 0).unbind(-1)
    return (x.float() @ (weight * scales.T + zeros.T).bfloat16().float().T).bfloat16()
