"""The workers of this scheduler: registered, leased or lost.

    Register stream    identity, state and heartbeats; may break and reconnect while the lease continues
    lease              from READY until the step stream breaks, the worker is silent, or a step takes too long

When a lease ends, the Register stream ends with the reason; the worker registers again and gets a new lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2, types_pb2

from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import SchedulerStats, WorkerStats
from scheduler_svc.step_loop import ModelFacts, StepLoop
from scheduler_svc.workers import wire as worker_wire
from scheduler_svc.workers.adapters import Adapters
from scheduler_svc.workers.agreement import Agreement, WorkerRefusedError
from scheduler_svc.workers.leased_worker import Dialer, LeasedWorker
from scheduler_svc.workers.rollouts import Rollouts
from scheduler_svc.workers.weights import Weights
from svc_common.errors import AlreadyExistsError, InvalidRequestError, NotFoundError, ServiceError, UnavailableError
from svc_common.tasks import wait_for_peer

log = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 15
LOST_SHOWN_S = 300.0  # how long status shows a lost worker
DRAIN_REFUSED_S = 2.0  # time within which a worker reports that it cannot be drained
MAX_RELEASE_S = 24 * 3600.0

LOADING = types_pb2.WORKER_STATE_LOADING
READY = types_pb2.WORKER_STATE_READY
DRAINING = types_pb2.WORKER_STATE_DRAINING


@dataclass(slots=True, eq=False)
class RegisterStream:
    """One Register stream. When the scheduler ends it, `ended` is set to an error, or to None for a normal end."""

    ended: asyncio.Future[ServiceError | None]

    def end(self, error: ServiceError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """State of one worker process, with its newest message. A restarted worker gets a new record."""

    worker_id: str
    worker_epoch: int
    address: str
    newest: scheduler_pb2.RegisterRequest = field(default_factory=scheduler_pb2.RegisterRequest)
    registration: RegisterStream | None = None
    link: LeasedWorker | None = None  # set while the worker accepts steps
    lease_task: asyncio.Task[None] | None = None
    info: types_pb2.ModelInfo | None = None
    lost_at: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.link is not None and self.newest.state == READY


class WorkerPool:
    """Owns registrations and leases of workers. Reports to the step loop when a worker joins, drains or is lost.

    `on_change(info, ready_workers)` is called when either may have changed. `revision`: the only accepted one.
    """

    def __init__(
        self,
        step_loop: StepLoop,
        dialer: Dialer,
        *,
        heartbeat_timeout_s: float,
        on_change: Callable[[types_pb2.ModelInfo | None, int], None],
        revision: str = "",
    ) -> None:
        self._step_loop = step_loop
        self._dialer = dialer
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._workers: dict[str, WorkerRecord] = {}
        self._agreement = Agreement(revision)
        self.adapters = Adapters(step_loop, lambda: self._model_name, self._changed)
        self.rollouts = Rollouts(step_loop, Weights(step_loop, dialer.index, self._weights_changed))
        self._info: types_pb2.ModelInfo | None = None
        self._releases: set[asyncio.Task[int]] = set()
        self._is_closed = False

    @property
    def info(self) -> types_pb2.ModelInfo | None:
        """The model, with the largest pool and row count of all leased workers; None before the first lease."""
        return self._info

    @property
    def served(self) -> types_pb2.ModelInfo | None:
        """The model of the leased workers; None without one."""
        return self._info if self._has_links else None

    @property
    def weights(self) -> Weights:
        """The version of the weights."""
        return self.rollouts.weights

    @property
    def num_ready(self) -> int:
        return sum(worker.is_ready for worker in self._workers.values())

    @property
    def num_members(self) -> int:
        """Number of workers that are registered or leased, and do not drain."""
        return len(self._members())

    def _members(self) -> list[WorkerRecord]:
        """The workers in `num_members`, in the order in which they came."""
        return [
            worker
            for worker in self._workers.values()
            if worker.newest.state != DRAINING and (worker.registration is not None or worker.link is not None)
        ]

    @property
    def _has_links(self) -> bool:
        return any(worker.link is not None for worker in self._workers.values())

    # -- registration -------------------------------------------------------------------------------------------------

    async def register(
        self,
        requests: AsyncIterator[scheduler_pb2.RegisterRequest],
        check_id: Callable[[str], None] = lambda worker_id: None,
    ) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        """Serve one Register stream. Raises the error that refuses the worker. A broken stream does not end a lease.

        `check_id` raises an error if the caller may not use a worker id.
        """
        stream = aiter(requests)
        first = await anext(stream, None)
        if first is None:
            return
        check_id(first.worker_id)
        worker = self._admit(first)
        registration = RegisterStream(asyncio.get_running_loop().create_future())
        self._replace_registration(worker, registration)
        try:
            yield scheduler_pb2.RegisterResponse(
                accepted=scheduler_pb2.RegisterAccepted(
                    heartbeat_interval_s=self._heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
                )
            )
            self._hear(worker, first)
            while (request := await self._next_heartbeat(stream, worker, registration)) is not None:
                self._hear(worker, request)
                yield scheduler_pb2.RegisterResponse(heartbeat_ack=self._acknowledge(worker))
            if registration.ended.done() and (error := registration.ended.result()) is not None:
                raise error
        finally:
            self._leave(worker, registration)

    def _acknowledge(self, worker: WorkerRecord) -> scheduler_pb2.HeartbeatAck:
        members = self._members()
        num_earlier = members.index(worker) if worker in members else 0
        return scheduler_pb2.HeartbeatAck(num_workers=len(members), num_earlier=num_earlier)

    async def _next_heartbeat(
        self, stream: AsyncIterator[scheduler_pb2.RegisterRequest], worker: WorkerRecord, registration: RegisterStream
    ) -> scheduler_pb2.RegisterRequest | None:
        """The next message; None if either side has ended the stream or the worker was silent for too long."""
        following = asyncio.ensure_future(_next(stream))
        try:
            if not await wait_for_peer(following, registration.ended, timeout_s=self._heartbeat_timeout_s):
                self._give_up(worker, registration)
            return None if registration.ended.done() else following.result()
        finally:
            following.cancel()

    def _give_up(self, worker: WorkerRecord, registration: RegisterStream) -> None:
        """End the stream of a silent worker, whose host may be gone. Its link watches a leased worker. A handshake
        has no such watch: it would wait for minutes, and the worker's id would be refused meanwhile.
        """
        registration.end(UnavailableError(f"no heartbeat for {self._heartbeat_timeout_s:g} s; register again"))
        if worker.link is None and worker.lease_task is not None and worker.registration is registration:
            log.warning("worker %s was lost before it was ready: no heartbeat", worker.worker_id)
            worker.lease_task.cancel()

    def _admit(self, request: scheduler_pb2.RegisterRequest) -> WorkerRecord:
        """The record of this worker process. Raises AlreadyExistsError if another live process uses its worker id."""
        if self._is_closed:
            raise UnavailableError("the scheduler is stopping; register again later")
        for name in ("worker_id", "address"):
            if not getattr(request, name):
                raise InvalidRequestError(f"{name} is empty; a worker must send it", field=name)
        known = self._workers.get(request.worker_id)
        if known is None or known.lost_at is not None:
            return self._remember(request)
        if known.worker_epoch == request.worker_epoch:
            known.address = request.address
            return known
        if known.registration is not None or known.link is not None:
            raise AlreadyExistsError(
                f"worker_id {request.worker_id!r} is in use by a worker at {known.address}; give each worker its own "
                f"--worker-id, or wait {self._heartbeat_timeout_s:g} s if the other worker has exited",
                field="worker_id",
            )
        return self._remember(request)

    def _remember(self, request: scheduler_pb2.RegisterRequest) -> WorkerRecord:
        self._workers = {known.worker_id: known for known in self._known()}
        worker = WorkerRecord(request.worker_id, request.worker_epoch, request.address)
        self._workers[worker.worker_id] = worker
        log.info("worker %s registered from %s", worker.worker_id, worker.address)
        return worker

    def _replace_registration(self, worker: WorkerRecord, registration: RegisterStream) -> None:
        if worker.registration is not None:
            worker.registration.end(UnavailableError("a newer Register stream of this worker replaces this one"))
        worker.registration = registration

    def _leave(self, worker: WorkerRecord, registration: RegisterStream) -> None:
        """The stream has ended. Without a lease the worker is lost; a leased worker is watched by its link."""
        if worker.registration is not registration:
            return
        worker.registration = None
        if worker.lease_task is None:
            self._mark_lost(worker)

    def _hear(self, worker: WorkerRecord, request: scheduler_pb2.RegisterRequest) -> None:
        """Handle a heartbeat, which may bring a new state."""
        was_draining = worker.newest.state == DRAINING
        worker.newest = request
        if worker.link is not None:
            worker.link.record_alive()
            if request.is_stuck:
                worker.link.close("its running step hangs")
            has_adapters = worker.newest.adapters or self.adapters.known
            if has_adapters and self.adapters.on_heartbeat(worker.link, worker.newest.adapters):
                self._changed()
        if request.state == READY and worker.lease_task is None and not request.is_stuck:
            self._start_lease(worker, request)
        if request.state == DRAINING and not was_draining and worker.link is not None:
            self._step_loop.worker_draining(worker.link)
            self._changed()

    async def inspect(
        self, worker_id: str, kind: inference_pb2.InspectKind.ValueType, seconds: float, hz: int
    ) -> bytes:
        """A profile or a report of a worker. Raises ServiceError."""
        worker, _ = self._leased(worker_id)
        return await self._dialer.inspect(worker.address, worker_id, kind, seconds, hz)

    def _leased(self, worker_id: str) -> tuple[WorkerRecord, LeasedWorker]:
        worker = self._workers.get(worker_id)
        if worker is None or worker.link is None:
            known = ", ".join(w.worker_id for w in self._workers.values() if w.link is not None) or "none"
            raise NotFoundError(
                f"no worker {worker_id!r} is leased by this scheduler; leased workers: {known}", field="worker_id"
            )
        return worker, worker.link

    async def release(self, worker_id: str, timeout_s: float) -> int:
        """Start to drain a worker, here and in its own process. Returns the number of sequences that it was running.

        The worker has `timeout_s` (0: its own limit) to drain; this method does not wait for that. Raises ServiceError
        if the worker refuses or cannot be reached.
        """
        worker, link = self._leased(worker_id)
        if not 0 <= timeout_s <= MAX_RELEASE_S:
            raise InvalidRequestError(
                f"timeout_s is {timeout_s:g}; must be from 0 to {MAX_RELEASE_S:g}", field="timeout_s"
            )
        num_rows = self._step_loop.num_rows(worker_id)
        self._step_loop.worker_draining(link, timeout_s)
        draining = asyncio.create_task(self._dialer.drain(worker.address, worker_id, timeout_s))
        self._releases.add(draining)
        draining.add_done_callback(self._released)
        await asyncio.wait([draining], timeout=DRAIN_REFUSED_S)
        if draining.done() and (error := draining.exception()) is not None:
            raise error
        return num_rows

    def _released(self, draining: asyncio.Task[int]) -> None:
        self._releases.discard(draining)
        if not draining.cancelled() and (error := draining.exception()) is not None:
            log.warning("a released worker may not have drained: %s", error)

    # -- leases -------------------------------------------------------------------------------------------------------

    def _start_lease(self, worker: WorkerRecord, request: scheduler_pb2.RegisterRequest) -> None:
        capacity = worker_wire.capacity_from_proto(request)
        info = request.capacity.info
        if info.block_size != capacity.block_size:
            raise WorkerRefusedError(
                f"capacity.block_size is {capacity.block_size}, but capacity.info.block_size is {info.block_size}",
                field="capacity.block_size",
            )
        self._check_agreement(worker.worker_id, info)
        self.adapters.check(worker.worker_id, worker.newest.adapters)
        worker.info = types_pb2.ModelInfo()
        worker.info.CopyFrom(info)
        worker.info.max_num_blocks = capacity.num_blocks
        worker.info.max_num_seqs = capacity.max_num_seqs
        replaces = request.replaces_revision
        worker.lease_task = asyncio.create_task(self._keep_lease(worker, capacity, worker.info, replaces))

    def _check_agreement(self, worker_id: str, info: types_pb2.ModelInfo) -> None:
        """Raise WorkerRefusedError if the worker differs from the model in use. An unused model may be replaced."""
        self._agreement.check_pinned(worker_id, info)
        if self._has_links or self._step_loop.has_work:
            self._agreement.check(worker_id, info)

    async def _keep_lease(
        self, worker: WorkerRecord, capacity: WorkerCapacity, info: types_pb2.ModelInfo, replaces: bool
    ) -> None:
        error: ServiceError | None = None
        try:
            if not self._has_links:
                await self._dialer.claim_revision(worker.worker_id, info, replaces=replaces)
            async with self._dialer.lease(capacity, info.bundle_digest, worker.address) as (link, blocks, next_step_id):
                weights, said = self.rollouts.weights, worker.newest
                async with weights.joining(link, info, said.weights, is_asleep=said.is_asleep) as found:
                    blocks = blocks if _same_weights(info, found) else []
                    _set_weights(info, found)
                    self._check_agreement(worker.worker_id, info)
                    self.adapters.check(worker.worker_id, worker.newest.adapters)
                    facts = ModelFacts(frozenset(info.eos_token_ids), worker_wire.root_salt(info))
                    self._step_loop.worker_joined(link, capacity, facts, blocks, next_step_id)
                    self._joined(worker, link, info, len(blocks))
                error = self._end_of_lease(worker, await self._run_link(link))
        except ServiceError as refused:
            log.error("worker %s is refused: %s", worker.worker_id, refused.message)
            error = refused
        finally:
            if worker.link is not None:
                self.adapters.leave(worker.link)
                self.rollouts.weights.leave(worker.link)
            worker.link = worker.lease_task = None
            if not self._has_links:
                self._dialer.release_revision()
            self._mark_lost(worker)
            if worker.registration is not None:
                worker.registration.end(error)
            self._changed()

    async def _run_link(self, link: LeasedWorker) -> str:
        """Serve the link until it ends, and report the end to the step loop. Returns the reason."""
        reason = "the step stream failed"
        try:
            reason = await link.run(lambda output: self._step_loop.step_answered(link, output))
        except Exception:
            log.exception("worker %s: %s", link.worker_id, reason)
        finally:
            self._step_loop.worker_lost(link, reason)
        return reason

    def _joined(self, worker: WorkerRecord, link: LeasedWorker, info: types_pb2.ModelInfo, num_blocks: int) -> None:
        if not self._has_links:
            if self._agreement.info is not None and self._agreement.info.revision != info.revision:
                self.adapters.reset()
            self._agreement.start_with(worker.worker_id, info)
        worker.link = link
        self.adapters.join(link, worker.newest.adapters)
        self._watch_blocks(link)
        log.info("worker %s is ready: %s, %d cached blocks adopted", worker.worker_id, info.model, num_blocks)
        self._agreement.warn_numerics_mismatch(worker.worker_id, info)
        if worker.newest.state == DRAINING:  # it began draining during the handshake
            self._step_loop.worker_draining(link)
        self._changed()

    def _weights_changed(self, link: LeasedWorker, found: types_pb2.ModelInfo) -> None:
        """A worker computes with other weights."""
        worker = self._workers.get(link.worker_id)
        if worker is None or worker.link is not link or worker.info is None:
            return
        _set_weights(worker.info, found)
        self._agreement.start_with(worker.worker_id, worker.info)
        self._changed()

    def _watch_blocks(self, link: LeasedWorker) -> None:
        """Report moves and the tier of a worker whose blocks can move."""
        movement, calls = link.capacity.movement, link.blocks
        if movement is None or calls is None:
            return
        report, times = self._step_loop.report, self._step_loop.times

        def report_move(move_id: int, num_moved: int, took_s: float) -> None:
            def end(core: Scheduler, now: float) -> None:
                core.end_move(move_id, num_moved, took_s, now)
                for lost_s in core.moves.take_losses():
                    times.move_lost.observe(lost_s)

            report(end, link)

        calls.on_moved = report_move
        calls.on_tier = lambda tiers: report(lambda core, now: core.moves.change_tiers(link.worker_id, tiers), link)
        calls.on_broken = link.close
        if movement.has_tier:
            calls.follow_tier()

    def _end_of_lease(self, worker: WorkerRecord, reason: str) -> ServiceError | None:
        if worker.newest.state == DRAINING or self._is_closed:
            log.info("worker %s left: %s", worker.worker_id, reason)
            return None
        log.warning("worker %s is lost: %s", worker.worker_id, reason)
        return UnavailableError(f"the lease ended: {reason}; register again")

    def _mark_lost(self, worker: WorkerRecord) -> None:
        worker.lost_at = asyncio.get_running_loop().time()

    def _known(self) -> list[WorkerRecord]:
        """All workers except those that were lost long ago."""
        since = asyncio.get_running_loop().time() - LOST_SHOWN_S
        return [worker for worker in self._workers.values() if worker.lost_at is None or worker.lost_at > since]

    def _changed(self) -> None:
        infos = [
            worker.info for worker in self._workers.values() if worker.link is not None and worker.info is not None
        ]
        if infos and self._agreement.info is not None:
            self._info = types_pb2.ModelInfo()
            self._info.CopyFrom(self._agreement.info)
            self._info.max_num_blocks = max(info.max_num_blocks for info in infos)
            self._info.max_num_seqs = max(info.max_num_seqs for info in infos)
            self._info.ClearField("adapters")
            self._info.adapters.extend(self.adapters.infos())
        self._on_change(self._info, self.num_ready)

    async def close(self) -> None:
        """End every lease and every Register stream. Workers keep their pools and register with another scheduler."""
        self._is_closed = True
        await self.rollouts.weights.close()
        tasks: list[asyncio.Task[Any]] = [w.lease_task for w in self._workers.values() if w.lease_task is not None]
        tasks += self._releases
        for draining in self._releases:
            draining.cancel()
        for worker in self._workers.values():
            if worker.registration is not None:
                worker.registration.end(UnavailableError("the scheduler is stopping; register again later"))
            if worker.link is not None:
                worker.link.close("the scheduler is stopping")
            elif worker.lease_task is not None:
                worker.lease_task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _model_name(self) -> str:
        return "" if self._info is None else self._info.model

    # -- status -------------------------------------------------------------------------------------------------------

    def num_in_states(self) -> Counter[types_pb2.WorkerState.ValueType]:
        """Number of workers by state, including recently lost workers."""
        return Counter(_state_of(worker) for worker in self._known())

    def describe(self, stats: SchedulerStats) -> list[inference_pb2.WorkerInfo]:
        """All workers, including workers that are loading or were recently lost."""
        occupancy = {worker.worker_id: worker for worker in stats.workers}
        infos = [_describe(worker, occupancy.get(worker.worker_id)) for worker in self._known()]
        self.adapters.count(infos)
        return infos


async def _next(stream: AsyncIterator[scheduler_pb2.RegisterRequest]) -> scheduler_pb2.RegisterRequest | None:
    return await anext(stream, None)


def _same_weights(one: types_pb2.ModelInfo, other: types_pb2.ModelInfo) -> bool:
    return (one.weight_version, one.weights_digest) == (other.weight_version, other.weights_digest)


def _set_weights(info: types_pb2.ModelInfo, found: types_pb2.ModelInfo) -> None:
    """Replace what depends on the weights in use."""
    info.weight_version, info.weights_revision = found.weight_version, found.weights_revision
    info.weights_digest = found.weights_digest


def _state_of(worker: WorkerRecord) -> types_pb2.WorkerState.ValueType:
    """The state for operators: a worker is ready when it is leased, not when it says that it has loaded its model."""
    if worker.lost_at is not None:
        return types_pb2.WORKER_STATE_LOST
    if worker.newest.state == READY and worker.link is None:
        return types_pb2.WORKER_STATE_JOINING
    return worker.newest.state


def _describe(worker: WorkerRecord, occupancy: WorkerStats | None) -> inference_pb2.WorkerInfo:
    info = inference_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        address=worker.address,
        state=_state_of(worker),
        worker_epoch=worker.worker_epoch,
        steps=worker.link.num_answered if worker.link is not None else 0,
        role=worker.newest.capacity.blocks.role,
        degradations=worker.newest.capacity.degradations,
    )
    if occupancy is not None and worker.link is not None:
        info.rows_used, info.rows_total = occupancy.rows_used, occupancy.rows_total
        info.blocks_free, info.blocks_cached = occupancy.blocks_free, occupancy.blocks_cached
        info.blocks_used = occupancy.blocks_used
        info.adapters_loaded = len(worker.newest.adapters)
    return info
