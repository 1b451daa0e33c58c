"""A deployment on virtual time: gateways, schedulers, workers, Redis and clients, and the checks of their behaviour.

A `World` draws only delays; `simulation.py` draws sizes, requests and faults from a seed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import quire_client.aio.stream
import quire_client.retry
import redis.asyncio
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2
from quire_client import AsyncClient
from quire_client import errors as client_errors
from quire_client.types import FinishReason as ClientReason

import worker_svc.registration
import worker_svc.steps.executor
from prefix_index.hashing import model_salt
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, StopCondition
from tests.invariants import check_scheduler
from tests.sim.oracle import Expected, expected_output
from tests.sim.symbolic_worker import Chains, Violation
from tests.sim.system.fake_redis import RedisClient, RedisServer
from tests.sim.system.network import Call, Network
from tests.sim.system.processes import GatewayService, SchedulerService, Service, WorkerService
from tests.sim.system.virtual_loop import PROCESS, Process, VirtualLoop

MONITOR_S = 0.25
FORGOTTEN_S = 4.0  # if no fault follows, every scheduler must drop a request this soon after its client left
# A stream must continue within this time after a fault if no other fault follows. Covers heartbeats and steps of a lost
# worker or scheduler (3 s), the client's check of a silent gateway (5 + 2 s), and back-offs.
RECOVERY_S = 15.0
SETTLE_S = 30.0
RUN_LIMIT_S = 240.0
STEP_STREAM = "/quire.internal.v1.WorkerService/StepStream"
# Raised before a stream was accepted: nothing is promised yet.
NOT_YET = (
    client_errors.ConnectionFailed,
    client_errors.Overloaded,
    client_errors.ModelNotFound,
    client_errors.AlreadyExists,
    client_errors.StreamEndedEarly,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of one run."""

    capacities: tuple[WorkerCapacity, ...]
    num_gateways: int = 2
    num_schedulers: int = 2
    busy_move_s: float = 10.0  # time after which a worker with rows moves to a scheduler with fewer workers
    vocab_size: int = 40
    eos_token_ids: frozenset[int] = frozenset()
    uses_redis: bool = False
    step_s: float = 0.03
    gateway_heartbeat_s: float = 0.05  # a silent peer counts as lost after 1.5 s
    heartbeat_timeout_s: float = 2.0
    step_timeout_s: float = 3.0
    patience_s: float = 30.0
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(slots=True, eq=False)
class Request:
    """A client's request, the expected result, and what the client got."""

    name: str
    prompt: list[int]
    seed: int
    n: int
    stop: StopCondition
    expected: list[Expected]
    group: SequenceGroup
    arrives_at: float
    leaves_at: float | None = None  # time of its cancel
    aborts_at: float | None = None  # time of its Abort call
    timeout_s: float | None = None
    got: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    outcome: str = ""
    ended_at: float | None = None
    last_progress: float = 0.0
    longest_stall_s: float = 0.0
    num_resumes: int = 0
    num_recomputed: int = 0
    was_abort_sent: bool = False


class World:
    """All processes and the checks. `run` raises Violation if a check fails."""

    def __init__(self, setup: Setup, rng: Random) -> None:
        self.setup = setup
        self.rng = rng
        self.loop = VirtualLoop()
        self.network = Network(self.loop, Random(rng.random()))
        self.network.on_write = self._record_sent
        self.network.on_answer = self._record_answer
        self.network.on_response = self._forge
        self.forgeries: list[str] = []  # 'twice' or 'stale': how the next answers to steps are forged
        self._old_answer: bytes | None = None
        self.redis = RedisServer(Random(rng.random()))
        capacity = setup.capacities[0]
        salt = model_salt("1", "float32", types_pb2.DETERMINISM_EXACT)
        self.chains = Chains(salt, capacity.block_size)
        self.requests: dict[int, Request] = {}
        self.trace: list[tuple[float, str]] = []
        self.schedulers = [SchedulerService(self, f"s{i}") for i in range(setup.num_schedulers)]
        self.gateways = [GatewayService(self, f"g{i}") for i in range(setup.num_gateways)]
        self.workers = [WorkerService(self, c.worker_id, c) for c in setup.capacities]
        self.clients = Process("clients", self.loop)
        self.network.processes["clients"] = self.clients
        self._is_over = False
        self._num_disturbances = 0
        self._calm_since = 0.0
        self.failed_requests: set[str] = set()  # requests with a failed row
        self._acked: dict[tuple[int, int, int], int] = {}
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self.loop.on_failure = self._record_failure

    @property
    def services(self) -> list[Service]:
        return [*self.schedulers, *self.gateways, *self.workers]

    @property
    def now(self) -> float:
        return self.loop.time()

    def note(self, words: str) -> None:
        """Add a line to the trace."""
        if not self._is_over:
            self.trace.append((self.now, words))

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """While a fault lasts, delays are no violation."""
        self._num_disturbances += 1
        try:
            yield
        finally:
            self._num_disturbances -= 1
            self.disturb_until(self.now)

    def disturb_until(self, end: float) -> None:
        self._calm_since = max(self._calm_since, end)

    # -- what symbolic workers ask ------------------------------------------------------------------------------------

    def group_of(self, seed: int) -> SequenceGroup:
        request = self.requests.get(seed)
        if request is None:
            raise Violation(f"a row opens with seed {seed}, which no request has")
        return request.group

    def acked_when_sent(self, worker_epoch: int, scheduler_epoch: int, step_id: int) -> int:
        acked = self._acked.get((worker_epoch, scheduler_epoch, step_id))
        if acked is None:
            raise Violation(f"step {step_id} was never sent under lease {scheduler_epoch}: a stale scheduler steps")
        return acked

    def _record_sent(self, call: Call, message: Any) -> None:
        if isinstance(message, worker_pb2.StepStreamRequest):
            for batch in (message.batch, *message.then):
                self._acked[batch.fence.worker_epoch, batch.fence.scheduler_epoch, batch.step_id] = call.answered

    def _record_answer(self, call: Call, data: bytes) -> None:
        if call.path == STEP_STREAM:
            response = worker_pb2.StepStreamResponse.FromString(data)
            call.answered = [response.output, *response.then][-1].step_id

    def _forge(self, call: Call, data: bytes) -> list[bytes]:
        """The messages that a worker which breaks the protocol sends instead of this answer."""
        if call.path != STEP_STREAM:
            return [data]
        old, self._old_answer = self._old_answer, data
        # A step id has one answer per stream and life of a worker, so this answer cannot be stale.
        if not self.forgeries or old is None or _name_of(old) == _name_of(data):
            return [data]
        forgery = self.forgeries.pop()
        self.note(f"an answer of {call.target} comes {forgery}")
        return [data, data] if forgery == "twice" else [old]

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: list[int], stop: StopCondition, *, n: int, arrives_at: float, **options: Any
    ) -> Request:
        """Add a request with the result that the oracle expects."""
        number = len(self.requests) + 1
        seed = 1000 + number
        eos, vocab = self.setup.eos_token_ids, self.setup.vocab_size
        group = SequenceGroup(f"r{number}", np.array(prompt, dtype=np.uint32), stop, n=n, options=seed)
        request = Request(
            name=f"r{number}",
            prompt=prompt,
            seed=seed,
            n=n,
            stop=stop,
            expected=[expected_output(prompt, b"", seed, i, stop, eos, vocab) for i in range(n)],
            group=group,
            arrives_at=arrives_at,
            got=[[] for _ in range(n)],
            **options,
        )
        self.requests[seed] = request
        return request

    async def _serve_client(self, client: AsyncClient, request: Request) -> None:
        await asyncio.sleep(request.arrives_at)
        attempt = 0
        while not request.outcome:
            attempt += 1
            await self._try(client, request, f"{request.name}.{attempt}")
            if not request.outcome:
                await asyncio.sleep(0.3)
        request.ended_at = self.now
        self.note(f"{request.name} {request.outcome} {[len(got) for got in request.got]} resumes {request.num_resumes}")

    async def _try(self, client: AsyncClient, request: Request, request_id: str) -> None:
        request.last_progress = self.now
        was_accepted = False
        leaver: asyncio.TimerHandle | None = None
        aborter: asyncio.Task[None] | None = None
        stream = client.stream(
            token_ids=request.prompt,
            request_id=request_id,
            seed=request.seed,
            n=request.n,
            max_tokens=request.stop.max_tokens,
            stop_token_ids=sorted(request.stop.stop_token_ids),
            ignore_eos=request.stop.ignore_eos,
            timeout_s=request.timeout_s,
        )
        try:
            if request.leaves_at is not None:
                leaver = self.loop.call_at(max(self.now, request.leaves_at), stream.cancel)
            if request.aborts_at is not None:
                aborter = asyncio.create_task(self._abort(client, request, request_id))
            async with stream:
                was_accepted = True
                self.note(f"{request_id} is accepted")
                async for delta in stream:
                    self._receive(request, delta.index, delta.offset, list(delta.token_ids))
                request.num_resumes = stream.resumes
                self._complete(request, await stream.result())
        except client_errors.Cancelled:
            if request.leaves_at is None or self.now < request.leaves_at:
                raise
            request.outcome = "left"
        except client_errors.DeadlineExceeded:
            if request.timeout_s is None:
                raise
            request.outcome = "late"
        except client_errors.GenerationFailed:
            if request.name not in self.failed_requests:
                raise
            request.outcome = "failed"
        except NOT_YET as error:
            if was_accepted and not self._may_fail(request, error):
                raise
            self.note(f"{request_id} is refused: {error}")
            if was_accepted:
                request.outcome = "late"
        finally:
            if leaver is not None:
                leaver.cancel()
            if aborter is not None:
                aborter.cancel()

    def _may_fail(self, request: Request, error: Exception) -> bool:
        """Whether the request may fail: a resume does not start if the deadline passes before it."""
        return request.timeout_s is not None

    async def _abort(self, client: AsyncClient, request: Request, request_id: str) -> None:
        assert request.aborts_at is not None
        await asyncio.sleep(max(0.0, request.aborts_at - self.now))
        request.was_abort_sent = True
        try:
            await client.abort(request_id)
        except client_errors.QuireError as error:
            self.note(f"abort of {request_id} fails: {error}")

    def _receive(self, request: Request, index: int, offset: int, token_ids: list[int]) -> None:
        got, expected = request.got[index], request.expected[index].tokens
        name = f"{request.name} sample {index}"
        if offset != len(got):
            raise Violation(f"{name}: tokens at offset {offset}, {len(got)} delivered")
        if token_ids != expected[offset : offset + len(token_ids)]:
            raise Violation(f"{name}: {token_ids} at {offset}, the oracle has {expected[offset:][: len(token_ids)]}")
        got += token_ids
        self._record_progress(request)

    def _record_progress(self, request: Request) -> None:
        self._check_stall(request)
        request.longest_stall_s = max(request.longest_stall_s, self.now - request.last_progress)
        request.last_progress = self.now

    def _check_stall(self, request: Request) -> None:
        stall_s = self.now - max(request.last_progress, self._calm_since)
        if stall_s > RECOVERY_S + self._queue_s():
            raise Violation(f"{request.name}: no token for {stall_s:.1f} s")

    def _queue_s(self) -> float:
        """The longest time that a request can wait for a row: all others run before it, one after the other."""
        num_steps = sum(request.stop.max_tokens + len(request.prompt) // 4 + 4 for request in self.requests.values())
        return 1.5 * self.setup.step_s * num_steps

    def _complete(self, request: Request, result: Any) -> None:
        self._record_progress(request)
        for sample in result.samples:
            request.num_recomputed += sample.usage.recomputed_tokens
            expected, got = request.expected[sample.index], request.got[sample.index]
            name = f"{request.name} sample {sample.index}"
            if list(sample.token_ids) != got:
                raise Violation(f"{name}: the result has {list(sample.token_ids)}, the deltas had {got}")
            is_late = request.timeout_s is not None and "deadline" in sample.message
            if sample.finish_reason is ClientReason.ABORTED and (request.was_abort_sent or is_late):
                continue
            matched = sample.matched
            ended = Expected(
                got, FinishReason[sample.finish_reason.name], matched if isinstance(matched, int) else None
            )
            if ended != expected:
                raise Violation(f"{name}: {ended} ({sample.message}), the oracle has {expected}")
        request.outcome = "complete"

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, faults: Any) -> None:
        """Run all requests to their end, then look for leaks. `faults()` is a coroutine that causes faults."""
        with self._in_place(), self._logs():
            try:
                self.loop.run_until_complete(self._scenario(faults))
            finally:
                self._is_over = True
                self.loop.finish()

    async def _scenario(self, faults: Any) -> None:
        for service in self.services:
            service.start()
        channels = self.clients.context.run(lambda: [self.network.channel(g.address) for g in self.gateways])
        client = AsyncClient(channels, timeout_s=None, resume_timeout_s=120.0)  # type: ignore[arg-type]
        client._calls.rng = Random(self.rng.random())
        work = [self.clients.start(self._serve_client(client, request)) for request in self.requests.values()]
        operator = self.loop.create_task(faults())
        monitor = self.loop.create_task(self._monitor())
        monitor.add_done_callback(self._record_monitor_end)
        await self._or_failure(asyncio.gather(*work, return_exceptions=True), RUN_LIMIT_S)
        await self._or_failure(operator, RUN_LIMIT_S)
        await self._or_failure(self.loop.create_task(self._settle()), SETTLE_S)
        monitor.cancel()
        self._check_end()
        await self.clients.start(client.close())

    async def _or_failure(self, work: asyncio.Future[Any], limit_s: float) -> None:
        await asyncio.wait([work, self._failed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self.loop.failure is not None:
            raise self.loop.failure
        if not work.done():
            raise Violation(f"no progress: {self._what_is_open()}")
        work.result()

    def _record_monitor_end(self, monitor: asyncio.Task[None]) -> None:
        if not monitor.cancelled() and (error := monitor.exception()) is not None:
            self.loop.fail(error)

    def _record_failure(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(None)

    def _what_is_open(self) -> str:
        words = [f"{r.name} has {[len(g) for g in r.got]}" for r in self.requests.values() if not r.outcome]
        for scheduler in self.schedulers:
            words.append(f"{scheduler.name}: {scheduler.step_loop.core.load()}, {scheduler.pool.num_ready} ready")
        for worker in self.workers:
            words.append(f"{worker.name} at {worker.registration.scheduler}")
        return "; ".join(words)

    async def _monitor(self) -> None:
        while True:
            await asyncio.sleep(MONITOR_S)
            if self._num_disturbances:
                self.disturb_until(self.now)
            for request in self.requests.values():
                if request.last_progress and not request.outcome:
                    self._check_stall(request)
            for scheduler in self.schedulers:
                if scheduler.is_running:
                    self._check_scheduler(scheduler)

    def _check_scheduler(self, scheduler: SchedulerService) -> None:
        check_scheduler(scheduler.core)
        live = list(scheduler.step_loop._requests.values())
        ids = [group.request_id for group in live]
        if len(set(ids)) != len(ids):
            raise Violation(f"{scheduler.name} has a request twice: {sorted(ids)}")
        for group in live:
            request = self.requests[group.options.sampling.seed]
            since = request.ended_at
            if since is not None and self.now - max(since, self._calm_since) > FORGOTTEN_S:
                raise Violation(f"{group.request_id} is still live at {scheduler.name}, but its client left long ago")

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Wait until no process has work left."""
        while any(self._is_busy(service) for service in self.services):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)

    def _is_busy(self, service: Service) -> bool:
        if not service.is_running:
            return True
        if isinstance(service, SchedulerService):
            workers = service.core.stats().workers
            is_working = service.step_loop.has_work or any(w.rows_used or w.steps_in_flight for w in workers)
            return is_working or any(not self._is_leased_by(service, w.worker_id) for w in workers)
        if isinstance(service, GatewayService):
            return bool(service.dispatcher.num_open or service.streams)
        assert isinstance(service, WorkerService)
        return service.registration.scheduler is None

    def _is_leased_by(self, scheduler: SchedulerService, worker_id: str) -> bool:
        worker = next(worker for worker in self.workers if worker.name == worker_id)
        epoch = scheduler.core._workers[worker_id].capacity.worker_epoch
        return epoch == worker.executor.worker_epoch and worker.registration.scheduler == scheduler.address

    def _check_end(self) -> None:
        for scheduler in self.schedulers:
            self._check_scheduler_end(scheduler)
        for gateway in self.gateways:
            for client in gateway.clients:
                queue = client.stream._waiting if client.is_connected else ()
                waiting = [message for message in queue if not message.HasField("heartbeat")]
                if client.stream.requests() or waiting:
                    raise Violation(f"{gateway.name} still has requests open at {client.address}")

    def _check_scheduler_end(self, scheduler: SchedulerService) -> None:
        check_scheduler(scheduler.core)
        if scheduler.step_loop._requests or scheduler.core._requests.groups or len(scheduler.core._waiting):
            raise Violation(f"{scheduler.name} still has requests: {scheduler.step_loop._requests}")
        for outbox in scheduler.gateways._outboxes.values():
            if outbox.num_pending_tokens or outbox._replies:
                raise Violation(f"{scheduler.name} still has messages for a gateway")
        for stats in scheduler.core.stats().workers:
            if stats.blocks_used or stats.rows_used or stats.steps_in_flight:
                raise Violation(f"{scheduler.name} leaks on {stats.worker_id}: {stats}")
            self._check_worker_end(scheduler, stats.worker_id)

    def _check_worker_end(self, scheduler: SchedulerService, worker_id: str) -> None:
        worker = next(worker for worker in self.workers if worker.name == worker_id)
        state = scheduler.core._workers[worker_id]
        if state.capacity.worker_epoch != worker.executor.worker_epoch:
            raise Violation(f"{scheduler.name} has an earlier life of {worker_id}")
        if worker.symbolic.is_open.any():
            raise Violation(f"{worker_id} still has open rows {np.flatnonzero(worker.symbolic.is_open).tolist()}")
        for block, digest in enumerate(state.pool._digest_of):
            if digest is not None and worker.symbolic.committed.get(block) != digest:
                raise Violation(f"{scheduler.name} counts block {block} of {worker_id} as cached, but it is not")

    # -- surroundings -------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replace sockets, clocks and randomness of the services by the simulation's."""
        clock = SimpleNamespace(monotonic=self.loop.time, perf_counter=self.loop.time)
        state = random.getstate()
        random.seed(self.rng.random())
        with ExitStack() as stack:
            redis_client = RedisClient(self.redis)
            stack.enter_context(patch.object(redis.asyncio.Redis, "from_pool", lambda *_: redis_client))
            sdk = (quire_client.aio.stream, quire_client.retry, quire_client.retry)
            for module in (worker_svc.steps.executor, *sdk):
                stack.enter_context(patch.object(module, "time", clock))
            yield
        random.setstate(state)

    @contextmanager
    def _logs(self) -> Iterator[None]:
        """Adds the services' logs to the trace. A logged bug fails the run."""
        handler = _TraceHandler(self)
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        root.handlers[:] = [handler]
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


def _name_of(answer: bytes) -> tuple[int, int]:
    output = worker_pb2.StepStreamResponse.FromString(answer).output
    return output.worker_epoch, output.step_id


class _TraceHandler(logging.Handler):
    """Log records as lines of the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        if process is not None and process.is_dead:
            return
        words = record.getMessage()
        self._world.note(f"{process.name if process else '-'}: {words}")
        if record.exc_info is not None and record.levelno >= logging.ERROR:
            error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
            self._world.loop.fail(error or Violation(words))
        elif "internal error" in words or "is a bug" in words:
            self._world.loop.fail(Violation(words))
