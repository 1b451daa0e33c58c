"""Updates of the weights: in two phases over all workers, so that no step mixes versions.

    begin    the update is open; its tensors are files below the workers' --weights-dir, checked by all workers
    prepare  every worker loads the new weights beside the old ones, while steps run
    barrier  no step is in flight, and none is planned
    decide   the new version is recorded in Redis, if there is one: from now on it is the version of the model
    switch   the keys of all blocks change, running rows are treated as the caller wants, the workers exchange weights
    release  steps go on

A failure before the decision leaves all workers on the old weights. After it, a worker that fails loses its lease, and
gets the new weights when it joins again; a scheduler that starts finds the record, or without Redis what its workers
announce. The highest version that is known is the version of the model: workers with a lower one get it before they
take a row. Several schedulers of a model follow the record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import rollouts_pb2 as pb
from quire.v1 import types_pb2

from prefix_index.index import PrefixIndex
from scheduler_svc.core.admission.barrier import Hold, HoldMode
from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.step_loop import ModelFacts, StepLoop
from scheduler_svc.workers import wire
from scheduler_svc.workers.leased_worker import LeasedWorker
from scheduler_svc.workers.worker_calls import WorkerCalls
from svc_common.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineError,
    InvalidRequestError,
    NotConfiguredError,
    ServiceError,
    UnavailableError,
)

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MAX_VERSION = 1 << 53  # Redis scripts count in float64
MAX_FILES = 4096  # of one update
FOLLOW_S = 1.0
DECIDE_TRIES = 20
RETRY_S = 0.25
LOST = (UnavailableError, DeadlineError)  # the worker did not answer: it may be gone
HOLDER = "update"
CHECK, STAGE, ACTIVATE, DROP, SLEEP, WAKE, FORGET_PREFIXES = worker_pb2.WeightsAction.values()[1:]


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """Weights of a model: the checkpoint's, with the tensors of these files, the oldest first."""

    version: int = 0
    files: tuple[str, ...] = ()
    revision: str = ""
    weights_digest: str = ""

    def as_fields(self) -> dict[str, Any]:
        """The fields of a worker's call."""
        return {"version": self.version, "files": self.files}

    @classmethod
    def parse(cls, text: str) -> WeightsRecord | None:
        """None for a text that another program has written."""
        try:
            found = json.loads(text)
            return cls(int(found["version"]), tuple(found["files"]), found["revision"], found["weights_digest"])
        except (ValueError, TypeError, KeyError):
            log.error("the record of the weights in Redis cannot be read, so it is ignored: %r", text[:200])
            return None


@dataclass(slots=True, eq=False)
class OpenUpdate:
    """An update before its end."""

    update_id: str
    version: int
    files: list[str] = field(default_factory=list)
    tensors: dict[str, pb.TensorChecksum] = field(default_factory=dict)
    committing: asyncio.Task[pb.CommitUpdateResponse] | None = None

    @property
    def digest(self) -> str:
        """See CommitUpdateRequest.digest."""
        lines = (
            f"{name}|{one.dtype}|{'x'.join(map(str, one.shape))}|{one.checksum}\n"
            for name, one in sorted(self.tensors.items())
        )
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())


class Weights:
    """Owns the version of the weights, the open update and what sleeps.

    `on_change(link, info)` is called when a worker computes with other weights.
    """

    def __init__(
        self, step_loop: StepLoop, index: PrefixIndex, on_change: Callable[[LeasedWorker, types_pb2.ModelInfo], None]
    ) -> None:
        self._step_loop = step_loop
        self._index = index
        self._on_change = on_change
        self.current = WeightsRecord()
        self.num_updates = 0
        self.num_failed = 0
        self.asleep: set[str] = set()
        self._base = ("", "")  # model and revision of the checkpoint
        self._num_holds = 0
        self._sleep: asyncio.Future[Hold] | None = None  # the hold of all that sleeps
        self._update: OpenUpdate | None = None
        self._newest: tuple[str, pb.CommitUpdateResponse] | None = None  # the last commit
        self._members: dict[str, LeasedWorker] = {}
        self._info = types_pb2.ModelInfo()  # of the worker that joined last
        self._turn = asyncio.Lock()  # of those that change the weights of workers
        self._following: asyncio.Task[None] | None = None

    # -- workers ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def joining(
        self, link: LeasedWorker, info: types_pb2.ModelInfo, announced: worker_pb2.UpdatedWeights, *, is_asleep: bool
    ) -> AsyncIterator[types_pb2.ModelInfo]:
        """Bring a leased worker to the weights of the model. Yields the model that it has then; the caller lets it
        join in the block. Raises ServiceError if it cannot get them.
        """
        async with self._turn:
            await self._start_with(info)
            mine = WeightsRecord(announced.version, tuple(announced.files), info.weights_revision, info.weights_digest)
            if mine.version > self.current.version:
                await self._catch_up_with(mine)
            is_other = mine.version != self.current.version or (
                self.current.version > 0 and mine.weights_digest != self.current.weights_digest
            )
            if is_other or is_asleep:
                log.info("worker %s gets the weights of version %d", link.worker_id, self.current.version)
                calls, weights = self._calls(link), self.current.as_fields()
                await calls.change_weights(STAGE, **weights)
                info = (await calls.change_weights(ACTIVATE, **weights)).info
            self._members[link.worker_id], self._info = link, info
            yield info

    def leave(self, link: LeasedWorker) -> None:
        """The lease has ended."""
        if self._members.get(link.worker_id) is link:
            del self._members[link.worker_id]

    async def _start_with(self, info: types_pb2.ModelInfo) -> None:
        """The first worker of a checkpoint: find its newest weights."""
        base = info.model, info.revision
        if self._base == base:
            return
        self._base, self.current, self._update = base, WeightsRecord(), None
        await self._follow_once()
        if self._index.is_shared and self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _catch_up_with(self, record: WeightsRecord) -> None:
        """A worker has newer weights: a commit that an earlier scheduler has decided. The others get them too."""
        if self._members:
            await self._stage_all(record.version, record.files)
            await self._held(HoldMode.KEEP, lambda: self._switch(record, keeps_kv=False))
        self.current = record

    async def _follow(self) -> None:
        """Follow the commits of other schedulers."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                async with self._turn:
                    await self._follow_once()
            except ServiceError as error:
                log.warning("newer weights cannot be loaded yet: %s", error.message)

    async def _follow_once(self) -> None:
        text = await self._index.read_weights(*self._base)
        record = WeightsRecord.parse(text) if text else None
        if record is not None and record.version > self.current.version:
            await self._catch_up_with(record)

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()

    def _calls(self, link: LeasedWorker) -> WorkerCalls:
        if link.calls is None:
            raise NotConfiguredError(f"the weights of worker {link.worker_id} cannot be changed")
        return link.calls

    # -- updates ------------------------------------------------------------------------------------------------------

    def begin(self, update_id: str, version: int) -> int:
        """Open an update. Returns its version."""
        check_name(update_id, "update_id")
        newest = self.current.version
        if self._update is not None and self._update.update_id == update_id:
            if version in (0, self._update.version):
                return self._update.version
            raise InvalidRequestError(
                f"version is {version}, but update {update_id} has begun with {self._update.version}", field="version"
            )
        if self._update is not None:
            raise AlreadyExistsError(
                f"update {self._update.update_id!r} is open; wait for its end, or end it with AbortUpdate",
                field="update_id",
            )
        if version and not newest < version <= MAX_VERSION:
            raise InvalidRequestError(
                f"version is {version}; must be above {newest}, the version in use, and at most {MAX_VERSION}",
                field="version",
            )
        self._update = OpenUpdate(update_id, version or newest + 1)
        log.info("update %s begins: version %d", update_id, self._update.version)
        return self._update.version

    async def put(self, update_id: str, path: str) -> list[pb.TensorChecksum]:
        """Add a file below the workers' --weights-dir. All workers must read the same tensors from it."""
        update = self._open(update_id)
        if not path:
            raise InvalidRequestError("path is empty; name a safetensors file below --weights-dir", field="path")
        if len(update.files) >= MAX_FILES:
            raise InvalidRequestError(f"the update has {MAX_FILES} files; put more tensors into each", field="path")
        files = [*self.current.files, *update.files, path]
        found = await self._ask_all(CHECK, files=files)
        sums = [[one.SerializeToString(deterministic=True) for one in each.tensors] for each in found.values()]
        if any(other != sums[0] for other in sums):
            raise InvalidRequestError(
                f"{path!r} has different content on different workers; --weights-dir must be one folder that all "
                "workers share",
                field="path",
            )
        tensors = list(next(iter(found.values())).tensors)
        if self._update is not update:
            raise InvalidRequestError(f"update {update_id!r} has ended", field="update_id")
        update.files.append(path)
        update.tensors |= {one.name: one for one in tensors}
        return tensors

    async def write(self, update_id: str, pieces: AsyncIterator[bytes]) -> list[pb.TensorChecksum]:
        """Add a file whose bytes arrive. One worker writes it to the folder that all share."""
        update = self._open(update_id)
        link = next(iter(self._members.values()), None)
        if link is None:
            raise UnavailableError("no worker is ready to write the tensors; retry later")
        path = f"updates/{update.version}-{update_id.replace(':', '_')}-{len(update.files)}.safetensors"
        await self._calls(link).write_tensors(path, pieces)
        return await self.put(update_id, path)

    async def prepare(self, update_id: str, digest: str) -> None:
        """Load the new weights on all workers. After a failure all have only the old ones."""
        update = self._open(update_id)
        self._check_digest(update, digest)
        try:
            await self._stage_all(update.version, self._files_with(update))
        except ServiceError:
            self.num_failed += 1
            await self._ask_all(DROP, is_needed=False)
            raise

    async def commit(self, update_id: str, digest: str, rows: pb.RunningRows.ValueType) -> pb.CommitUpdateResponse:
        """Compute with the new weights. A commit that has begun comes to an end, even if the caller leaves."""
        is_open = self._update is not None and self._update.update_id == update_id
        if not is_open and self._newest is not None and self._newest[0] == update_id:
            return self._newest[1]  # a retry
        update = self._open(update_id)
        if rows not in pb.RunningRows.values():
            raise InvalidRequestError(f"running_rows is {rows}, which is not a value", field="running_rows")
        is_retiring = rows == pb.RUNNING_ROWS_RETIRE
        if is_retiring and any(not holder.startswith(HOLDER) for holder in self._step_loop.core.barrier.holders):
            raise InvalidRequestError(
                "running_rows is RETIRE, but no row runs on during a pause; end the pause, or choose another value",
                field="running_rows",
            )
        if update.committing is None:
            await self.prepare(update_id, digest)
            update.committing = update.committing or asyncio.create_task(self._commit(update, rows))
            update.committing.add_done_callback(_retrieved)
        return await asyncio.shield(update.committing)

    async def _commit(self, update: OpenUpdate, rows: pb.RunningRows.ValueType) -> pb.CommitUpdateResponse:
        mode = HoldMode.FINISH if rows == pb.RUNNING_ROWS_RETIRE else HoldMode.KEEP
        keeps_kv = rows == pb.RUNNING_ROWS_KEEP
        try:
            num_rows = await self._held(mode, lambda: self._decide_and_switch(update, keeps_kv=keeps_kv))
        except BaseException:
            self.num_failed += 1
            update.committing = None
            await self._ask_all(DROP, is_needed=False)
            raise
        self.num_updates += 1
        self._update = None
        response = pb.CommitUpdateResponse(weights=self.weights, num_rows=num_rows, num_workers=len(self._members))
        self._newest = update.update_id, response
        return response

    async def _decide_and_switch(self, update: OpenUpdate, *, keeps_kv: bool) -> int:
        async with self._turn:
            if update.version <= self.current.version:
                raise AlreadyExistsError(
                    f"version is {update.version}, but {self.current.version} is in use by now; begin another update",
                    field="version",
                )
            # Workers that have joined since `prepare` load the weights now.
            record = await self._stage_all(update.version, self._files_with(update))
            await self._decide(record)
            return await self._switch(record, keeps_kv=keeps_kv)

    async def abort(self, update_id: str) -> None:
        """End an update without a change. Does nothing if it is not open."""
        update = self._update
        if update is None or update.update_id != update_id:
            return
        if update.committing is not None:
            raise AlreadyExistsError(f"update {update_id!r} is being committed", field="update_id")
        self._update = None
        await self._ask_all(DROP, is_needed=False)

    def _open(self, update_id: str) -> OpenUpdate:
        if self._update is None or self._update.update_id != update_id:
            raise InvalidRequestError(f"no update {update_id[:64]!r} is open; begin it first", field="update_id")
        return self._update

    def _check_digest(self, update: OpenUpdate, digest: str) -> None:
        if not update.files:
            raise InvalidRequestError("the update has no tensors; put some first", field="tensors")
        if digest and digest != update.digest:
            raise InvalidRequestError(
                f"digest is {digest[:64]!r}, but the tensors of the update have {update.digest}", field="digest"
            )

    def _files_with(self, update: OpenUpdate) -> list[str]:
        return [*self.current.files, *update.files]

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _stage_all(self, version: int, files: Sequence[str]) -> WeightsRecord:
        """Load weights on all workers that do not have them. All must get the same ones."""
        found = await self._ask_all(STAGE, version=version, files=files)
        facts = {(one.info.weights_revision, one.info.weights_digest) for one in found.values()}
        if len(facts) > 1:
            raise InvalidRequestError(
                "the workers have read different tensors; --weights-dir must be one folder that all share, and its "
                "files must not change",
                field="tensors",
            )
        used = next(iter(found.values())).used_files
        return WeightsRecord(version, tuple(used), *facts.pop())

    async def _ask_all(
        self, action: worker_pb2.WeightsAction.ValueType, *, is_needed: bool = True, **fields: Any
    ) -> dict[str, worker_pb2.ChangeWeightsResponse]:
        """The answers of all workers. Raises the first refusal. A worker that does not answer loses its lease: it gets
        the weights when it joins again.
        """
        links = list(self._members.values())
        calls = (self._calls(link).change_weights(action, **fields) for link in links)
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = dict[str, worker_pb2.ChangeWeightsResponse]()
        for link, result in zip(links, results, strict=True):
            if self._members.get(link.worker_id) is not link:
                continue  # it has left meanwhile
            if isinstance(result, LOST):
                link.close(f"it did not answer about its weights: {result.message}")
                self.leave(link)
            elif not isinstance(result, BaseException):
                answers[link.worker_id] = result
            elif is_needed:
                raise result
        if is_needed and not answers:
            raise UnavailableError("no worker is ready; retry later", retry_after_s=1.0)
        return answers

    async def _held(self, mode: HoldMode, act: Callable[[], Awaitable[int]]) -> int:
        """Act while no worker computes."""
        self._num_holds += 1
        holder = f"{HOLDER}:{self._num_holds}"  # a commit and a worker that joins may hold it at the same time
        try:
            await self._step_loop.hold(Hold(holder, mode))
            return await act()
        finally:
            self._step_loop.release(holder)

    async def _decide(self, record: WeightsRecord) -> None:
        """From now on these are the weights of the model, whatever fails. Raises UnavailableError or AlreadyExistsError
        if they are not.
        """
        text = json.dumps(asdict(record))
        for _ in range(DECIDE_TRIES):
            held = await self._index.write_weights(*self._base, record.version, text)
            if held is not None:
                if WeightsRecord.parse(held) != record:
                    raise AlreadyExistsError(
                        f"version {record.version} or a later one was committed with other tensors", field="version"
                    )
                return
            await asyncio.sleep(RETRY_S)
        raise UnavailableError("Redis does not answer, so the new version cannot be recorded; commit again later")

    async def _switch(self, record: WeightsRecord, *, keeps_kv: bool) -> int:
        """All workers exchange their weights. Returns the number of rows that ran."""
        info = types_pb2.ModelInfo()
        info.CopyFrom(self._info)
        info.weight_version, info.weights_revision = record.version, record.revision
        info.weights_digest = record.weights_digest
        facts, self._info = ModelFacts(frozenset(info.eos_token_ids), wire.root_salt(info)), info
        weights = types_pb2.WeightVersion(
            version=record.version, revision=record.revision, weights_digest=record.weights_digest
        )
        change = scheduler_pb2.WeightsChange(weights=weights, keeps_kv=keeps_kv)
        num_rows = await self._step_loop.change_weights(facts, change)
        self.current = record
        await asyncio.gather(*(self._activate(link, record) for link in list(self._members.values())))
        log.info(
            "weights of version %d are in use on %d workers, %d rows ran", record.version, len(self._members), num_rows
        )
        return num_rows

    async def _activate(self, link: LeasedWorker, record: WeightsRecord) -> None:
        try:
            info = (await self._calls(link).change_weights(ACTIVATE, **record.as_fields())).info
        except ServiceError as error:
            link.close(f"it did not get the weights of version {record.version}: {error.message}")
            self.leave(link)
            return
        self._on_change(link, info)
        if link.capacity.movement is not None:
            link.close("its blocks have another layout now")  # it registers with that

    # -- memory -------------------------------------------------------------------------------------------------------

    async def sleep(self, tags: Iterable[str]) -> None:
        """Free memory of all workers. Requests wait until `wake` has got all of it back."""
        wanted = checked_tags(tags)
        sleep = self._sleep = self._sleep or self._step_loop.hold(Hold("sleep", HoldMode.KEEP))
        await asyncio.shield(sleep)
        async with self._turn:
            if self._sleep is not sleep:
                raise AbortedError("the workers were woken before all of them had stopped; call it again")
            self.asleep |= wanted
            if "kv_cache" in wanted:
                await self._step_loop.change(_free_kv)
            await self._ask_all(SLEEP, tags=sorted(wanted))

    async def wake(self, tags: Iterable[str]) -> None:
        """Get memory back. Steps go on when nothing sleeps any more."""
        named = checked_tags(tags)
        async with self._turn:
            if wanted := sorted(named & self.asleep):
                await self._ask_all(WAKE, tags=wanted, **self.current.as_fields())
            self.asleep -= set(wanted)
            if not self.asleep:
                self._step_loop.release("sleep")
                self._sleep = None

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, in pools and tiers."""
        await self._held(HoldMode.KEEP, self._forget_prefixes)

    async def _forget_prefixes(self) -> int:
        await self._step_loop.change(lambda core: core.forget_prefixes())
        if self._members:
            await self._ask_all(FORGET_PREFIXES)
        return 0

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.current.version

    @property
    def weights(self) -> types_pb2.WeightVersion:
        """The weights in use."""
        info = self._info
        return types_pb2.WeightVersion(
            version=self.current.version,
            revision=info.weights_revision or info.revision,
            weights_digest=info.weights_digest,
        )

    def describe(self) -> pb.GetWeightsResponse:
        """The weights in use, and the open update."""
        response = pb.GetWeightsResponse(
            weights=self.weights, num_workers=len(self._members), asleep=sorted(self.asleep)
        )
        if (update := self._update) is not None:
            response.update_id, response.update_version = update.update_id, update.version
            response.tensors.extend(update.tensors[name] for name in sorted(update.tensors))
        return response


def check_name(name: str, of_field: str) -> None:
    """Raise InvalidRequestError for an id that a caller must not choose."""
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{of_field} is {name[:64]!r}; use 1 to 64 letters, digits, '.', '_', ':' or '-'", field=of_field
        )


def checked_tags(tags: Iterable[str]) -> set[str]:
    """The kinds of memory. Raises InvalidRequestError."""
    found = set(tags) or {"weights", "kv_cache"}
    for tag in sorted(found - {"weights", "kv_cache"}):
        raise InvalidRequestError(f"tags has {tag[:64]!r}; use weights or kv_cache", field="tags")
    return found


def _free_kv(core: Scheduler) -> None:
    core.barrier.retract(MigrationReason.PAUSE)
    core.forget_prefixes()


def _retrieved(task: asyncio.Task[Any]) -> None:
    """The caller may have left."""
    with suppress(asyncio.CancelledError):
        task.exception()
