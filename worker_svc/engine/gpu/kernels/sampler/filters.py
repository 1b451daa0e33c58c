"""Thresholds of rows with min_p, top_k or top_p: by candidates in one rank, by sums of digits over several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.sampler import candidates, threshold


class Filters:
    """Buffers for steps of at most `max_rows` rows, and the search."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        """`vocab_size` is the part of this rank."""
        self._find: Callable[..., torch.Tensor]
        if group.size == 1:
            scratch = candidates.Scratch.make(max_rows, vocab_size, device)
            self._find = partial(candidates.find_thresholds, scratch=scratch)
        else:
            sums = threshold.Scratch.make(max_rows, vocab_size, device)
            self._find = partial(threshold.find_thresholds, scratch=sums, group=group)

    def thresholds(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest z = logits / temperature that each of the S rows keeps, float32 [S]. `rows` are records of
        `state`, -1 is padding."""
        return self._find(logits, state, rows)
