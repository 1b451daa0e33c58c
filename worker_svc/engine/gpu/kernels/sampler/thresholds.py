"""Thresholds of rows with filters: first their limits, then one search.

A threshold depends on the whole vocabulary, of which each rank has a part. So ranks exchange their logits once: each
gets all logits of its share of the rows, finds their thresholds as a worker of one rank does, and sends them to the
others. A search over the parts would need a sum over ranks for each of its passes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import triton
from worker_svc.engine.gpu.kernels.record import read_record
from worker_svc.engine.gpu.kernels.sampler.candidates import CHUNK, CandidateSearch
from worker_svc.engine.gpu.kernels.sampler.filters import RowLimits, StepLogits, find_limits
from worker_svc.engine.sampling.noise import GREEDY_BELOW, has_token, keep_threshold


class Thresholds:
    """Buffers for steps of at most `max_rows` rows, and the search."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        """`vocab_size` is that of all ranks."""
        self._group = group
        self._vocab_size = vocab_size
        share = triton.cdiv(max_rows, group.size)
        self._search = CandidateSearch(share, device)
        self.limits = RowLimits.make(share, triton.cdiv(vocab_size, CHUNK), device)

    def find(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest z = logits / temperature that each of the S rows keeps, float32 [S]. `rows` are records of
        `state`, -1 is padding. `logits` [S, this rank's part of the vocabulary]."""
        group, count = self._group, len(rows)
        if group.size == 1:
            return self._find(logits, state, rows)
        share = triton.cdiv(count, group.size)
        padding, width = share * group.size - count, group.part_size(self._vocab_size)
        whole = group.exchange_rows(F.pad(logits, (0, width - logits.shape[1], 0, padding)))[:, : self._vocab_size]
        own = F.pad(rows, (0, padding), value=-1)[group.rank * share : (group.rank + 1) * share]
        return group.all_gather(self._find(whole, state, own)).flatten()[:count]

    def _find_in_torch(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        lowest, host = self.limits.lowest[: len(rows)].fill_(-torch.inf), logits.float().cpu().numpy()
        for line, row in enumerate(rows.tolist()):
            params, _ = read_record(state[max(row, 0)])
            if row >= 0 and params.temperature >= np.float32(GREEDY_BELOW) and has_token(host[line]):
                z = host[line] / np.float32(params.temperature)
                lowest[line] = float(keep_threshold(z, params, np.float32(params.min_p)))
        return lowest

    @kernel("thresholds", _find_in_torch)
    def _find(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As `find`, of rows whose logits are complete."""
        source = StepLogits(logits, state, rows)
        find_limits(source, self.limits, CHUNK)
        self._search.search(source, self.limits)
        return self.limits.lowest[: len(rows)]
