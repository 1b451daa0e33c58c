"""Thresholds of rows with min_p, top_k or top_p: by candidates in one rank, by sums of digits over several."""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels import candidates, threshold
from worker_svc.engine.gpu.parallel import ALONE, Group


class Filters:
    """Buffers for steps of at most `max_rows` rows, and the search."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        """`vocab_size` is the part of this rank."""
        self._group = group
        self._alone = candidates.Scratch.make(max_rows, vocab_size, device) if group.size == 1 else None
        self._shared = threshold.Scratch.make(max_rows, vocab_size, device) if group.size > 1 else None

    def thresholds(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest z = logits / temperature that each of the S rows keeps, float32 [S]. `rows` are records of
        `state`, -1 is padding."""
        if self._alone is not None:
            return candidates.find_thresholds(logits, state, rows, self._alone)
        if self._shared is None:
            raise RuntimeError("a group has at least one rank")
        return threshold.find_thresholds(logits, state, rows, self._shared, self._group)
