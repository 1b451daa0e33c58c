"""The adapters of a worker: all of them in host memory, and those that rows may use in the form of the backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from step_protocol.types import WorkerAdapter
from worker_svc.engine.adapters.config import AdapterError

MAX_NAME_CHARS = 128


class LoadedAdapter(Protocol):
    """An adapter in host memory."""

    @property
    def digest(self) -> bytes: ...
    @property
    def num_bytes(self) -> int: ...


L = TypeVar("L", bound=LoadedAdapter)
P = TypeVar("P")


class AdapterStore(Generic[L, P]):
    """Adapters by name in host memory, and at most `max_resident` of them packed for the backend.

    Loading and packing take long, so any thread may call any method. `find` never waits. The scheduler decides which
    adapters are resident: only it knows which ones the steps in flight use.
    """

    def __init__(
        self, load: Callable[[Path], L], pack: Callable[[L], P], *, max_resident: int, max_loaded: int
    ) -> None:
        self._load = load
        self._pack = pack
        self.max_resident = max_resident
        self._max_loaded = max_loaded
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[WorkerAdapter, L]] = {}
        self._resident: dict[bytes, P] = {}
        self._generation = 0  # incremented by `reset`; a swap that began before it has no effect
        self.num_swaps = 0  # number of times that an adapter became resident

    def load(self, name: str, path: Path) -> WorkerAdapter:
        """Reads an adapter from a folder. Loading the same content again changes nothing. Raises AdapterError."""
        _check_name(name)
        adapter = self._load(path)
        with self._lock:
            self._check_room(name, adapter.digest)
            if name not in self._loaded:
                self._loaded[name] = WorkerAdapter(name, adapter.digest, str(path)), adapter
            return self._loaded[name][0]

    def _check_room(self, name: str, digest: bytes) -> None:
        known = self._loaded.get(name)
        if known is not None and known[0].digest != digest:
            raise AdapterError(
                f"adapter {name!r} is loaded with other content (digest {known[0].digest.hex()}, now {digest.hex()}); "
                "unload it first, or use another name"
            )
        if known is None and len(self._loaded) >= self._max_loaded:
            raise AdapterError(
                f"adapter {name!r}: {self._max_loaded} adapters are loaded, the limit of --max-loaded-adapters; unload "
                "one first"
            )

    def unload(self, name: str) -> bool:
        """Forgets an adapter. Rows that use it finish with it. False if there is none of this name."""
        with self._lock:
            found = self._loaded.pop(name, None)
            if found is None:
                return False
            digest = found[0].digest
            if not any(entry.digest == digest for entry, _ in self._loaded.values()):
                self._resident.pop(digest, None)
            return True

    def swap(self, digest: bytes, kept: Collection[bytes] = ()) -> None:
        """Makes an adapter resident; of the others, only those in `kept` stay resident. Raises AdapterError."""
        with self._lock:
            self._resident = {other: packed for other, packed in self._resident.items() if other in (digest, *kept)}
            generation = self._generation
            adapter = next((a for entry, a in self._loaded.values() if entry.digest == digest), None)
            if adapter is None:
                raise AdapterError(f"no adapter with digest {digest.hex()} is loaded on this worker")
            if digest in self._resident:
                return
            if len(self._resident) >= self.max_resident:
                raise AdapterError(f"{self.max_resident} adapters are resident, the limit of --max-adapters")
        packed = self._pack(adapter)
        with self._lock:
            is_loaded = any(entry.digest == digest for entry, _ in self._loaded.values())
            if is_loaded and generation == self._generation:
                self._resident[digest] = packed
                self.num_swaps += 1

    def find(self, digest: bytes) -> P | None:
        """The resident adapter with this digest."""
        return self._resident.get(digest)

    def reset(self) -> None:
        """No adapter is resident any more, for a new lease."""
        with self._lock:
            self._generation += 1
            self._resident.clear()

    def entries(self) -> list[WorkerAdapter]:
        """All loaded adapters, by name."""
        with self._lock:
            return [self._loaded[name][0] for name in sorted(self._loaded)]

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_bytes(self) -> int:
        """Host memory of the loaded adapters."""
        with self._lock:
            return sum(adapter.num_bytes for _, adapter in self._loaded.values())


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise AdapterError(f"name: {name!r} is not 1 to {MAX_NAME_CHARS} printable characters")
