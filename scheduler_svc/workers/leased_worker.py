"""One lease of one worker: the handshake, the step stream, and its timeouts.

    Lease -> (bundle, once per digest) -> ListBlocks -> StepStream ... until it breaks, is too slow or is closed

A worker that returns gets a new lease and a new object, so a late answer cannot be mistaken for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.v1 import inference_pb2, types_pb2
from xxhash import xxh3_128_digest

from prefix_index.index import PrefixIndex
from scheduler_svc.core.features.adapters import AdapterSwap
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.messages import CachedBlock, WorkerCapacity
from scheduler_svc.metrics import RoundTripMeter
from scheduler_svc.workers import wire as worker_wire
from scheduler_svc.workers.agreement import WorkerRefusedError
from scheduler_svc.workers.block_calls import BlockCalls
from scheduler_svc.workers.seals import BlockKeys
from scheduler_svc.workers.worker_calls import WorkerCalls
from step_protocol import columns
from step_protocol.messages import StepBatch, StepOutput
from svc_common.channels import MAX_BUNDLE_BYTES, ReceiveError, read_bundle
from svc_common.errors import InvalidRequestError, ServiceError, StaleEpochError, UnavailableError, error_of_call
from svc_common.observe.inspection import answer_timeout_s
from svc_common.serve import open_channel
from svc_common.tasks import SilenceWatch, cancel

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
HANDSHAKE_TIMEOUT_S = 10.0
TRANSFER_TIMEOUT_S = 60.0
MAX_NEXT_STEP_ID = 1 << 62  # so that no later step id exceeds 64 bits

StepCall = grpc.aio.StreamStreamCall[worker_pb2.StepStreamRequest, worker_pb2.StepStreamResponse]


OpenWorker = Callable[[str, str], grpc.aio.Channel]  # from address and worker id


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """Seconds of silence after which a worker counts as lost."""

    heartbeat_s: float = 10.0
    step_s: float = 120.0


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step in flight, as the link remembers it."""

    step_id: int
    sent_at: float
    num_bytes: int
    num_rows: int


class LeasedWorker:
    """A worker that accepts steps. Implements `links.WorkerLink`."""

    def __init__(
        self,
        capacity: WorkerCapacity,
        address: str,
        fence: worker_pb2.Fence,
        call: StepCall,
        timeouts: LinkTimeouts,
        meter: RoundTripMeter,
        keys: BlockKeys | None = None,
        stub: worker_pb2_grpc.WorkerServiceAsyncStub | None = None,
    ) -> None:
        """Without `stub`, the worker's adapters and weights cannot be changed."""
        self.capacity = capacity
        self.calls = None if stub is None else WorkerCalls(stub, fence, capacity.worker_id)
        self.blocks = None if stub is None else BlockCalls(stub, fence, capacity.worker_id, keys)
        self._address = address
        self._fence = fence
        self._call = call
        self._timeouts = timeouts
        self._meter = meter
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[worker_pb2.StepStreamRequest] = asyncio.Queue()
        self._in_flight: deque[SentStep] = deque()
        self._last_answer = self._loop.time()
        self._silence = SilenceWatch(timeouts.heartbeat_s, self._last_answer)
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self.num_answered = 0

    @property
    def worker_id(self) -> str:
        return self.capacity.worker_id

    @property
    def worker_epoch(self) -> int:
        return self.capacity.worker_epoch

    @property
    def address(self) -> str:
        return self._address

    def send(self, batch: StepBatch) -> None:
        if self._closed.done():
            return
        request = worker_pb2.StepStreamRequest()
        self._add_step(batch, request.batch)
        for step in batch.then:
            self._add_step(step, request.then.add())
        self._outbox.put_nowait(request)

    def _add_step(self, batch: StepBatch, message: worker_pb2.StepBatch) -> None:
        worker_wire.step_batch_to_proto(batch, self._fence, self._keys, message)
        self._in_flight.append(SentStep(batch.step_id, self._loop.time(), message.ByteSize(), len(batch.rows)))

    def swap_adapter(self, swap: AdapterSwap) -> None:
        if self.calls is not None and not self._closed.done():
            self.calls.swap_adapter(swap.digest, swap.kept)

    def fetch_blocks(self, move: BlockMove, source_address: str) -> None:
        if self.blocks is not None and not self._closed.done():
            self.blocks.fetch(move, source_address)

    def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    def record_alive(self) -> None:
        """Record that a heartbeat has arrived."""
        self._silence.on_message(self._loop.time())

    async def run(self, on_output: Callable[[StepOutput], None]) -> str:
        """Serve the stream; `on_output` gets every answer. Returns why the stream ended."""
        tasks = [
            asyncio.create_task(self._write()),
            asyncio.create_task(self._read(on_output)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, self._closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close("the scheduler is stopping")
            for calls in (self.calls, self.blocks):
                if calls is not None:
                    calls.close()
            await cancel(*tasks)
            self._call.cancel()
        # If both tasks have ended, prefer the reader's reason: it is more precise than the writer's.
        return _reason(next(end for end in (self._closed, *reversed(tasks)) if end in done))

    async def _write(self) -> str:
        while True:
            await self._call.write(await self._outbox.get())

    async def _read(self, on_output: Callable[[StepOutput], None]) -> str:
        while isinstance(response := await self._call.read(), worker_pb2.StepStreamResponse):
            for output in (response.output, *response.then):
                on_output(self._take(output))
        if response is not grpc.aio.EOF:  # None: grpc could not decode the message but keeps the stream open
            raise columns.WireError("it sent bytes that are not a valid StepStreamResponse")
        return f"the worker ended the step stream: {await self._call.details() or 'no reason given'}"

    def _take(self, message: worker_pb2.StepOutput) -> StepOutput:
        if not self._in_flight:
            raise columns.WireError(f"worker answered step {message.step_id}, but no step is in flight")
        output = worker_wire.step_output_from_proto(
            message,
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            step_id=self._in_flight[0].step_id,
            vocab_size=self.capacity.vocab_size,
        )
        step = self._in_flight.popleft()
        self._last_answer = self._loop.time()
        self._silence.on_message(self._last_answer)
        self._meter.note(self._last_answer - step.sent_at, step.num_bytes + message.ByteSize(), step.num_rows)
        self.num_answered += 1
        return output

    async def _watch(self) -> str:
        """Wait until the worker counts as lost. Returns the reason."""
        while True:
            now = self._loop.time()
            step_due = self._step_due()
            if now >= step_due:
                return f"step {self._in_flight[0].step_id} was not answered within {self._timeouts.step_s:g} s"
            if self._silence.is_silent(now):
                return f"no heartbeat for {self._timeouts.heartbeat_s:g} s"
            # A step that is sent during the sleep may be due before the next heartbeat.
            await asyncio.sleep(self._silence.pause_s(now, min(step_due - now, self._timeouts.step_s)))
            if self._silence.on_wake(self._loop.time()):
                self._last_answer = self._loop.time()  # the answer may have arrived but not been read

    def _step_due(self) -> float:
        """The deadline of the oldest step in flight; inf if no step is in flight."""
        if not self._in_flight:
            return math.inf
        # A step waits for the steps before it. Only the time after their answers counts.
        return max(self._in_flight[0].sent_at, self._last_answer) + self._timeouts.step_s


def _check_grant(granted: worker_pb2.LeaseResponse | None) -> None:
    """Raise WireError if the worker's answer to Lease cannot be used."""
    if granted is None:  # grpc could not decode it
        raise columns.WireError("it answered Lease with bytes that are not a valid LeaseResponse")
    if not 1 <= granted.next_step_id <= MAX_NEXT_STEP_ID:
        raise columns.WireError(f"next_step_id is {granted.next_step_id}; must be from 1 to {MAX_NEXT_STEP_ID}")


def _reason(done: asyncio.Future[str]) -> str:
    error = done.exception()
    if error is None:
        return done.result()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"step stream: {error.code().name}: {error.details()}"
    if isinstance(error, columns.WireError):
        return f"the worker broke the protocol: {error}"
    if isinstance(error, asyncio.InvalidStateError):
        return "the step stream was closed"
    raise error


class Dialer:
    """Takes leases of workers. Keeps the bundle of every digest. `meter` measures all steps."""

    def __init__(
        self,
        index: PrefixIndex,
        scheduler_id: str,
        timeouts: LinkTimeouts,
        meter: RoundTripMeter | None = None,
        open_worker: OpenWorker = lambda address, worker_id: open_channel(address),
        keys: BlockKeys | None = None,
        max_bundle_bytes: int = MAX_BUNDLE_BYTES,
    ) -> None:
        self.bundles: dict[bytes, bytes] = {}
        self.index = index
        self._scheduler_id = scheduler_id
        self._timeouts = timeouts
        self._meter = meter or RoundTripMeter()
        self._open_worker = open_worker
        self._keys = keys
        self._max_bundle_bytes = max_bundle_bytes

    @contextlib.asynccontextmanager
    async def lease(
        self, capacity: WorkerCapacity, bundle_digest: bytes, address: str
    ) -> AsyncIterator[tuple[LeasedWorker, list[CachedBlock], int]]:
        """Connect to a worker and lease it. Yields the link, the cached blocks of its pool, and the next step id.

        Raises ServiceError with a message for the worker's log if the worker cannot be leased.
        """
        async with self._open_worker(address, capacity.worker_id) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                granted = await self._take_lease(stub)
                self._check_fence(granted.fence, capacity, address)
                await self._fetch_bundle(stub, bundle_digest)
                calls = BlockCalls(stub, granted.fence, capacity.worker_id, self._keys)
                blocks = await calls.list_pool(capacity)
                call = stub.StepStream()
            except grpc.aio.AioRpcError as error:
                raise UnavailableError(
                    f"the scheduler cannot use WorkerService at {address}, the address that this worker registered: "
                    f"{error.code().name}: {error.details()}"
                ) from error
            except columns.WireError as error:
                raise ServiceError(f"worker {capacity.worker_id} at {address}: {error}") from error
            link = LeasedWorker(capacity, address, granted.fence, call, self._timeouts, self._meter, self._keys, stub)
            await self._list_tier(link)
            log.info("worker %s: leased with scheduler_epoch %d", capacity.worker_id, granted.fence.scheduler_epoch)
            yield link, blocks, granted.next_step_id

    async def _list_tier(self, link: LeasedWorker) -> None:
        """Without the list, the tier is not used."""
        movement = link.capacity.movement
        if link.blocks is None or movement is None or not movement.has_tier:
            return
        try:
            await link.blocks.list_tier()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.warning("worker %s: its tier cannot be listed: %s", link.worker_id, error)

    async def claim_revision(self, worker_id: str, info: types_pb2.ModelInfo, *, replaces: bool) -> None:
        """Record the revision of this scheduler's workers. Raises WorkerRefusedError if another scheduler of the model
        serves another one and this worker does not replace it.
        """
        other = await self.index.claim_revision(info.model, info.revision, replaces=replaces)
        if other:
            raise WorkerRefusedError(
                f"worker {worker_id} has revision {info.revision!r} of model {info.model!r}, but another scheduler "
                f"serves revision {other!r}; stop the workers of that revision first, or start this worker with "
                "--replace-revision",
                field="capacity.info.revision",
            )

    def release_revision(self) -> None:
        """The last worker of this scheduler has left."""
        self.index.release_revision()

    async def drain(self, address: str, worker_id: str, timeout_s: float) -> int:
        """Tell a worker to drain and wait until it has drained. Returns the number of rows that were left."""
        request, words = worker_pb2.DrainRequest(timeout_s=timeout_s), f"the worker at {address} did not drain: "
        return int((await self._ask(address, worker_id, words, lambda stub: stub.Drain(request))).rows_left)

    async def inspect(
        self, address: str, worker_id: str, kind: inference_pb2.InspectKind.ValueType, seconds: float, hz: int
    ) -> bytes:
        """A profile or a report of a worker."""
        request = worker_pb2.InspectWorkerRequest(kind=kind, seconds=seconds, hz=hz)
        timeout, words = answer_timeout_s(kind, seconds), f"worker {worker_id}: "
        call = self._ask(address, worker_id, words, lambda stub: stub.InspectWorker(request, timeout=timeout))
        return bytes((await call).data)

    async def _ask(
        self,
        address: str,
        worker_id: str,
        words: str,
        call: Callable[[worker_pb2_grpc.WorkerServiceAsyncStub], Awaitable[Any]],
    ) -> Any:
        """A call with a channel of its own, because the lease may end before the answer. Raises ServiceError with these
        words if the worker refuses or cannot be reached.
        """
        async with self._open_worker(address, worker_id) as channel:
            try:
                return await call(worker_pb2_grpc.WorkerServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error, words) from error

    async def _take_lease(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> worker_pb2.LeaseResponse:
        epoch = await self.index.next_scheduler_epoch()
        try:
            granted = await self._call_lease(stub, epoch)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or epoch == 0:
                raise
            # Redis lost the counter. The worker has registered to be leased, so it may increment its own epoch.
            granted = await self._call_lease(stub, 0)
        _check_grant(granted)
        self.index.record_scheduler_epoch(granted.fence.scheduler_epoch)
        return granted

    async def _call_lease(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, epoch: int) -> worker_pb2.LeaseResponse:
        request = worker_pb2.LeaseRequest(
            scheduler_epoch=epoch, scheduler_id=self._scheduler_id, protocol_version=PROTOCOL_VERSION
        )
        return await stub.Lease(request, timeout=HANDSHAKE_TIMEOUT_S)

    def _check_fence(self, fence: worker_pb2.Fence, capacity: WorkerCapacity, address: str) -> None:
        if fence.worker_epoch != capacity.worker_epoch:
            raise StaleEpochError(
                f"the worker at {address} has worker_epoch {fence.worker_epoch:#x}, but worker {capacity.worker_id} "
                f"registered with {capacity.worker_epoch:#x}; give each worker its own address"
            )

    async def _fetch_bundle(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, digest: bytes) -> None:
        if not digest or digest in self.bundles:
            return
        request = worker_pb2.GetWorkerBundleRequest()
        try:
            data = await read_bundle(stub.GetWorkerBundle(request, timeout=TRANSFER_TIMEOUT_S), self._max_bundle_bytes)
        except ReceiveError as error:
            raise InvalidRequestError(str(error), field="capacity.info.bundle_digest") from None
        found = xxh3_128_digest(data)
        if found != digest:
            raise StaleEpochError(
                f"the bundle has digest {found.hex()}, but info.bundle_digest is {digest.hex()}; restart the worker",
                field="capacity.info.bundle_digest",
            )
        self.bundles[digest] = data
