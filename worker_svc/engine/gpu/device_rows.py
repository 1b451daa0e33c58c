"""Open rows as they lie on the device: one record of int32 words per row, fed by deltas.

    word 0      last token that was sampled
    word 1-4    temperature, top_k, top_p, log(min_p): floats by their bits
    word 5-7    seed (low, high), sample index
    word 8-     block table

A step uploads the words that changed, and the columns of its batch, in one piece.
"""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.engine.backend import I32
from worker_svc.engine.batch import SamplingParams
from worker_svc.engine.gpu.kernels.prepare import TABLE as HEAD_WORDS

__all__ = ["HEAD_WORDS", "make_state", "sampling_words"]


def make_state(max_num_seqs: int, max_blocks: int, device: torch.device) -> torch.Tensor:
    """Records of all rows, int32 [max_num_seqs, HEAD_WORDS + max_blocks]."""
    return torch.zeros(max_num_seqs, HEAD_WORDS + max_blocks, dtype=torch.int32, device=device)


def sampling_words(params: SamplingParams, sample_index: int) -> I32:
    """The head of a row's record; its last token is 0."""
    lowest = np.log(np.float64(np.float32(params.min_p))) if params.min_p > 0 else -np.inf
    words = np.zeros(HEAD_WORDS, np.int32)
    words.view(np.float32)[[1, 3, 4]] = params.temperature, params.top_p, lowest
    words[2] = min(params.top_k, 2**31 - 1)
    words.view(np.uint32)[5:8] = params.seed & 0xFFFFFFFF, params.seed >> 32, sample_index
    return words
