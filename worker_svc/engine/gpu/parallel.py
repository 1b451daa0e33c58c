"""Tensor parallel: each rank holds a shard of every matrix; sums and logits meet here.

Ranks see the same messages in the same order and sample the same tokens, by counters, from the same logits. So only
batches are sent, by rank 0, and no tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Group:
    """The ranks of one worker. Alone, every operation is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, control: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._control = control  # a group whose messages need no device

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, part] of each rank side by side: [n, size * part]."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * len(x), x.shape[1])
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def broadcast(self, message: Any = None) -> Any:
        """Rank 0's message, on every rank."""
        box = [message]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        found = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._control)
        return int(found)
