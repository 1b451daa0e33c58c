"""The connection to one scheduler: one Attach stream that carries all requests, each identified by a handle.

detached --Attach, Hello--> attached --Welcome with info, GetBundle--> model known
    ^                          |
    +-- broken or silent ------+   the dispatcher gets its open requests at once
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Protocol

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.v1 import inference_pb2 as public
from quire.v1 import types_pb2 as types

from gateway_svc.columns import ProtocolError, u32_from_bytes
from gateway_svc.request.models import BundleCache, ServedModel, describe_model, size_limits_of
from gateway_svc.schedulers.attach_call import AttachCall, raise_if_cancelled, write
from gateway_svc.schedulers.logprobs import entries_from_columns
from gateway_svc.schedulers.replicas import REQUEST_TOKENS
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.schedulers.wire import error_from_refusal, pooled_from_deltas, tokens_from_deltas
from gateway_svc.text.bundle import BundleError
from gateway_svc.text.chat_format import DETECTED, ParserNames
from svc_common.channels import MAX_BUNDLE_BYTES, ReceiveError, read_bundle
from svc_common.errors import InvalidRequestError, QuireError, UnavailableError, error_from_code
from svc_common.inspection import answer_timeout_s
from svc_common.serve import MAX_MESSAGE_BYTES, OpenChannel, open_channel
from svc_common.silence import SilenceWatch
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
HANDSHAKE_TIMEOUT_S = 10.0
BUNDLE_TIMEOUT_S = 120.0
ADAPTER_TIMEOUT_S = 180.0  # all workers load it
STATUS_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
STABLE_AFTER_S = 5.0  # after a stream that lasted this long, the backoff starts at its minimum
RETRY_AFTER_S = 1.0
SILENT_INTERVALS = 3  # number of missed heartbeats after which the requests of a scheduler move to another
MAX_HANDLE = 2**32
# A message above gRPC's limit would end the stream, and all its requests would have to move.
MAX_SUBMIT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)


class SchedulerEvents(Protocol):
    """Callbacks of the dispatcher, which decides where requests go."""

    def on_changed(self, client: SchedulerClient) -> None:
        """The connection, the model or the number of ready workers changed."""

    def on_lost(self, client: SchedulerClient, requests: list[SchedulerRequest]) -> None:
        """The stream ended while these requests were open. The scheduler aborts them; no more tokens arrive."""

    def on_refused(self, client: SchedulerClient, request: SchedulerRequest, error: QuireError) -> None:
        """The scheduler refused the request."""

    def on_accepted(self, request: SchedulerRequest) -> None:
        """The scheduler queued the request."""

    def on_finished(self, request: SchedulerRequest) -> None:
        """All samples of the request ended."""


class SchedulerClient:
    """Owns the channel to one scheduler and the requests that are open there. Set `events` before `run`.

    `deltas_interval_s`: least time between messages that contain neither first tokens nor finished samples.
    """

    events: SchedulerEvents

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        bundles: BundleCache,
        parsers: ParserNames = DETECTED,
        deltas_interval_s: float = 0.0,
        open_channel: OpenChannel = open_channel,
        max_bundle_bytes: int = MAX_BUNDLE_BYTES,
        shows_address: bool = True,
    ) -> None:
        self.address = address
        self._shows_address = shows_address
        self.model: ServedModel | None = None
        self.info: types.ModelInfo | None = None  # from the Welcome of the current stream
        self._served: tuple[str, str] | None = None  # name and revision of `info`
        self.is_connected = False
        self.scheduler_epoch = 0
        self.ready_workers = 0
        self._takes_batches = False
        self.problem = "not connected yet"
        self._hello = pb.Hello(
            gateway_id=gateway_id,
            protocol_version=PROTOCOL_VERSION,
            deltas_interval_ms=round(1000 * deltas_interval_s),
            takes_queued_handles=True,
        )
        self._bundles = bundles
        self._parsers = parsers
        self._open_channel = open_channel
        self._max_bundle_bytes = max_bundle_bytes
        self._closing: set[asyncio.Task[None]] = set()
        self._connect()
        self._outbox: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()
        self._limit: asyncio.Timeout | None = None  # ends the current stream
        self._watcher: asyncio.Task[None] | None = None
        self._silence: SilenceWatch | None = None  # set when a Welcome with a heartbeat interval has arrived
        self._timeout_reason = ""  # the problem to report when `_limit` expires
        self._loader: asyncio.Task[None] | None = None
        self._by_handle: dict[int, SchedulerRequest] = {}
        self._last_handle = 0
        self.heartbeat: pb.SchedulerHeartbeat | None = None  # the last one of the current stream
        self._sent_tokens = 0  # number of tokens in Submits since the last heartbeat

    @property
    def is_ready(self) -> bool:
        """Requests can be sent now."""
        return self.is_connected and self.model is not None and self.info is not None

    @property
    def shown_problem(self) -> str:
        """Why it is not ready, for clients. The reason of a lost connection contains the address."""
        if self._shows_address:
            return f"{self.address}: {self.problem}"
        return self.problem if self.is_connected else "not connected"

    @property
    def load_tokens(self) -> int:
        """Load of the scheduler: its last heartbeat plus the requests sent since; before a heartbeat, our requests."""
        if self.heartbeat is None:
            return REQUEST_TOKENS * len(self._by_handle)
        beat = self.heartbeat
        return beat.pending_tokens + REQUEST_TOKENS * (beat.num_waiting + beat.num_running) + self._sent_tokens

    def serves(self, name: str, revision: str) -> bool:
        """Requests for this model can be sent now, even if its bundle is not loaded yet."""
        return self._served == (name, revision)

    def can_hold(self, request: SchedulerRequest) -> bool:
        """The scheduler's largest worker has enough blocks for the request."""
        return self.info is not None and size_limits_of(self.info).fits(*request.sizes)

    # -- requests -----------------------------------------------------------------------------------------------------

    def requests(self) -> list[SchedulerRequest]:
        """All open requests."""
        return list(self._by_handle.values())

    def submit(self, request: SchedulerRequest) -> None:
        """Send a request; `events` reports the outcome. A request too large for a message fails at once."""
        handle = self._new_handle()
        message = pb.AttachRequest(submit=request.next_submit(handle))
        if (size := message.ByteSize()) > MAX_SUBMIT_BYTES:
            request.handle = None
            request.fail(_too_large(size))
            return
        self._by_handle[handle] = request
        self._sent_tokens += request.num_prompt_tokens + request.num_output_tokens + REQUEST_TOKENS
        self._outbox.put_nowait(message)

    def _new_handle(self) -> int:
        self._last_handle = (self._last_handle + 1) % MAX_HANDLE
        while self._last_handle in self._by_handle:
            self._last_handle = (self._last_handle + 1) % MAX_HANDLE
        return self._last_handle

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: types.FinishReason.ValueType) -> bool:
        """Send a cancel. False if the scheduler does not have the request, so no answer will come."""
        if request.handle is None:
            return False
        cancel = pb.Cancel(handle=request.handle, sample_index=sample_index, reason=reason)
        self._outbox.put_nowait(pb.AttachRequest(cancel=cancel))
        return True

    def withdraw(self, request: SchedulerRequest) -> None:
        """Remove a request: cancel its running samples and deliver nothing more."""
        if request.handle is None:
            return
        if not request.is_finished:
            self.cancel(request, None, types.FINISH_REASON_ABORTED)
        self._by_handle.pop(request.handle, None)
        request.handle = None

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        loop = asyncio.get_running_loop()
        backoff = BACKOFF_FIRST_S / 2
        try:
            while True:
                started = loop.time()
                problem = await self._attach()
                raise_if_cancelled()
                self._on_detached(problem)
                is_stable = loop.time() - started > STABLE_AFTER_S
                backoff = BACKOFF_FIRST_S if is_stable else min(backoff * 2, BACKOFF_MOST_S)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                self._reconnect()
        finally:
            self._stop_loading()
            await asyncio.gather(self._channel.close(), cancel(*self._closing))

    def _connect(self) -> None:
        """Make a new channel, with the newest certificate and token."""
        self._channel = self._open_channel(self.address)
        self._stub = SchedulerServiceStub(self._channel)

    def _reconnect(self) -> None:
        """Replace the channel. Calls on the old channel may finish: closing it immediately would cancel them."""
        closing = asyncio.create_task(self._channel.close(RELEASE_TIMEOUT_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._connect()

    async def _attach(self) -> str:
        """Run one stream from start to end. Returns why it ended."""
        self._outbox = asyncio.Queue()
        self._timeout_reason = f"no Welcome within {HANDSHAKE_TIMEOUT_S:g} s"
        self._outbox.put_nowait(pb.AttachRequest(hello=self._hello))
        call = self._stub.Attach()
        writer = asyncio.create_task(write(call, self._outbox, lambda: self._takes_batches))
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as self._limit:
                return await self._read(call)
        except TimeoutError:
            return self._timeout_reason
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except ProtocolError as error:
            log.error("scheduler %s violated the protocol: %s", self.address, error)
            return str(error)
        except Exception as error:
            log.exception("scheduler %s: the stream failed", self.address)
            return f"internal error: {type(error).__name__}"
        finally:
            self._stop_watching()
            self._outbox = asyncio.Queue()
            call.cancel()
            await cancel(writer)

    async def _read(self, call: AttachCall) -> str:
        loop = asyncio.get_running_loop()
        response = await call.read()
        if self._limit is not None:
            self._limit.reschedule(None)
        while isinstance(response, pb.AttachResponse):
            if self._silence is not None:
                self._silence.heard(loop.time())
            self._on_response(response)
            response = await call.read()
        if response is not grpc.aio.EOF:  # None: grpc could not decode the message but keeps the stream open
            raise ProtocolError("received bytes that are not a valid AttachResponse")
        return f"the scheduler ended the stream: {await call.details() or 'no reason given'}"

    async def _watch(self, silence: SilenceWatch, interval_s: float) -> None:
        """Send heartbeats, and end the stream when the scheduler has been silent for too long."""
        loop = asyncio.get_running_loop()
        while not silence.is_silent(loop.time()):
            self._outbox.put_nowait(pb.AttachRequest(heartbeat=pb.GatewayHeartbeat()))
            await asyncio.sleep(silence.pause_s(loop.time(), interval_s))
            silence.woke(loop.time())
        if self._limit is not None:
            self._timeout_reason = f"no heartbeat for {silence.timeout_s:g} s"
            self._limit.reschedule(loop.time())

    def _stop_watching(self) -> None:
        self._limit = None
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = self._silence = None

    def _on_detached(self, problem: str) -> None:
        requests = self.requests()
        if self.is_connected:
            log.warning("lost scheduler %s: %s; moving %d requests", self.address, problem, len(requests))
        elif problem != self.problem:
            log.info("cannot reach scheduler %s yet: %s", self.address, problem)
        self.is_connected, self.ready_workers, self.problem, self.info = False, 0, problem, None
        self._takes_batches, self._served = False, None
        self.heartbeat, self._sent_tokens = None, 0
        self._stop_loading()
        self._by_handle.clear()
        for request in requests:
            request.handle = None
        self.events.on_lost(self, requests)
        self.events.on_changed(self)

    # -- messages from the scheduler ----------------------------------------------------------------------------------

    def _on_response(self, response: pb.AttachResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "deltas":
            self._on_deltas(response.deltas)
        elif kind == "submit_reply":
            self._on_submit_reply(response.submit_reply)
        elif kind == "welcome":
            self._on_welcome(response.welcome)
        elif kind == "heartbeat":
            self._on_heartbeat(response.heartbeat)
        else:
            raise ProtocolError(f"received an Attach message of unknown kind {kind}")

    def _on_deltas(self, deltas: pb.Deltas) -> None:
        requests = self._by_handle
        if deltas.queued_handles:
            for handle in u32_from_bytes(deltas.queued_handles):
                if (request := requests.get(handle)) is not None:
                    self.events.on_accepted(request)
        if deltas.prompt_positions:
            self._on_prompt_logprobs(deltas)
        if deltas.HasField("logprobs"):
            self._on_scored_tokens(deltas)
        else:
            for handle, sample_index, offset, token_id in tokens_from_deltas(deltas):
                request = requests.get(handle)
                if request is not None:  # else the request was withdrawn before this message arrived
                    request.on_token(sample_index, offset, token_id)
        if deltas.pooled_handles:
            for handle, numbers in pooled_from_deltas(deltas):
                if (request := requests.get(handle)) is not None:
                    request.on_pooled(numbers)
        for finish in deltas.finished:
            request = requests.get(finish.handle)
            if request is None:
                continue
            request.on_finished(finish)
            if request.is_finished:
                self.withdraw(request)
                self.events.on_finished(request)

    def _on_scored_tokens(self, deltas: pb.Deltas) -> None:
        tokens = list(tokens_from_deltas(deltas))
        entries = entries_from_columns(deltas.logprobs, len(tokens))
        for (handle, sample_index, offset, token_id), scored in zip(tokens, entries, strict=True):
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_token(sample_index, offset, token_id, scored)

    def _on_prompt_logprobs(self, deltas: pb.Deltas) -> None:
        handles, positions = u32_from_bytes(deltas.prompt_handles), u32_from_bytes(deltas.prompt_positions)
        if len(handles) != len(positions):
            raise ProtocolError(f"Deltas have {len(handles)} prompt_handles but {len(positions)} prompt_positions")
        entries = entries_from_columns(deltas.prompt_logprobs, len(handles))
        for handle, position, scored in zip(handles, positions, entries, strict=True):
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_prompt_logprobs(position, scored)

    def _on_submit_reply(self, reply: pb.SubmitReply) -> None:
        request = self._by_handle.get(reply.handle)
        if request is None:
            return
        if not reply.HasField("refusal"):
            self.events.on_accepted(request)
            return
        self._by_handle.pop(reply.handle)
        request.handle = None
        self.events.on_refused(self, request, error_from_refusal(reply.refusal))

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        if not self.is_connected:
            log.info("scheduler %s is attached", self.address)
        self.is_connected = True
        self.scheduler_epoch = welcome.scheduler_epoch
        self.ready_workers = welcome.ready_workers
        self._takes_batches = welcome.takes_batches
        if self._watcher is None and (interval_s := welcome.heartbeat_interval_s) > 0:
            self._silence = SilenceWatch(SILENT_INTERVALS * interval_s, asyncio.get_running_loop().time())
            self._watcher = asyncio.create_task(self._watch(self._silence, interval_s))
        if welcome.HasField("info"):
            self.info = welcome.info
            self._served = (welcome.info.model, welcome.info.revision)
            self._update_model(welcome.info)
        elif self.model is None:
            self.problem = "no worker has registered yet"
        self.events.on_changed(self)

    def _on_heartbeat(self, heartbeat: pb.SchedulerHeartbeat) -> None:
        self.heartbeat, self._sent_tokens = heartbeat, 0
        if self.ready_workers != heartbeat.ready_workers:
            self.ready_workers = heartbeat.ready_workers
            self.events.on_changed(self)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _update_model(self, info: types.ModelInfo) -> None:
        if self.model is not None and self.model.info == info:
            return
        if self.model is not None and self.model.info.revision != info.revision:
            self.model = None
        self._stop_loading()
        self.problem = f"loading the bundle of model {info.model!r}"
        self._loader = asyncio.create_task(self._load_model(info))

    def _stop_loading(self) -> None:
        """Cancel the loading; the next Welcome restarts it. If another client waits for the bundle, it fetches it."""
        if self._loader is not None:
            self._loader.cancel()
        self._loader = None

    async def _load_model(self, info: types.ModelInfo) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                text = await self._bundles.get(info.bundle_digest, lambda: self._fetch_bundle(info.bundle_digest))
                break
            except (grpc.aio.AioRpcError, BundleError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.problem = f"cannot load the bundle of model {info.model!r}: {reason}"
                log.error("scheduler %s: %s", self.address, self.problem)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 10 * BACKOFF_MOST_S)
        self.model = ServedModel(info, text, self._parsers)
        describe_model(self.model)
        self.events.on_changed(self)

    async def _fetch_bundle(self, digest: bytes) -> bytes:
        call = self._stub.GetBundle(pb.GetBundleRequest(digest=digest), timeout=BUNDLE_TIMEOUT_S)
        try:
            return await read_bundle(call, self._max_bundle_bytes)
        except ReceiveError as error:
            raise BundleError(str(error)) from None

    # -- other calls --------------------------------------------------------------------------------------------------

    async def get_status(self) -> public.SchedulerStatus:
        """The scheduler's state. If it does not answer in time: its address and connected=False."""
        try:
            response = await self._stub.GetSchedulerStatus(pb.GetSchedulerStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return public.SchedulerStatus(address=self.address)
        response.status.address = self.address
        response.status.connected = self.is_connected
        return response.status

    async def get_pools(self) -> pb.GetPoolsResponse:
        """The blocks, rows and waiting sequences of the scheduler; nothing if it does not answer in time."""
        try:
            return await self._stub.GetPools(pb.GetPoolsRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return pb.GetPoolsResponse()

    async def inspect(self, kind: public.InspectKind.ValueType, worker_id: str, seconds: float, hz: int) -> bytes:
        """A profile or a report of the scheduler, or of one of its workers. Raises QuireError."""
        request = pb.InspectSchedulerRequest(kind=kind, worker_id=worker_id, seconds=seconds, hz=hz)
        try:
            response = await self._stub.InspectScheduler(request, timeout=2 * answer_timeout_s(kind, seconds))
        except grpc.aio.AioRpcError as error:
            raise error_from_code(error.code().value[0], f"scheduler {self.address}: {error.details()}") from None
        return response.data

    async def abort_requests(self, request_ids: Sequence[str]) -> Sequence[str]:
        """End requests by id, from any gateway. Returns the ids that the scheduler had; none if it does not answer."""
        request = pb.AbortRequestsRequest(request_ids=request_ids)
        try:
            response = await self._stub.AbortRequests(request, timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("scheduler %s failed to abort requests: %s", self.address, error.details())
            return ()
        return response.aborted_ids

    async def add_adapter(self, name: str, path: str) -> public.Adapter:
        """Load an adapter on all workers. Raises QuireError."""
        request = pb.AddAdapterRequest(name=name, path=path)
        try:
            return (await self._stub.AddAdapter(request, timeout=ADAPTER_TIMEOUT_S)).adapter
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def remove_adapter(self, name: str) -> bool:
        """Unload an adapter from all workers. False if none had it. Raises QuireError."""
        request = pb.RemoveAdapterRequest(name=name)
        try:
            return (await self._stub.RemoveAdapter(request, timeout=ADAPTER_TIMEOUT_S)).was_loaded
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def adapters(self) -> list[public.Adapter]:
        """All adapters; none if the scheduler does not answer."""
        try:
            response = await self._stub.GetAdapters(pb.GetAdaptersRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("scheduler %s failed to list adapters: %s", self.address, error.details())
            return []
        return list(response.adapters)

    def _error(self, error: grpc.aio.AioRpcError) -> QuireError:
        words = f"scheduler {self.address}: {error.details()}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(words, retry_after_s=RETRY_AFTER_S)
        return error_from_code(error.code().value[0], words)

    async def release_worker(self, worker_id: str, timeout_s: float) -> int:
        """Drain a worker within `timeout_s` (0: its own limit). Returns its number of sequences. Raises QuireError."""
        request = pb.ReleaseWorkerRequest(worker_id=worker_id, timeout_s=timeout_s)
        try:
            response = await self._stub.ReleaseWorker(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return response.num_moved


def _too_large(size: int) -> QuireError:
    words = (
        f"sampling.n: the prompt and the output of all samples so far have {size} bytes, but a message to a scheduler "
        f"holds at most {MAX_SUBMIT_BYTES}; request fewer or shorter samples"
    )
    return InvalidRequestError(words, field="sampling.n")
