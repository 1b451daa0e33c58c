"""Collectives of a tensor-parallel worker. Each rank holds a shard of every matrix.

Ranks receive the same messages in the same order. Each finds the best token in its own part of the vocabulary, and a
maximum over ranks decides. Logits are exchanged only in steps with filters, for their thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from worker_svc.engine.nodes import Inbox, RankOutbox

NOISE_IDS = 4  # token ids per call of the noise
CPU = torch.device("cpu")


class SharedSum(Protocol):
    """Adds up messages without the library; see shared_sum.py."""

    def add(self, x: torch.Tensor) -> bool:
        """Replaces x by the sum over ranks. False: the library has to do it."""


class Group:
    """The ranks of one worker. With one rank every operation is the identity.

    `local_rank` counts the ranks of one host and is the number of the rank's GPU. Rank 0 has outboxes, the other ranks
    have an inbox.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int | None = None,
        device: torch.device = CPU,
        is_exact: bool = False,
        outboxes: Sequence[RankOutbox] = (),
        inbox: Inbox | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = rank if local_rank is None else local_rank
        self._device = device
        self._is_exact = is_exact
        self._outboxes = outboxes
        self._inbox = inbox
        self.shared_sum: SharedSum | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.shared_sum is not None and self.shared_sum.add(x):
            return x
        if self._is_exact and self.size > 2 and x.is_floating_point():
            return x.copy_(self.sum_in_order(self.all_gather(x)))
        if self.size > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
        """Adds from the first rank to the last, each sum rounded to the dtype. A library's order depends on the length
        of the message, and so on the batch. For two ranks there is only one order."""
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks: [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        parts = x.new_empty(self.size * len(x), *x.shape[1:])  # gloo takes no further dimension
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, *x.shape)

    def exchange_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of the rows of x [rows, columns of this rank], this rank's share with the columns of all ranks:
        [rows / size, size * columns]. The number of rows is a multiple of `size`."""
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)  # [sender, row, column]
        dist.all_to_all_single(parts, x.contiguous())
        return parts.view(self.size, -1, x.shape[1]).movedim(0, 1).flatten(1)

    def part_size(self, vocab_size: int) -> int:
        """The number of token ids of a rank that is not the last, in multiples of NOISE_IDS."""
        return -(-vocab_size // (self.size * NOISE_IDS)) * NOISE_IDS

    def vocab_part(self, vocab_size: int) -> range:
        """The token ids of this rank: equal parts, except the last."""
        part = self.part_size(vocab_size)
        return range(vocab_size)[self.rank * part : (self.rank + 1) * part]

    def send(self, message: bytes) -> None:
        """Sends a message of rank 0 to all other ranks, which `receive` it."""
        for outbox in self._outboxes:
            outbox.send_bytes(message)

    def receive(self) -> bytes:
        """Waits for the next message of rank 0."""
        if self._inbox is None:
            raise RuntimeError("rank 0 receives no messages: a bug in the engine")
        return self._inbox.recv_bytes()

    def all_reduce_min(self, value: int) -> int:
        """The smallest value of all ranks."""
        found = torch.tensor([value], device=self._device)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)


ALONE = Group()
