"""Fair shares of the work for tenants.

The virtual token counter (VTC, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's
counter grows with the tokens computed for it, and the tenant with the lowest counter is served next. When an idle
tenant returns, its counter is raised to the lowest counter of the active tenants, so that idle tenants do not save up
credit. Tenants that always have requests waiting get equal shares, whatever the size of their requests. A tenant that
needs less than its share hardly waits.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from step_protocol.columns import I64

INPUT_WEIGHT = 1  # per computed prompt token
OUTPUT_WEIGHT = 2  # per generated token
MAX_IDLE_TENANTS = 4096  # idle tenants whose counters are kept
SPARE_COUNTERS = 64  # old counters are removed when there are more than about this many


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
        if len(self._active) == 1 or len(heap) > 2 * len(self._active) + SPARE_COUNTERS:  # most have left
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

    def check_invariants(self, live: dict[int, int]) -> None:
        """Raise AssertionError unless the live requests per slot are `live`."""
        assert {slot: n for slot, n in enumerate(self._num_live) if n} == live, "tenants and live requests disagree"
        assert self._active == live.keys(), "the active tenants are wrong"
