"""Thresholds of rows with filters: first their limits, then one search."""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import triton
from worker_svc.engine.gpu.kernels.record import read_record
from worker_svc.engine.gpu.kernels.sampler import candidates, digits
from worker_svc.engine.gpu.kernels.sampler.candidates import CandidateSearch
from worker_svc.engine.gpu.kernels.sampler.digits import DigitSearch
from worker_svc.engine.gpu.kernels.sampler.filters import RowLimits, StepLogits, find_limits
from worker_svc.engine.gpu.kernels.sampler.sample import whole_vocabulary
from worker_svc.engine.sampling.noise import GREEDY_BELOW, has_token, keep_threshold


class Thresholds:
    """Buffers for steps of at most `max_rows` rows, and the search: by candidates in one rank, by digits over ranks."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        """`vocab_size` is the part of this rank."""
        self._group = group
        self._search: CandidateSearch | DigitSearch
        if group.size == 1:
            self._chunk, self._search = candidates.CHUNK, CandidateSearch(max_rows, device)
        else:
            self._chunk, self._search = digits.CHUNK, DigitSearch(max_rows, vocab_size, device, group)
        self.limits = RowLimits.make(max_rows, triton.cdiv(vocab_size, self._chunk), device)

    def _find_in_torch(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        lowest = self.limits.lowest[: len(rows)].fill_(-torch.inf)
        whole = whole_vocabulary(logits, self._group).float().cpu().numpy()
        for line, row in enumerate(rows.tolist()):
            params, _ = read_record(state[max(row, 0)])
            if row >= 0 and params.temperature >= np.float32(GREEDY_BELOW) and has_token(whole[line]):
                z = whole[line] / np.float32(params.temperature)
                lowest[line] = float(keep_threshold(z, params, np.float32(params.min_p)))
        return lowest

    @kernel("thresholds", _find_in_torch)
    def find(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest z = logits / temperature that each of the S rows keeps, float32 [S]. `rows` are records of
        `state`, -1 is padding."""
        source = StepLogits(logits, state, rows)
        find_limits(source, self.limits, self._chunk, self._group)
        self._search.search(source, self.limits)
        return self.limits.lowest[: len(rows)]
