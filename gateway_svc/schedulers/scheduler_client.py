"""The gateway's side of one scheduler.

A gateway is stateless: it can be killed at any time, and a client then resumes its requests on another gateway. While
it runs, it must never lose a request because a scheduler was lost. These are the parts, and what each of them owns:

    SchedulerClients   which schedulers there are, by the addresses of --scheduler; one task each (directory.py)
    SchedulerClient    one scheduler, through all its connections: its address, channel, model and state
      AttachStream     one connection: the handles of the requests that the scheduler has now (attach_stream.py)
      ModelLoader      the tokenizer and templates of the model that the scheduler serves
    Dispatcher         every open request, and which scheduler has it (dispatcher.py)
    SchedulerRequest   one request: its message, its journals, the handler that waits for it (scheduler_request.py)

    detached --Attach, Hello--> attached --Welcome with info, GetBundle--> ready
        ^                          |
        +-- broken or silent ------+   the dispatcher gets its open requests at once

A *handle* is a number that names a request on one stream. All requests of a gateway share the stream, so every message
about a request carries its handle instead of its id. Handles are given in order and are free again as soon as the
request has ended or was withdrawn; a message for a free handle is dropped. A request that moves gets a new handle on
its new stream. So nothing that an old scheduler still sends can reach it.

What survives the loss of a scheduler is what the gateway has: the request's message, the tokens in its journals, and
its client. What the scheduler had (queue place, blocks, rows) is gone, because a scheduler ends the requests of a
stream when the stream ends. The next scheduler gets the same message with the journals as a Continuation, and computes
the rest; the message has a seed, so the same tokens follow. A token that arrives twice is dropped by its offset, and a
gap fails the request.

A request moves when its stream ends, when its scheduler is silent, when its scheduler refuses it although another one
may take it, and when its scheduler has had no worker for a while and another one has. It waits for a scheduler at most
the dispatcher's patience, and so does a new request of a model that has no scheduler now. Requests move in the order in
which they were sent.

A *heartbeat* has two meanings. Any message from the scheduler shows that it works: after SILENT_INTERVALS of its
interval without one, the stream ends, because the scheduler hangs. The interval is in the Welcome; a process that was
paused itself does not count that time (svc_common/tasks.py). A scheduler whose process is stopped or whose host is
gone is found sooner, by the pings of the connection. And the scheduler's Heartbeat message reports its load, from which
replicas are chosen: `load_tokens` is the load of the last heartbeat plus what was sent since, because between two
heartbeats the requests that this gateway sends are the largest change.

Messages that wait are written as one batch (AttachBatch), if the scheduler takes batches. A cancel is written like any
other message, so it arrives after the Submit that it cancels.

A connection is made anew, with a new channel, after each end of a stream: certificates and tokens may have changed. The
old channel closes when its unary calls have ended. After a stream that lasted, the first attempt follows at once; else
the attempts back off to BACKOFF_MAX_S, with jitter, so that many gateways do not attach at the same moment.

The model is known when its bundle is loaded. Until then the scheduler `serves` it, so that requests which are open can
move there, but new requests of the model wait for another replica. A scheduler that stops serves nothing. A scheduler
that comes back with the same ModelInfo needs no bundle; one with another revision of the model has no model until the
new bundle is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.v1 import inference_pb2 as public
from quire.v1 import types_pb2 as types

from gateway_svc.request.models import BundleCache, ServedModel, describe_model, size_limits_of
from gateway_svc.schedulers.attach_stream import REQUEST_TOKENS, AttachStream
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.text.bundle import BundleError
from gateway_svc.text.chat_output import DETECTED, ParserNames
from svc_common.channels import MAX_BUNDLE_BYTES, OpenChannel, ReceiveError, read_bundle
from svc_common.errors import ServiceError, UnavailableError
from svc_common.tasks import cancel

if TYPE_CHECKING:
    from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
BUNDLE_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
STABLE_AFTER_S = 5.0  # after a stream that lasted this long, the backoff starts at its minimum
RETRY_AFTER_S = 1.0


class SchedulerEvents(Protocol):
    """Callbacks of the dispatcher, which decides where requests go."""

    def on_changed(self, client: SchedulerClient) -> None:
        """The connection, the model or the number of ready workers changed."""

    def on_lost(self, client: SchedulerClient, requests: list[SchedulerRequest]) -> None:
        """The stream ended while these requests were open. The scheduler aborts them; no more tokens arrive."""

    def on_refused(self, client: SchedulerClient, request: SchedulerRequest, error: ServiceError) -> None:
        """The scheduler refused the request."""

    def on_accepted(self, request: SchedulerRequest) -> None:
        """The scheduler queued the request."""

    def on_finished(self, request: SchedulerRequest) -> None:
        """All samples of the request ended."""


class ModelLoader:
    """Loads the bundle of the model that a scheduler serves. Owns the task; `on_loaded` is called at its end."""

    def __init__(
        self, address: str, bundles: BundleCache, parsers: ParserNames, max_bytes: int, on_loaded: Callable[[], None]
    ) -> None:
        self.model: ServedModel | None = None
        self.problem = ""  # why there is no model
        self._address = address
        self._bundles = bundles
        self._parsers = parsers
        self._max_bytes = max_bytes
        self._on_loaded = on_loaded
        self._task: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()  # replaced after each change

    def update(self, info: types.ModelInfo, stub: SchedulerServiceAsyncStub) -> None:
        """The scheduler serves this model now."""
        self.stop()
        if self.model is not None and self.model.info.revision != info.revision:
            self.model = None
        if self.model is not None and self.model.info.bundle_digest == info.bundle_digest:
            self._set(replace(self.model, info=info, parameters={}))
            return
        self.problem = f"loading the bundle of model {info.model!r}"
        self._task = asyncio.create_task(self._load(info, stub))

    def stop(self) -> None:
        """Cancel the loading; the next `update` restarts it. If another client waits for the bundle, it fetches it."""
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def _load(self, info: types.ModelInfo, stub: SchedulerServiceAsyncStub) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                text = await self._bundles.get(info.bundle_digest, lambda: self.fetch(info.bundle_digest, stub))
                break
            except (grpc.aio.AioRpcError, BundleError) as error:
                self._record_failure(info.model, error)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 10 * BACKOFF_MAX_S)
        prefixes = await self._bundles.prefixes.ids_of(info, text.tokenizer)
        model = ServedModel(info, text, self._parsers, public_prefixes=prefixes)
        describe_model(model)
        self._set(model)

    def _record_failure(self, model: str, error: grpc.aio.AioRpcError | BundleError) -> None:
        self.problem = f"cannot load the bundle of model {model!r}"
        if isinstance(error, BundleError):
            self.problem += f": {error}"
        # The details of a call have an address, so only the log has them.
        details = f": {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else ""
        log.error("scheduler %s: %s%s", self._address, self.problem, details)

    async def until_adapter(self, name: str, digest: bytes) -> None:
        """Return when the model has this adapter; empty `digest`: when it has none of this name."""
        while self.model is not None:
            have = [adapter.digest for adapter in self.model.info.adapters if adapter.name == name]
            if have == ([digest] if digest else []):
                return
            await self._has_changed.wait()

    def _set(self, model: ServedModel) -> None:
        """Set the model, if it differs."""
        if self.model == model:
            return
        self.model = model
        self._has_changed.set()
        self._has_changed = asyncio.Event()
        self._on_loaded()

    async def fetch(self, digest: bytes, stub: SchedulerServiceAsyncStub) -> bytes:
        """The serialized bundle. Raises AioRpcError or BundleError."""
        call = stub.GetBundle(pb.GetBundleRequest(digest=digest), timeout=BUNDLE_TIMEOUT_S)
        try:
            return await read_bundle(call, self._max_bytes)
        except ReceiveError as error:
            raise BundleError(str(error)) from None


class SchedulerClient:
    """Owns the channel to one scheduler, and what is known about the scheduler. Set `events` before `run`.

    `deltas_interval_s`: least time between messages that contain neither first tokens nor finished samples.
    """

    events: SchedulerEvents

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        bundles: BundleCache,
        open_channel: OpenChannel,
        parsers: ParserNames = DETECTED,
        deltas_interval_s: float = 0.0,
        max_bundle_bytes: int = MAX_BUNDLE_BYTES,
    ) -> None:
        self.address = address
        self.info: types.ModelInfo | None = None  # from the Welcome of the current stream
        self._served: tuple[str, str] | None = None  # name and revision of `info`; None while it stops
        self.is_connected = False
        self.scheduler_epoch = 0
        self.ready_workers = 0
        self.heartbeat: pb.SchedulerHeartbeat | None = None  # the last one of the current stream
        self._end = ""  # why the last stream ended
        self._hello = pb.Hello(
            gateway_id=gateway_id,
            protocol_version=PROTOCOL_VERSION,
            deltas_interval_ms=round(1000 * deltas_interval_s),
            takes_queued_handles=True,
        )
        self.loader = ModelLoader(
            address, bundles, parsers, max_bundle_bytes, on_loaded=lambda: self.events.on_changed(self)
        )
        self.stream = AttachStream(address, self)
        self._open_channel = open_channel
        self._closing: set[asyncio.Task[None]] = set()
        self._connect()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel | None:
        """The model with its tokenizer; None until its bundle is loaded."""
        return self.loader.model

    @property
    def is_ready(self) -> bool:
        """Requests can be sent now."""
        return self.is_connected and self.loader.model is not None and self.info is not None

    @property
    def problem(self) -> str:
        """Why it is not ready, for clients: without addresses, which are in the log."""
        if not self.is_connected:
            return "not connected"
        return "no worker has registered yet" if self.info is None else self.loader.problem

    @property
    def load_tokens(self) -> int:
        """Load of the scheduler: its last heartbeat plus the requests sent since; before a heartbeat, our requests."""
        if self.heartbeat is None:
            return REQUEST_TOKENS * self.stream.num_requests
        beat = self.heartbeat
        return beat.pending_tokens + REQUEST_TOKENS * (beat.num_waiting + beat.num_running) + self.stream.sent_tokens

    def serves(self, name: str, revision: str) -> bool:
        """Requests for this model can be sent now, even if its bundle is not loaded yet."""
        return self._served == (name, revision)

    def can_hold(self, request: SchedulerRequest) -> bool:
        """The scheduler's largest worker has enough blocks for the request."""
        return self.info is not None and size_limits_of(self.info).fits(*request.sizes)

    # -- connections --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        loop = asyncio.get_running_loop()
        backoff = BACKOFF_FIRST_S / 2
        try:
            while True:
                started = loop.time()
                self.stream = AttachStream(self.address, self)
                problem = await self.stream.run(self.stub, self._hello)
                _raise_if_cancelled()
                self._on_detached(problem)
                is_stable = loop.time() - started > STABLE_AFTER_S
                backoff = BACKOFF_FIRST_S if is_stable else min(backoff * 2, BACKOFF_MAX_S)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                self._reconnect()
        finally:
            self.loader.stop()
            await asyncio.gather(self._channel.close(), cancel(*self._closing))

    def _connect(self) -> None:
        """Make a new channel, with the newest certificate and token."""
        self._channel = self._open_channel(self.address)
        self.stub = SchedulerServiceStub(self._channel)

    def _reconnect(self) -> None:
        """Replace the channel. Calls on the old channel may finish: closing it immediately would cancel them."""
        closing = asyncio.create_task(self._channel.close(RELEASE_TIMEOUT_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._connect()

    def _on_detached(self, problem: str) -> None:
        requests = self.stream.end()
        if self.is_connected:
            log.warning("lost scheduler %s: %s; moving %d requests", self.address, problem, len(requests))
        elif problem != self._end:
            log.info("cannot reach scheduler %s yet: %s", self.address, problem)
        self.is_connected, self.ready_workers, self._end = False, 0, problem
        self.info = self._served = self.heartbeat = None
        self.loader.stop()
        self.events.on_lost(self, requests)
        self.events.on_changed(self)

    # -- called by the stream -----------------------------------------------------------------------------------------

    def on_welcome(self, welcome: pb.Welcome) -> None:
        if not self.is_connected:
            log.info("scheduler %s is attached", self.address)
        self.is_connected = True
        self.scheduler_epoch = welcome.scheduler_epoch
        self.ready_workers = welcome.ready_workers
        if welcome.HasField("info"):
            self.info = welcome.info
            self._served = (welcome.info.model, welcome.info.revision)
            self.loader.update(welcome.info, self.stub)
        if welcome.is_stopping:
            self._served = None
        self.events.on_changed(self)

    def on_accepted(self, request: SchedulerRequest) -> None:
        self.events.on_accepted(request)

    def on_refused(self, request: SchedulerRequest, error: ServiceError) -> None:
        self.events.on_refused(self, request, error)

    def on_finished(self, request: SchedulerRequest) -> None:
        self.events.on_finished(request)

    def on_heartbeat(self, heartbeat: pb.SchedulerHeartbeat) -> None:
        self.heartbeat = heartbeat
        if self.ready_workers != heartbeat.ready_workers:
            self.ready_workers = heartbeat.ready_workers
            self.events.on_changed(self)

    # -- other calls --------------------------------------------------------------------------------------------------

    async def get_status(self) -> public.SchedulerStatus:
        """The scheduler's state. If it does not answer in time: its address and connected=False."""
        try:
            response = await self.stub.GetSchedulerStatus(pb.GetSchedulerStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return public.SchedulerStatus(address=self.address)
        response.status.address = self.address
        response.status.connected = self.is_connected
        return response.status

    async def fetch_bundle(self) -> bytes:
        """The serialized bundle of its model. Raises UnavailableError."""
        try:
            return await self.loader.fetch(self.model.info.bundle_digest if self.model else b"", self.stub)
        except (grpc.aio.AioRpcError, BundleError):
            raise UnavailableError("the scheduler does not send the model's files now; retry later") from None

    async def abort_requests(self, request_ids: Sequence[str]) -> Sequence[str]:
        """End requests by id, from any gateway. Returns the ids that the scheduler had; none if it does not answer."""
        request = pb.AbortRequestsRequest(request_ids=request_ids)
        try:
            response = await self.stub.AbortRequests(request, timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("scheduler %s failed to abort requests: %s", self.address, error.details())
            return ()
        return response.aborted_ids


def problems_of(clients: Sequence[SchedulerClient]) -> str:
    """Why schedulers are not ready, for clients. Empty if all are."""
    return "; ".join(dict.fromkeys(client.problem for client in clients if not client.is_ready))


def _raise_if_cancelled() -> None:
    """Raise a CancelledError that grpc.aio has swallowed.

    grpc.aio passes the cancellation of a reading task on to its call. If the call ends by itself at the same moment,
    the task gets the call's error instead, which looks like a broken connection.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
