"""Who has been served how much, and who comes next: the queue, with fair shares for tenants.

The virtual token counter (VTC, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's
counter grows by what is computed for it, and the tenant with the lowest counter comes first. A tenant that was away is
lifted to the lowest counter of those that stayed, so that nobody saves up credit by being idle. Tenants that always
have something waiting get equal shares, whatever they ask for; one that asks for less than its share hardly waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import Sequence

I64 = npt.NDArray[np.int64]

INPUT_WEIGHT = 1  # of a token that is computed for a prompt
OUTPUT_WEIGHT = 2  # of a token that is generated
MAX_IDLE_TENANTS = 4096  # whose counters are remembered

_key = attrgetter("queue_key")


class FairShare:
    """The tenants' counters. A tenant is active while a request of it is here. Its slot is its index in columns."""

    def __init__(self) -> None:
        self.served: I64 = np.zeros(
            8, dtype=np.int64
        )  # [slots] weighted tokens, never below the floor of its last join
        self.num_active = 0
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._num_live: list[int] = []
        self._idle: dict[int, None] = {}  # slots, longest idle first
        self._floor = 0

    def slot_of(self, tenant_id: str) -> int | None:
        """The slot of a tenant that is known."""
        return self._slots.get(tenant_id)

    def join(self, tenant_id: str) -> int:
        """A request of this tenant is here now. Returns the tenant's slot."""
        slot = self._slots.get(tenant_id)
        if slot is None:
            slot = self._new_slot(tenant_id)
        if not self._num_live[slot]:
            self._floor = self._lowest()
            self.served[slot] = max(int(self.served[slot]), self._floor)
            self.num_active += 1
            self._idle.pop(slot, None)
        self._num_live[slot] += 1
        return slot

    def leave(self, slot: int) -> None:
        """A request of this tenant has ended."""
        self._num_live[slot] -= 1
        if self._num_live[slot]:
            return
        self.num_active -= 1
        self._idle[slot] = None
        if not self.num_active:  # nobody to compare with is left: the next one starts where this one ended
            self._floor = max(self._floor, int(self.served[slot]))

    def charge_prompt(self, slot: int, num_tokens: int) -> None:
        """So many prompt tokens are to be computed for the tenant."""
        self.served[slot] += INPUT_WEIGHT * num_tokens

    def charge_outputs(self, slot_of_row: I64, rows: I64) -> None:
        """Each of these rows has generated a token."""
        if not len(rows):
            return
        if self.num_active == 1:
            self.served[slot_of_row[rows[0]]] += OUTPUT_WEIGHT * len(rows)
            return
        self.served += OUTPUT_WEIGHT * np.bincount(slot_of_row[rows], minlength=len(self.served))

    def _lowest(self) -> int:
        counters = [int(self.served[slot]) for slot, num_live in enumerate(self._num_live) if num_live]
        return max(self._floor, min(counters, default=0))

    def _new_slot(self, tenant_id: str) -> int:
        if len(self._idle) >= MAX_IDLE_TENANTS:
            slot = next(iter(self._idle))
            del self._idle[slot], self._slots[self._names[slot]]
            self._names[slot] = tenant_id
        else:
            slot = len(self._names)
            self._names.append(tenant_id)
            self._num_live.append(0)
        if slot >= len(self.served):
            self.served = np.concatenate((self.served, np.zeros(len(self.served), dtype=np.int64)))
        self.served[slot] = 0
        self._slots[tenant_id] = slot
        return slot

    def check_invariants(self, live: dict[int, int]) -> None:
        """Raise AssertionError unless exactly these slots have so many live requests."""
        assert {slot: n for slot, n in enumerate(self._num_live) if n} == live, "tenants and live requests disagree"
        assert self.num_active == len(live), "the number of active tenants is wrong"


class WaitingQueue:
    """Sequences that wait, in the order in which they are to be served.

    Priority comes first; then those that have been under way before, because their streams stand still meanwhile; then
    the tenant that was served least; then its own `turn`, an arrival that length delays. With one tenant the order is a
    sorted list, and nothing is compared on the way through.

    A sequence that no present worker could run is unschedulable: it waits outside the order and delays no other one.
    """

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._lines: dict[int, list[Sequence]] = {}  # per tenant's slot, sorted by queue_key; none is empty
        self._tokens: defaultdict[tuple[int, int], int] = defaultdict(int)  # (slot, priority) -> tokens to compute
        self._held: defaultdict[int, int] = defaultdict(int)
        self.unschedulable: dict[Sequence, float] = {}  # since when, longest first; inf until the caller has told
        self.num_in_line = 0
        self.pending_tokens = 0  # to compute
        self.held_tokens = 0  # to compute and expected to come

    def __len__(self) -> int:
        return self.num_in_line + len(self.unschedulable)

    def __contains__(self, seq: Sequence) -> bool:
        if seq in self.unschedulable:
            return True
        line = self._lines.get(seq.group.tenant_slot, [])
        index = bisect_left(line, seq.queue_key, key=_key)
        return index < len(line) and line[index] is seq

    def num_tenants_with(self, slot: int | None) -> int:
        """Tenants of which something waits, and this one."""
        return len(self._lines) + (slot not in self._lines)

    def num_of(self, slot: int | None) -> int:
        """Sequences of one tenant."""
        return len(self._lines[slot]) if slot in self._lines else 0

    def held_of(self, slot: int | None) -> int:
        """Part of one tenant in `held_tokens`."""
        return self._held.get(slot, 0) if slot is not None else 0

    def add(self, seq: Sequence, held_tokens: int, turn: float) -> None:
        """`held_tokens`: what it will have when it is complete, as far as one can tell. `turn`: its place in line."""
        seq.queue_key = (seq.group.priority, seq.is_new, turn, seq.seq_id)
        seq.held_tokens = held_tokens
        insort(self._lines.setdefault(seq.group.tenant_slot, []), seq, key=_key)
        self._count(seq, 1)

    def park(self, seq: Sequence) -> None:
        """Keep it waiting outside the order."""
        self.unschedulable[seq] = math.inf

    def remove(self, seq: Sequence) -> None:
        if self.unschedulable.pop(seq, None) is not None:
            return
        slot = seq.group.tenant_slot
        line = self._lines[slot]
        index = bisect_left(line, seq.queue_key, key=_key)
        if line[index] is not seq:
            raise RuntimeError(f"sequence {seq.seq_id} is not where its key says: a bug in the queue")
        del line[index]
        if not line:
            del self._lines[slot]
        self._count(seq, -1)

    def move(self, seq: Sequence, turn: float) -> None:
        """Its turn comes earlier or later than was thought."""
        self.remove(seq)
        self.add(seq, seq.held_tokens, turn)

    def _count(self, seq: Sequence, sign: int) -> None:
        self.num_in_line += sign
        self.pending_tokens += sign * seq.data.num_tokens
        self.held_tokens += sign * seq.held_tokens
        slot = seq.group.tenant_slot
        self._held[slot] += sign * seq.held_tokens
        at = (slot, seq.group.priority)
        self._tokens[at] += sign * seq.data.num_tokens
        if not self._tokens[at]:
            del self._tokens[at]
        if slot not in self._lines:
            del self._held[slot]

    def tokens_ahead(self, slot: int | None, priority: int, turn: float | None = None) -> int:
        """Tokens to compute before a new sequence of this tenant has its turn; without one, it is its tenant's last.

        What is as urgent or more; but while its own line is served, every other tenant gets no more than the same.
        """
        urgent = [(owner, tokens) for (owner, level), tokens in self._tokens.items() if level <= priority]
        if turn is None or slot is None:
            mine = sum(tokens for owner, tokens in urgent if owner == slot)
        else:
            line = self._lines.get(slot, [])
            mine = sum(seq.data.num_tokens for seq in line[: bisect_left(line, (priority, True, turn, 0), key=_key)])
        return min(sum(tokens for _, tokens in urgent), mine * self.num_tenants_with(slot))

    def __iter__(self) -> Iterator[Sequence]:
        """The line, in order. Each is taken for served by what comes after it: so one look sees shares grow."""
        if len(self._lines) == 1:
            return iter(next(iter(self._lines.values())))
        return self._merge()

    def _merge(self) -> Iterator[Sequence]:
        served = {slot: int(self._share.served[slot]) for slot in self._lines}
        heads = [(_rank(line[0], served[slot]), slot, 0) for slot, line in self._lines.items()]
        heapify(heads)
        while heads:
            _, slot, index = heads[0]
            line = self._lines[slot]
            yield line[index]
            served[slot] += INPUT_WEIGHT * line[index].data.num_tokens
            if index + 1 == len(line):
                heappop(heads)
                continue
            heapreplace(heads, (_rank(line[index + 1], served[slot]), slot, index + 1))

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        waiting = [seq for line in self._lines.values() for seq in line]
        assert len(waiting) == self.num_in_line == len({*waiting}), "a sequence waits twice, or is miscounted"
        assert self.unschedulable.keys().isdisjoint(waiting), "a sequence is unschedulable and in line"
        assert self.pending_tokens == sum(seq.data.num_tokens for seq in waiting), "pending_tokens is wrong"
        assert self.held_tokens == sum(seq.held_tokens for seq in waiting), "held_tokens is wrong"
        assert sum(self._tokens.values()) == self.pending_tokens, "tokens per tenant are wrong"
        assert sum(self._held.values()) == self.held_tokens, "held tokens per tenant are wrong"
        assert self._held.keys() == self._lines.keys(), "held tokens of a tenant that waits for nothing"
        for slot, line in self._lines.items():
            assert line, "an empty line"
            assert line == sorted(line, key=_key), "the queue is out of order"
            assert all(seq.group.tenant_slot == slot for seq in line), "in a wrong line"
            assert all(seq.queue_key[:2] == seq.order[:2] for seq in line), "a key of other times"


def _rank(seq: Sequence, served: int) -> tuple[int, bool, int, float, int]:
    priority, is_new, turn, seq_id = seq.queue_key
    return (priority, is_new, served if is_new else 0, turn, seq_id)
