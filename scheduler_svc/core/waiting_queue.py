"""The waiting sequences, in the order in which they are served.

Tenants get fair shares of the work by the virtual token counter (VTC, Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024). A tenant's counter grows with the tokens computed for it, and the tenant with the lowest counter is
served next. When an idle tenant returns, its counter is raised to the lowest counter of the active tenants, so that
idle tenants do not save up credit. Tenants that always have requests waiting get equal shares, whatever the size of
their requests. A tenant that needs less than its share hardly waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

import numpy as np

from scheduler_svc.core.policy import virtual_arrival
from scheduler_svc.core.sequence import QueueEntry, Sequence
from step_protocol.columns import I64

_key = attrgetter("key")
Rank = tuple[int, bool, int, float, int]
SPARE = 64  # outdated entries of a heap are removed when there are more than about this many

INPUT_WEIGHT = 1  # per computed prompt token
OUTPUT_WEIGHT = 2  # per generated token
MAX_IDLE_TENANTS = 4096  # idle tenants whose counters are kept


class FairShare:
    """The tenants' counters. A tenant is active while it has a live request. Its slot is its index in columns."""

    def __init__(self) -> None:
        # [slots] weighted tokens per tenant, at least the floor at the tenant's last join
        self.served: I64 = np.zeros(8, dtype=np.int64)
        self._active: set[int] = set()  # slots
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._num_live: list[int] = []
        self._idle: dict[int, None] = {}  # slots, longest idle first
        # Counters of active slots when they were pushed; empty or old while one slot is active. These counters
        # only grow, so the lowest is found by correcting the top until it is right.
        self._lowest: list[tuple[int, int]] = []
        self._floor = 0

    def slot_of(self, tenant_id: str) -> int | None:
        """The slot of a tenant; None if the tenant is unknown."""
        return self._slots.get(tenant_id)

    @property
    def has_others(self) -> bool:
        """Whether more than one tenant is known."""
        return len(self._names) > 1

    def join(self, tenant_id: str) -> int:
        """Count a new request of this tenant. Returns the tenant's slot."""
        slot = self._slots.get(tenant_id)
        if slot is None:
            slot = self._new_slot(tenant_id)
        if not self._num_live[slot]:
            has_others = False
            if self._active:
                has_others, self._floor = True, max(self._floor, self._lowest_counter())
            if self.served[slot] < self._floor:
                self.served[slot] = self._floor
            self._active.add(slot)
            if has_others:
                heappush(self._lowest, (self.served.item(slot), slot))
            self._idle.pop(slot, None)
        self._num_live[slot] += 1
        return slot

    def _lowest_counter(self) -> int:
        """The lowest counter of the active tenants. There is at least one."""
        heap = self._lowest
        if len(self._active) == 1 or len(heap) > 2 * len(self._active) + SPARE:  # most have left
            self._lowest = heap = [(self.served.item(slot), slot) for slot in self._active]
            heapify(heap)
        while True:
            counter, slot = heap[0]
            now = self.served.item(slot)
            if slot in self._active and counter == now:
                return counter
            if slot in self._active and counter < now:
                heapreplace(heap, (now, slot))
            else:
                heappop(heap)

    def leave(self, slot: int) -> None:
        """Count the end of a request of this tenant."""
        self._num_live[slot] -= 1
        if self._num_live[slot]:
            return
        self._active.remove(slot)
        self._idle[slot] = None
        if not self._active:  # nothing to compare with: the next tenant starts at this counter
            self._floor = max(self._floor, int(self.served[slot]))

    def charge_prompt(self, slot: int, num_tokens: int) -> None:
        """Charge a tenant for prompt tokens to compute."""
        self.served[slot] += INPUT_WEIGHT * num_tokens

    def charge_outputs(self, slot_of_row: I64, rows: I64) -> None:
        """Charge one generated token of each row to the row's tenant."""
        if not len(rows):
            return
        if len(self._active) == 1:
            self.served[slot_of_row[rows[0]]] += OUTPUT_WEIGHT * len(rows)
            return
        np.add.at(self.served, slot_of_row[rows], OUTPUT_WEIGHT)  # the cost depends on the rows, not on the tenants

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


class TenantQueue:
    """The waiting sequences of one tenant."""

    __slots__ = ("entries", "expected_tokens", "tokens")

    def __init__(self) -> None:
        self.entries: list[QueueEntry] = []  # sorted by key
        self.expected_tokens = 0  # to compute and to generate
        self.tokens: defaultdict[int, int] = defaultdict(int)  # priority -> tokens to compute

    def count(self, entry: QueueEntry, sign: int) -> None:
        """Count an entry that has joined (1) or left (-1)."""
        priority = entry.key[0]
        self.expected_tokens += sign * entry.num_expected_tokens
        self.tokens[priority] += sign * entry.num_tokens
        if not self.tokens[priority]:
            del self.tokens[priority]


class WaitingQueue:
    """Owns the entries of all waiting sequences.

    Order: priority; then sequences that have run before, because their streams are stalled; then the tenant that was
    served least; then the virtual arrival, which is later for a long prompt. With one tenant this is a sorted list.
    With more, the first entries are found through a heap of the tenants' first entries, so a pass that looks at a few
    entries costs about the same for ten tenants and for 50,000.

    A sequence that no present worker could run is unschedulable: it waits outside the order and delays no others.
    """

    def __init__(self, share: FairShare, aging_tokens_per_s: float) -> None:
        self._share = share
        self._aging_tokens_per_s = aging_tokens_per_s
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; some of its sequences no longer wait
        self._entries: dict[Sequence, QueueEntry] = {}
        self._by_tenant: dict[int, TenantQueue] = {}  # by slot; only tenants that have waiting sequences
        self.unschedulable: dict[Sequence, float] = {}  # -> since when, oldest first; inf until `give_up` sets it
        self._unschedulable_tokens: dict[Sequence, int] = {}  # expected ones of each unschedulable sequence
        self.unschedulable_tokens = 0  # their sum
        self._heads: list[tuple[Rank, int, int]] = []  # a heap: rank when pushed, version, slot
        self._num_tenants = 0  # with waiting sequences; the heap is kept while there are several
        self._versions: dict[int, int] = {}  # by slot: the version of its entry in the heap that counts
        self._version = 0
        self._tokens: defaultdict[int, int] = defaultdict(int)  # priority -> tokens to compute, of all tenants
        self.pending_tokens = 0  # to compute
        self.expected_tokens = 0  # to compute and to generate

    def __len__(self) -> int:
        return len(self._entries) + len(self.unschedulable)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries or seq in self.unschedulable

    @property
    def num_schedulable(self) -> int:
        return len(self._entries)

    def sequences(self) -> Iterator[Sequence]:
        """All waiting sequences: the unschedulable ones, then the others in order."""
        yield from self.unschedulable
        yield from (entry.seq for entry in self)

    def entry(self, seq: Sequence) -> QueueEntry | None:
        """The entry of a schedulable sequence."""
        return self._entries.get(seq)

    def num_tenants_with(self, slot: int | None) -> int:
        """Number of tenants that have waiting sequences or are this tenant."""
        return len(self._by_tenant) + (slot not in self._by_tenant)

    def num_of(self, slot: int | None) -> int:
        """Number of waiting sequences of one tenant."""
        return len(self._by_tenant[slot].entries) if slot in self._by_tenant else 0

    def expected_tokens_of(self, slot: int | None) -> int:
        """The tokens in `expected_tokens` that belong to one tenant."""
        return self._by_tenant[slot].expected_tokens if slot in self._by_tenant else 0

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry into its tenant's list. A sequence that has run before is sorted by arrival alone, because
        most of its work is done.
        """
        seq = entry.seq
        slot = seq.group.tenant_slot
        tenant = self._by_tenant.get(slot)
        if tenant is None:
            if self._num_tenants == 1:
                self._push_head(next(iter(self._by_tenant)))
            tenant = self._by_tenant[slot] = TenantQueue()
            self._num_tenants += 1
        uncached = entry.num_tokens - entry.max_cached if entry.is_new else 0
        entry.set_key(virtual_arrival(seq.group.arrival, uncached, self._aging_tokens_per_s))
        self._entries[seq] = entry
        insort(tenant.entries, entry, key=_key)
        if self._num_tenants > 1 and tenant.entries[0] is entry:
            self._push_head(slot)
        tenant.count(entry, 1)
        self._tokens[entry.key[0]] += entry.num_tokens
        self.pending_tokens += entry.num_tokens
        self.expected_tokens += entry.num_expected_tokens

    def add_unschedulable(self, seq: Sequence, num_expected_tokens: int) -> None:
        """Add a sequence that waits outside the order."""
        self.unschedulable[seq] = math.inf
        self._unschedulable_tokens[seq] = num_expected_tokens
        self.unschedulable_tokens += num_expected_tokens

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence and drop its entry."""
        if self.unschedulable.pop(seq, None) is not None:
            self.unschedulable_tokens -= self._unschedulable_tokens.pop(seq)
            return
        entry = self._entries.pop(seq)
        slot = seq.group.tenant_slot
        tenant = self._by_tenant[slot]
        index = bisect_left(tenant.entries, entry.key, key=_key)
        if tenant.entries[index] is not entry:
            raise RuntimeError(f"sequence {seq.seq_id} is not at the position of its key: a bug in the queue")
        del tenant.entries[index]
        tenant.count(entry, -1)
        self._tokens[entry.key[0]] -= entry.num_tokens
        if not self._tokens[entry.key[0]]:
            del self._tokens[entry.key[0]]
        if not tenant.entries:
            del self._by_tenant[slot]
            self._num_tenants -= 1
            if self._versions:
                self._versions.pop(slot, None)
        elif self._num_tenants > 1 and not index:
            self._push_head(slot)
        self.pending_tokens -= entry.num_tokens
        self.expected_tokens -= entry.num_expected_tokens

    def move(self, entry: QueueEntry) -> None:
        """Move an entry to its present place in its tenant's list."""
        self.remove(entry.seq)
        self.add(entry)

    def add_deadline(self, seq: Sequence, start_by: float) -> None:
        """`pop_expired` returns the sequence if it still waits at this time."""
        heappush(self._deadlines, (start_by, seq.seq_id, seq))
        if len(self._deadlines) > 2 * len(self) + SPARE:  # most no longer wait
            self._deadlines = list({entry for entry in self._deadlines if entry[2] in self})
            heapify(self._deadlines)

    def pop_expired(self, now: float) -> Sequence | None:
        """A sequence that still waits at its time; None if there is none."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heappop(self._deadlines)
            if seq in self:
                return seq
        return None

    def tokens_ahead(self, slot: int | None, priority: int, virtual_arrival: float | None = None) -> int:
        """Number of tokens to compute before a new sequence of this tenant is served. Without `virtual_arrival` the
        sequence is assumed to be the tenant's last.

        The sequences ahead are those that are at least as urgent. But while the tenant's own sequences are served, each
        other tenant gets at most the same number of tokens.
        """
        tenant = self._by_tenant.get(slot) if slot is not None else None
        own = 0 if tenant is None else _urgent(tenant.tokens, priority)
        if virtual_arrival is not None and slot in self._by_tenant:
            entries = self._by_tenant[slot].entries
            end = bisect_left(entries, (priority, True, virtual_arrival, 0), key=_key)
            own = sum(entry.num_tokens for entry in entries[:end])
        return min(_urgent(self._tokens, priority), own * self.num_tenants_with(slot))

    def __iter__(self) -> Iterator[QueueEntry]:
        """All entries in order. Each entry counts as served when the next one is chosen, so one iteration accounts for
        the tenants' growing usage.
        """
        if len(self._by_tenant) == 1:
            return iter(next(iter(self._by_tenant.values())).entries)
        return self._merge()

    def _merge(self) -> Iterator[QueueEntry]:
        """Searches the heap of heads from its top, best first. An old rank is a lower bound, because counters of
        tenants only grow; so a head is compared again with its present rank before it is chosen.
        """
        self._correct_top()
        heads, served = self._heads, dict[int, int]()
        # A node of the heap (-1: the rank may be old), or the entry of a tenant at this index.
        found: list[tuple[Rank, int, int]] = [(heads[0][0], -1, 0)] if heads else []
        while found:
            _, index, place = heappop(found)
            if index < 0:
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(heads):
                        heappush(found, (heads[child][0], -1, child))
                _, version, slot = heads[place]
                if self._versions.get(slot) == version:
                    served[slot] = self._share.served.item(slot)
                    heappush(found, (_rank(self._by_tenant[slot].entries[0], served[slot]), 0, slot))
                continue
            entries = self._by_tenant[place].entries
            entry = entries[index]
            yield entry
            served[place] += INPUT_WEIGHT * entry.num_tokens
            if index + 1 < len(entries):
                heappush(found, (_rank(entries[index + 1], served[place]), index + 1, place))

    def _push_head(self, slot: int) -> None:
        """Put the first entry of a tenant into the heap of heads, in place of an earlier one."""
        self._version += 1
        self._versions[slot] = self._version
        rank = _rank(self._by_tenant[slot].entries[0], self._share.served.item(slot))
        heappush(self._heads, (rank, self._version, slot))

    def _correct_top(self) -> None:
        """Remove outdated heads from the top of the heap, and all of them when they are many."""
        if len(self._heads) > 2 * len(self._by_tenant) + SPARE:
            self._heads = [head for head in self._heads if self._versions.get(head[2]) == head[1]]
            heapify(self._heads)
        while self._heads and self._versions.get(self._heads[0][2]) != self._heads[0][1]:
            heappop(self._heads)


def _urgent(tokens: Mapping[int, int], priority: int) -> int:
    """The tokens of sequences that are at least as urgent."""
    return sum(count for level, count in tokens.items() if level <= priority)


def _rank(entry: QueueEntry, served: int) -> Rank:
    priority, is_new, virtual_arrival, seq_id = entry.key
    return (priority, is_new, served if is_new else 0, virtual_arrival, seq_id)
