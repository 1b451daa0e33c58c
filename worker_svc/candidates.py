"""The schedulers that a worker may register with, in its order of preference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

FIRST_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class Candidate:
    """One scheduler, and when to try it again. Times are the event loop's."""

    address: str
    next_try_at: float = 0.0
    next_return_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    logged: set[str] = field(default_factory=set)


def preference(worker_id: str, schedulers: Sequence[str]) -> list[str]:
    """The schedulers in this worker's order, which differs between workers. Adding one does not reorder the others."""
    return sorted(set(schedulers), key=lambda address: xxhash.xxh3_64_intdigest(f"{worker_id}\n{address}".encode()))


class Candidates:
    """The schedulers in order. They may change while the worker runs."""

    def __init__(self, worker_id: str, schedulers: Sequence[str] = ()) -> None:
        self._worker_id = worker_id
        self._ordered: list[Candidate] = []
        self._changed = asyncio.Event()
        self.update(schedulers)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    def update(self, schedulers: Sequence[str]) -> None:
        """These are the schedulers now. What is known about those that stay is kept."""
        known = {candidate.address: candidate for candidate in self._ordered}
        ordered = preference(self._worker_id, schedulers)
        self._ordered = [known.get(address) or Candidate(address) for address in ordered]
        self._changed.set()

    async def choose(self) -> Candidate:
        """The next scheduler to try: the first one whose pause has passed. Waits if all must wait, or there is none."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            ready = next((c for c in self._ordered if c.next_try_at <= now), None)
            if ready is not None:
                return ready
            await self._wait(min((c.next_try_at - now for c in self._ordered), default=None))

    async def _wait(self, pause_s: float | None) -> None:
        """Wait for the end of a pause, or for a change of the schedulers."""
        try:
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        except TimeoutError:
            return
