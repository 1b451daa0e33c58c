"""The adapters of a model: those that its workers should have, and those that each worker has.

Workers announce the adapters in their memory with every heartbeat. The set of a scheduler is the union of what its
workers have announced and what was loaded through it, so it survives a restart of the scheduler without a store:

    a worker joins with an adapter that is not in the set      the adapter joins the set
    a worker joins without an adapter of the set               the scheduler asks it to load the adapter
    a worker joins with other content under a name             the worker is refused
    an adapter was unloaded through this scheduler             workers that still announce it unload it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.internal.v1 import worker_pb2
from quire.v1 import inference_pb2, types_pb2

from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.agreement import WorkerRefusedError
from scheduler_svc.workers.leased_worker import LeasedWorker
from scheduler_svc.workers.worker_calls import WorkerCalls
from svc_common.errors import InvalidRequestError, NotConfiguredError, ServiceError, UnavailableError

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 128
MAX_ANNOUNCED = 4096


@dataclass(slots=True, eq=False)
class LeasedAdapters:
    """The adapters of one leased worker. `refused`: those that it could not load, which are not tried again."""

    link: LeasedWorker
    calls: WorkerCalls
    loaded: dict[str, worker_pb2.WorkerAdapter] = field(default_factory=dict)
    refused: set[tuple[str, bytes]] = field(default_factory=set)
    syncing: asyncio.Task[None] | None = None


class Adapters:
    """Owns the set of adapters, and brings each worker to it. `model()` is the name of the model; `on_change` is called
    when operators have changed the set.
    """

    def __init__(self, step_loop: StepLoop, model: Callable[[], str], on_change: Callable[[], None]) -> None:
        self._step_loop = step_loop
        self._model = model
        self._on_change = on_change
        self.known: dict[str, worker_pb2.WorkerAdapter] = {}  # others only read it
        self._removed: set[tuple[str, bytes]] = set()
        self._workers: dict[str, LeasedAdapters] = {}

    def reset(self) -> None:
        """Another model is served from now on."""
        self.known.clear()
        self._removed.clear()

    def infos(self) -> list[types_pb2.AdapterInfo]:
        """All adapters, by name, for gateways."""
        return [types_pb2.AdapterInfo(name=name, digest=a.digest) for name, a in sorted(self.known.items())]

    # -- workers ------------------------------------------------------------------------------------------------------

    def check(self, worker_id: str, announced: Sequence[worker_pb2.WorkerAdapter]) -> None:
        """Raise WorkerRefusedError if a worker has other content under the name of an adapter."""
        if len(announced) > MAX_ANNOUNCED:
            raise InvalidRequestError(
                f"adapters has {len(announced)} entries; must have at most {MAX_ANNOUNCED}", field="adapters"
            )
        for adapter in announced:
            known = self.known.get(adapter.name)
            if known is not None and known.digest != adapter.digest:
                raise WorkerRefusedError(
                    f"worker {worker_id} has adapter {adapter.name!r} with digest {adapter.digest.hex()}, but this "
                    f"scheduler serves {known.digest.hex()} under this name; start the worker with the same adapter, "
                    "or with another name",
                    field="adapters",
                )

    def join(self, link: LeasedWorker, announced: Iterable[worker_pb2.WorkerAdapter]) -> None:
        """A worker is leased. Call `check` first."""
        if link.calls is None:
            return
        worker = self._workers[link.worker_id] = LeasedAdapters(link, link.calls)
        link.calls.on_swapped = partial(self._report_swap, link)
        self._note(worker, announced)

    def leave(self, link: LeasedWorker) -> None:
        """The lease has ended."""
        worker = self._workers.get(link.worker_id)
        if worker is not None and worker.link is link:
            del self._workers[link.worker_id]
            if worker.syncing is not None:
                worker.syncing.cancel()

    def on_heartbeat(self, link: LeasedWorker, announced: Sequence[worker_pb2.WorkerAdapter]) -> bool:
        """A heartbeat has arrived. Whether the set has changed."""
        worker = self._workers.get(link.worker_id)
        if worker is None or worker.link is not link:
            return False
        names = set(self.known)
        if list(worker.loaded.values()) != list(announced):
            self._note(worker, announced)
        return set(self.known) != names

    def _note(self, worker: LeasedAdapters, announced: Iterable[worker_pb2.WorkerAdapter]) -> None:
        worker.loaded = {adapter.name: adapter for adapter in announced}
        for adapter in worker.loaded.values():
            if (adapter.name, adapter.digest) not in self._removed:
                self.known.setdefault(adapter.name, adapter)
        self._report(worker)
        self._sync(worker)

    def _report(self, worker: LeasedAdapters) -> None:
        """Tell the core which adapters the worker has: those with the content that the set names."""
        digests = {a.digest for a in worker.loaded.values() if a.digest == self._digest_of(a.name)}
        link = worker.link
        self._step_loop.report(lambda core, now: core.adapters.set_loaded(link.worker_id, digests), link)

    def _report_swap(self, link: LeasedWorker, digest: bytes, is_resident: bool) -> None:
        """Tell the core that a swap has ended."""
        self._step_loop.report(
            lambda core, now: core.adapters.end_swap(link.worker_id, digest, is_resident=is_resident), link
        )

    def _digest_of(self, name: str) -> bytes:
        known = self.known.get(name)
        return b"" if known is None else known.digest

    # -- bringing workers to the set ----------------------------------------------------------------------------------

    def _sync(self, worker: LeasedAdapters) -> None:
        if worker.syncing is None and self._difference(worker) != ([], []):
            worker.syncing = asyncio.create_task(self._bring(worker))
            worker.syncing.add_done_callback(lambda _: self._synced(worker))

    def _synced(self, worker: LeasedAdapters) -> None:
        worker.syncing = None

    def _difference(self, worker: LeasedAdapters) -> tuple[list[worker_pb2.WorkerAdapter], list[str]]:
        """The adapters that a worker lacks, and the names of those that it must unload."""
        missing = [
            adapter
            for name, adapter in self.known.items()
            if name not in worker.loaded and (name, adapter.digest) not in worker.refused
        ]
        removed = [a.name for a in worker.loaded.values() if (a.name, a.digest) in self._removed]
        return missing, removed

    async def _bring(self, worker: LeasedAdapters) -> None:
        missing, removed = self._difference(worker)
        for name in removed:
            try:
                await worker.calls.unload_adapter(name)
                worker.loaded.pop(name, None)
            except ServiceError as error:
                log.warning("adapter %s: %s", name, error.message)
        for adapter in missing:
            await self._load_missing(worker, adapter)
        self._report(worker)

    async def _load_missing(self, worker: LeasedAdapters, adapter: worker_pb2.WorkerAdapter) -> None:
        """Load an adapter of the set on a worker that lacks it. The worker serves without it if that fails."""
        try:
            found = await worker.calls.load_adapter(adapter.name, adapter.path)
            if found.digest != adapter.digest:
                await worker.calls.unload_adapter(adapter.name)
                raise ServiceError(f"its content has digest {found.digest.hex()}, others have {adapter.digest.hex()}")
            worker.loaded[adapter.name] = found
        except ServiceError as error:
            worker.refused.add((adapter.name, adapter.digest))
            log.error(
                "worker %s serves without adapter %r, which other workers have: %s",
                worker.link.worker_id, adapter.name, error.message,
            )  # fmt: skip

    # -- operators ----------------------------------------------------------------------------------------------------

    async def add(self, name: str, path: str) -> inference_pb2.Adapter:
        """Load an adapter on all workers. If it fails on one, it is loaded on none. Raises ServiceError."""
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequestError(f"name is {name!r}; use 1 to {MAX_NAME_CHARS} printable characters", field="name")
        if name == self._model():
            raise InvalidRequestError(f"name is {name!r}, which is the name of the model; use another", field="name")
        workers = list(self._workers.values())
        if not workers:
            raise UnavailableError("no worker is ready to load an adapter; retry later")
        if not any(worker.link.capacity.max_adapters for worker in workers):
            raise NotConfiguredError("the workers load no adapters; start them with --adapter-dir", field="path")
        had = {worker.link.worker_id for worker in workers if name in worker.loaded}
        results = await asyncio.gather(
            *(worker.calls.load_adapter(name, path) for worker in workers), return_exceptions=True
        )
        problem = _problem(name, results)
        if problem is not None:
            undone = [worker for worker in workers if worker.link.worker_id not in had]
            await asyncio.gather(*(worker.calls.unload_adapter(name) for worker in undone), return_exceptions=True)
            raise problem
        for worker, loaded in zip(workers, results, strict=True):
            if not isinstance(loaded, BaseException):
                worker.loaded[name] = self.known[name] = loaded
        self._removed.discard((name, self.known[name].digest))
        for worker in workers:
            self._report(worker)
        log.info("adapter %s is loaded on %d workers", name, len(workers))
        self._on_change()
        return self._describe(name)

    async def remove(self, name: str) -> bool:
        """Unload an adapter from all workers. False if none has it. Raises NotConfiguredError while requests use it."""
        adapter = self.known.get(name)
        if adapter is None:
            return False
        num_requests = self._step_loop.core.adapters.num_requests_with(adapter.digest)
        if num_requests:
            raise NotConfiguredError(
                f"adapter {name!r} is in use by {num_requests} requests; end them or wait, then unload it", field="name"
            )
        del self.known[name]
        self._removed.add((name, adapter.digest))
        for worker in self._workers.values():
            worker.refused.discard((name, adapter.digest))
            self._report(worker)
        workers = list(self._workers.values())
        results = await asyncio.gather(
            *(worker.calls.unload_adapter(name) for worker in workers), return_exceptions=True
        )
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, ServiceError):
                log.warning(
                    "adapter %s: %s; it is unloaded there when the worker reports it again", name, result.message
                )
            worker.loaded.pop(name, None)
        log.info("adapter %s is unloaded", name)
        self._on_change()
        return True

    def count(self, infos: Iterable[inference_pb2.WorkerInfo]) -> None:
        """Add the numbers of resident adapters and of swaps to what operators see of workers."""
        for info in infos:
            info.adapters_resident, info.adapter_swaps = self._step_loop.core.adapters.counts(info.worker_id)

    def describe(self) -> list[inference_pb2.Adapter]:
        """All adapters by name."""
        return [self._describe(name) for name in sorted(self.known)]

    def _describe(self, name: str) -> inference_pb2.Adapter:
        adapter = self.known[name]
        having = [w for w in self._workers.values() if name in w.loaded and w.loaded[name].digest == adapter.digest]
        return inference_pb2.Adapter(
            name=name,
            model=self._model(),
            digest=adapter.digest.hex(),
            path=adapter.path,
            num_workers=len(having),
            num_resident=sum(
                self._step_loop.core.adapters.is_resident(w.link.worker_id, adapter.digest) for w in having
            ),
        )


def _problem(name: str, results: Sequence[worker_pb2.WorkerAdapter | BaseException]) -> BaseException | None:
    """Why an adapter cannot be served: a worker failed to load it, or workers have different content."""
    failed = next((result for result in results if isinstance(result, BaseException)), None)
    if failed is not None:
        return failed
    digests = {result.digest.hex() for result in results if not isinstance(result, BaseException)}
    if len(digests) > 1:
        return InvalidRequestError(
            f"adapter {name!r} has different content on different workers (digests {', '.join(sorted(digests))}); copy "
            "the same folder to all of them",
            field="path",
        )
    return None
