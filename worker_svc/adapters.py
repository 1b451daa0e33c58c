"""Loads and swaps the adapters of this worker in a thread of their own, so that no step waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from step_protocol.types import WorkerAdapter
from svc_common.errors import InvalidRequestError, NotConfiguredError
from worker_svc.engine.adapters.config import AdapterError
from worker_svc.engine.adapters.store import AdapterStore
from worker_svc.lifecycle import Lifecycle
from worker_svc.wire import adapters_to_proto

log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerAdapters:
    """Changes the adapters of the loaded model, one change at a time, and announces them.

    `folder`: adapters are loaded on request only from below it. None: from nowhere.
    """

    def __init__(
        self, store: Callable[[], AdapterStore[Any, Any] | None], lifecycle: Lifecycle, folder: Path | None
    ) -> None:
        self._find_store = store
        self._lifecycle = lifecycle
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    async def load(self, name: str, path: str) -> WorkerAdapter:
        """Load an adapter into memory. Raises InvalidRequestError with the cause, or NotConfiguredError."""
        store = self._store
        folder = self._allowed(path)
        try:
            entry = await self._run(lambda: store.load(name, folder))
        except AdapterError as error:
            raise InvalidRequestError(str(error), field="path") from None
        log.info("loaded adapter %s from %s, digest %s", name, folder, entry.digest.hex())
        self.announce()
        return entry

    async def unload(self, name: str) -> bool:
        """Remove an adapter from memory. False if there is none of this name."""
        store = self._store
        was_loaded = await self._run(lambda: store.unload(name))
        if was_loaded:
            log.info("unloaded adapter %s", name)
            self.announce()
        return was_loaded

    async def swap(self, digest: bytes, kept: Collection[bytes]) -> None:
        """Make an adapter resident. Raises InvalidRequestError if it is not loaded."""
        store = self._store
        try:
            await self._run(lambda: store.swap(digest, kept))
        except AdapterError as error:
            raise InvalidRequestError(str(error), field="digest") from None

    def announce(self) -> None:
        """Send the list of adapters to the scheduler with the next heartbeat, at once."""
        store = self._find_store()
        if store is not None:
            self._lifecycle.set_adapters(adapters_to_proto(store.entries()))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def _store(self) -> AdapterStore[Any, Any]:
        store = self._find_store()
        if store is None or not store.max_resident:
            raise NotConfiguredError(
                "this worker loads no adapters; start it with --adapter-dir, and with a backend that computes them"
            )
        return store

    def _allowed(self, path: str) -> Path:
        """The folder of an adapter. Raises InvalidRequestError if it is not below --adapter-dir."""
        if self._folder is None:
            raise NotConfiguredError(
                "this worker loads adapters only at its start (--adapter); start it with --adapter-dir", field="path"
            )
        return found_below(self._folder, path, "--adapter-dir")

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def found_below(folder: Path, path: str, flag: str) -> Path:
    """A path of a request, below the folder of this flag. Raises InvalidRequestError."""
    if not path or "\0" in path:
        raise InvalidRequestError(f"path is {path!r}; name what is below {flag}", field="path")
    root = folder.resolve()
    found = (root / path).resolve()
    if found == root or not found.is_relative_to(root):
        raise InvalidRequestError(
            f"path {path!r} is not below {root}, the worker's {flag}; copy it there", field="path"
        )
    return found
