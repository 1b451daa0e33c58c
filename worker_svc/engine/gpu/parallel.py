"""Collectives of a tensor-parallel worker. Each rank holds a shard of every matrix.

Ranks receive the same messages in the same order. Each finds the best token in its own part of the vocabulary, and a
maximum over ranks decides; logits are not gathered.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist

NOISE_IDS = 4  # token ids per call of the noise
LENGTH = struct.Struct("<Q")  # precedes each message
FIRST_PIECE = 8192  # bytes of the first broadcast; a decode step of 256 rows fits


class Group:
    """The ranks of one worker. With one rank every operation is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, control: Any = None, *, is_exact: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._is_exact = is_exact
        self._control = control  # process group for CPU tensors

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self._is_exact and self.size > 2 and x.is_floating_point():
            return x.copy_(self._sum_in_order(x))
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def _sum_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Adds from the first rank to the last. A library's order depends on the length of the message, and so on the
        batch. For two ranks there is only one order."""
        parts = self.all_gather(x)
        total = parts[0].float()
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
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts

    def vocab_part(self, vocab_size: int) -> range:
        """The token ids of this rank: equal parts, except the last, in multiples of NOISE_IDS."""
        part = -(-vocab_size // (self.size * NOISE_IDS)) * NOISE_IDS
        return range(vocab_size)[self.rank * part : (self.rank + 1) * part]

    def send(self, message: bytes) -> None:
        """Broadcasts a message of rank 0; the other ranks `receive` it. A short message takes one broadcast."""
        if self.size == 1:
            return
        framed = bytearray(LENGTH.pack(len(message)) + message)
        framed += bytes(max(FIRST_PIECE - len(framed), 0))
        for piece in torch.frombuffer(framed, dtype=torch.uint8).tensor_split((FIRST_PIECE,)):
            if len(piece):
                dist.broadcast(piece, 0, self._control)

    def receive(self) -> bytes:
        """Waits for the next message of rank 0."""
        pieces = [torch.empty(FIRST_PIECE, dtype=torch.uint8)]
        dist.broadcast(pieces[0], 0, self._control)
        (length,) = LENGTH.unpack(pieces[0][: LENGTH.size].numpy().tobytes())
        end = LENGTH.size + length
        if end > FIRST_PIECE:
            pieces.append(torch.empty(end - FIRST_PIECE, dtype=torch.uint8))
            dist.broadcast(pieces[1], 0, self._control)
        return b"".join(piece.numpy().tobytes() for piece in pieces)[LENGTH.size : end]

    def all_reduce_min(self, value: int) -> int:
        """The smallest value of all ranks."""
        found = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._control)
        return int(found)


ALONE = Group()
