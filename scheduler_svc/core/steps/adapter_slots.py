"""The adapters of one worker: those in its memory, and the few that its rows can use now (resident)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSwap:
    """Makes an adapter resident on a worker. No others than those in `kept` stay resident."""

    worker_id: str
    digest: bytes
    kept: tuple[bytes, ...] = ()


class AdapterSlots:
    """Decides which adapters are resident: the wanted ones, in place of the least recently used one without rows.

    A swap takes the worker longer than a step, so waiting sequences of the new adapter are placed when it is done. The
    rows of the evicted adapter in steps in flight are not affected: the worker keeps an adapter while a row has it.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.loaded: frozenset[bytes] = frozenset()  # in the worker's memory
        self.num_swaps = 0
        self._resident: dict[bytes, None] = {}  # the least recently used one first
        self._loading: bytes = b""
        self._wanted: dict[bytes, None] = {}  # in the order of the queue

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def set_loaded(self, digests: Iterable[bytes]) -> None:
        """The adapters in the worker's memory have changed."""
        self.loaded = frozenset(digests)
        for digest in self._resident.keys() - self.loaded:
            del self._resident[digest]

    def has(self, digest: bytes) -> bool:
        """Whether the worker can run sequences with this adapter, now or after a swap. Empty digest: no adapter."""
        return not digest or digest in self.loaded

    def is_ready(self, digest: bytes) -> bool:
        """Whether rows with this adapter can be opened now."""
        return not digest or digest in self._resident

    def is_loading(self, digest: bytes) -> bool:
        return digest == self._loading

    # -- swaps --------------------------------------------------------------------------------------------------------

    def want(self, digest: bytes) -> None:
        """A waiting sequence should run here. Wants hold until the next `take_swap`."""
        self._wanted[digest] = None
        if digest in self._resident:
            self._touch(digest)

    def take_swap(self, in_use: Collection[bytes]) -> tuple[bytes, tuple[bytes, ...]] | None:
        """The adapter to make resident and those that stay so, if a swap is needed and possible. One at a time.
        `in_use`: the adapters of the worker's rows.
        """
        wanted, self._wanted = self._wanted, {}
        missing = next((digest for digest in wanted if digest in self.loaded and digest not in self._resident), None)
        if missing is None or self._loading:
            return None
        if len(self._resident) >= self._num_slots:
            evicted = self._least_used(wanted, in_use)
            if not evicted:
                return None
            del self._resident[evicted]
        self._loading = missing
        return missing, tuple(self._resident)

    def _least_used(self, wanted: Collection[bytes], in_use: Collection[bytes]) -> bytes:
        """The least recently used adapter without rows; one that no waiting sequence wants, if there is one."""
        unused = [digest for digest in self._resident if digest not in in_use]
        return next((digest for digest in unused if digest not in wanted), unused[0] if unused else b"")

    def end_swap(self, digest: bytes, *, is_resident: bool) -> None:
        """The worker has answered. After a failure the adapter counts as not loaded until the worker reports it."""
        if digest == self._loading:
            self._loading = b""
        if not is_resident:
            self.loaded -= {digest}
        elif digest in self.loaded:
            self._resident[digest] = None
            self.num_swaps += 1

    def _touch(self, digest: bytes) -> None:
        del self._resident[digest]
        self._resident[digest] = None
