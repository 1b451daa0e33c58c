"""Ranks of a tensor-parallel worker as threads of this process."""

from __future__ import annotations

import threading

import torch

from worker_svc.engine.gpu.parallel import Group


class Meeting:
    """Collectives between ranks that are threads. One thread runs at a time: the interpreter is not thread-safe."""

    def __init__(self, size):
        self.size = size
        self.turn = threading.Condition()
        self.brought = []
        self.results = []

    def reduce(self, x, operation):
        return x.copy_(self.meet(x, operation))

    def meet(self, x, operation):
        """The result of the operation on the stacked tensors of all ranks."""
        place = len(self.results)
        self.brought.append(x)
        if len(self.brought) == self.size:
            self.results.append(operation(torch.stack(self.brought)))
            self.brought = []
            self.turn.notify_all()
        assert self.turn.wait_for(lambda: len(self.results) > place, 60)
        return self.results[place]


class Rank(Group):
    def __init__(self, rank, meeting):
        super().__init__(rank, meeting.size)
        self.meeting = meeting

    def all_reduce(self, x):
        return self.meeting.reduce(x, lambda all: all.sum(0))

    def all_gather(self, x):
        return self.meeting.meet(x, lambda all: all)

    def all_reduce_max(self, x):
        return self.meeting.reduce(x, lambda all: all.amax(0))
