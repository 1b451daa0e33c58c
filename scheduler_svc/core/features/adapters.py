"""AdapterSwaps: a worker has some in its memory, of which its rows can use a few now (resident).

A request waits for the worker that should run it to make its adapter resident, which is a swap beside the steps
(docs/adr/0049-adapters.md). No other request waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from scheduler_svc.core.errors import NoWorkerError
from scheduler_svc.core.sequence import Feature, Sequence, SequenceGroup
from scheduler_svc.core.worker_state import WorkerPart, WorkerState


@dataclass(frozen=True, slots=True)
class AdapterSwap:
    """Makes an adapter resident on a worker. No others than those in `kept` stay resident."""

    worker_id: str
    digest: bytes
    kept: tuple[bytes, ...] = ()
    evicted: bytes = b""  # rows that still use this one are preempted


class AdapterSlots:
    """Decides which adapters are resident: the wanted ones, in place of the least recently used one without rows.

    A swap takes the worker longer than a step, so waiting sequences of the new adapter are placed when it is done. The
    rows of the evicted adapter in steps in flight are not affected: the worker keeps an adapter while a row has it.

    An adapter whose rows are all less urgent than a waiting sequence is evicted like one without rows.

    Busy adapters always have rows. For a starved sequence of another adapter, the adapter that is resident longest is
    retired: it gets no new rows, so that its slot becomes free when its last row ends. Meanwhile the rows that end go
    to the other adapters, so a worker with enough requests stays full. In overload the adapters take turns.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.loaded: frozenset[bytes] = frozenset()  # in the worker's memory
        self.num_swaps = 0
        self._resident: dict[bytes, None] = {}  # the least recently used one first
        self._loading: bytes = b""
        self._retired: bytes = b""  # resident, but gets no new rows
        self._since: dict[bytes, int] = {}  # number of the swap that made each adapter resident
        # In the order of the queue: priority of the first sequence, and whether one of them is starved
        self._wanted: dict[bytes, tuple[int, bool]] = {}

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def set_loaded(self, digests: Iterable[bytes]) -> None:
        """The adapters in the worker's memory have changed."""
        self.loaded = frozenset(digests)
        for digest in self._resident.keys() - self.loaded:
            del self._resident[digest]

    def has(self, digest: bytes) -> bool:
        """Whether the worker can run sequences with this adapter, now or after a swap."""
        return not digest or digest in self.loaded

    def is_resident(self, digest: bytes) -> bool:
        return digest in self._resident

    def is_ready(self, digest: bytes) -> bool:
        """Whether rows with this adapter can be opened now."""
        return not digest or (digest in self._resident and digest != self._retired)

    def is_loading(self, digest: bytes) -> bool:
        return digest == self._loading

    # -- swaps --------------------------------------------------------------------------------------------------------

    def want(self, digest: bytes, priority: int = 0, *, is_starved: bool = False) -> None:
        """A waiting sequence should run here. Wants hold until the next `take_swap`, in the order of the queue."""
        first, was_starved = self._wanted.get(digest, (priority, False))
        self._wanted[digest] = first, is_starved or was_starved
        if digest in self._resident:
            del self._resident[digest]
            self._resident[digest] = None

    def take_swap(self, in_use: Mapping[bytes, float]) -> tuple[bytes, tuple[bytes, ...], bytes] | None:
        """The adapter to make resident, those that stay so, and the evicted one if it has rows; None if no swap is
        needed or possible. One at a time. `in_use`: the adapters of the worker's rows, with the priority of the most
        urgent one.

        No adapter makes place that a more urgent sequence wants: two sequences would take the slot from each other.
        """
        wanted, self._wanted = self._wanted, {}
        order = list(wanted)
        place = next((i for i, digest in enumerate(order) if self._is_missing(digest)), None)
        if place is None:
            self._retired = b""
        if place is None or self._loading:
            return None
        missing, before, evicted = order[place], order[:place], b""
        priority, is_starved = wanted[missing]
        if len(self._resident) >= self._num_slots:
            others = {digest: in_use.get(digest, math.inf) for digest in self._resident if digest not in before}
            less_urgent = [digest for digest in others if others[digest] > priority]
            if not less_urgent:
                self._retired = min(others, key=self._since.__getitem__, default=b"") if is_starved else b""
                return None
            chosen = max(less_urgent, key=lambda digest: (others[digest], digest not in wanted))
            del self._resident[chosen]
            evicted = chosen if chosen in in_use else b""
        self._loading, self._retired = missing, b""
        return missing, tuple(self._resident), evicted

    def _is_missing(self, digest: bytes) -> bool:
        return digest in self.loaded and digest not in self._resident

    def end_swap(self, digest: bytes, *, is_resident: bool) -> None:
        """The worker has answered. After a failure the adapter counts as not loaded until the worker reports it."""
        if digest == self._loading:
            self._loading = b""
        if not is_resident:
            self.loaded -= {digest}
        elif digest in self.loaded:
            self.num_swaps += 1
            self._resident[digest], self._since[digest] = None, self.num_swaps


class ResidentAdapters(WorkerPart):
    """Opens rows on one worker only while their adapter is resident."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self.slots = AdapterSlots(worker.capacity.max_adapters)

    @classmethod
    def check(cls, group: SequenceGroup, workers: Seq[WorkerState]) -> None:
        if not any(worker.part(cls).could_run(group) for worker in workers):
            raise NoWorkerError(
                f"no worker of this scheduler has the adapter with digest {adapter_of(group).hex()}; retry later or on "
                "another scheduler"
            )

    def could_run(self, group: SequenceGroup) -> bool:
        return self.slots.has(adapter_of(group))

    def is_ready(self, group: SequenceGroup) -> bool:
        return self.slots.is_ready(adapter_of(group))

    def prepare(self, group: SequenceGroup, *, is_starved: bool) -> bool:
        self.slots.want(adapter_of(group), group.priority, is_starved=is_starved)
        return self.slots.is_loading(adapter_of(group))

    def take_swap(self) -> AdapterSwap | None:
        """The next swap, if one is needed and possible."""
        in_use: dict[bytes, float] = {}
        for seq in self.worker.running():
            adapter = adapter_of(seq.group)
            in_use[adapter] = min(seq.group.priority, in_use.get(adapter, math.inf))
        found = self.slots.take_swap(in_use)
        return None if found is None else AdapterSwap(self.worker.capacity.worker_id, *found)


class UsesAdapter(Feature):
    """The adapter with this digest. The digest is part of the request's `root_key` too."""

    part = ResidentAdapters
    selects_workers = True
    needs_preparation = True

    def __init__(self, digest: bytes) -> None:
        self.digest = digest


def adapter_of(group: SequenceGroup) -> bytes:
    """The digest of a request's adapter; empty: none."""
    found = group.features.find(UsesAdapter)
    return b"" if found is None else found.digest


class AdapterSwaps:
    """The adapters of all workers. The caller swaps them and reports their memory.

    `preparing` has the workers that were asked to prepare since the last `take_swaps`. `on_change` is called when a
    worker can run other requests than before, with a function that tells which are affected: a resident adapter changes
    only which rows can open, so the end of a swap costs the queue nothing. `preempt` queues a running sequence again.
    """

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        groups: Mapping[str, SequenceGroup],
        preparing: dict[str, WorkerState],
        on_change: Callable[[Callable[[SequenceGroup], bool]], None],
        preempt: Callable[[WorkerState, Sequence], None],
    ) -> None:
        self._workers = workers
        self._groups = groups
        self.preparing = preparing
        self._on_change = on_change
        self._preempt = preempt

    def set_loaded(self, worker_id: str, digests: Iterable[bytes]) -> None:
        """The adapters in a worker's memory have changed."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        slots = worker.part(ResidentAdapters).slots
        before = slots.loaded
        slots.set_loaded(digests)
        if changed := before ^ slots.loaded:
            self._on_change(lambda group: adapter_of(group) in changed)

    def take_swaps(self) -> list[AdapterSwap]:
        """Adapters that workers must make resident for waiting sequences. The caller reports each one's end with
        `end_swap`.
        """
        swaps = [worker.part(ResidentAdapters).take_swap() for worker in self.preparing.values()]
        self.preparing.clear()
        taken = [swap for swap in swaps if swap is not None]
        for swap in taken:
            worker = self._workers[swap.worker_id]
            for seq in worker.running() if swap.evicted else ():
                if adapter_of(seq.group) == swap.evicted:
                    self._preempt(worker, seq)
        return taken

    def end_swap(self, worker_id: str, digest: bytes, *, is_resident: bool) -> None:
        """A worker has made an adapter resident, or failed to."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.part(ResidentAdapters).slots.end_swap(digest, is_resident=is_resident)
        if not is_resident:
            self._on_change(lambda group: adapter_of(group) == digest)

    def is_resident(self, worker_id: str, adapter: bytes) -> bool:
        """Whether rows of a worker can use an adapter now, or do although it is retired."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.part(ResidentAdapters).slots.is_resident(adapter)

    def counts(self, worker_id: str) -> tuple[int, int]:
        """The number of resident adapters of a worker, and of its swaps."""
        worker = self._workers.get(worker_id)
        slots = None if worker is None else worker.part(ResidentAdapters).slots
        return (0, 0) if slots is None else (slots.num_resident, slots.num_swaps)

    def num_requests_with(self, adapter: bytes) -> int:
        """Number of open requests that use an adapter."""
        return sum(adapter_of(group) == adapter for group in self._groups.values())
