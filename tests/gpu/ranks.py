"""Ranks of a tensor-parallel worker as threads of this process."""

from __future__ import annotations

import threading

import torch

from worker_svc.engine.gpu.collectives.group import Group


class Meeting:
    """Collectives between ranks that are threads. One thread runs at a time: the interpreter is not thread-safe."""

    def __init__(self, size):
        self.size = size
        self.turn = threading.Condition()
        self.brought = {}
        self.results = []

    def meet(self, rank, x, operation):
        """The result of the operation on the tensors of all ranks, stacked in the order of ranks."""
        place = len(self.results)
        self.brought[rank] = x
        if len(self.brought) == self.size:
            self.results.append(operation(torch.stack([self.brought[rank] for rank in range(self.size)])))
            self.brought = {}
            self.turn.notify_all()
        assert self.turn.wait_for(lambda: len(self.results) > place, 60)
        return self.results[place]


class Rank(Group):
    def __init__(self, rank, meeting):
        super().__init__(rank, meeting.size)
        self.meeting = meeting

    def all_reduce(self, x):
        return x.copy_(self.meeting.meet(self.rank, x, lambda all: all.sum(0)))

    def all_gather(self, x):
        return self.meeting.meet(self.rank, x, lambda all: all)

    def exchange_rows(self, x):
        whole = self.meeting.meet(self.rank, x, lambda all: all.movedim(0, 1).flatten(1))
        return whole.view(self.size, -1, whole.shape[1])[self.rank]

    def all_reduce_max(self, x):
        return x.copy_(self.meeting.meet(self.rank, x, lambda all: all.amax(0)))

    def all_reduce_min(self, value):
        return int(self.meeting.meet(self.rank, torch.tensor([value]), lambda all: all.amin(0)))
