"""The gateway's side of one scheduler: one Attach stream, every request multiplexed on it by a handle.

detached --Attach, Hello--> attached --Welcome with info, GetBundle--> model known
    ^                          |
    +----- stream broke -------+   open requests wait: each is sent again with its Continuation
                                   as soon as the scheduler is back, for at most `patience_s`
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
from quire.v1 import inference_pb2 as public
from quire.v1 import scheduler_pb2 as pb
from quire.v1 import types_pb2 as types
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub

from gateway_svc.models import BundleCache, ServedModel, describe_model
from gateway_svc.scheduler_request import SchedulerRequest
from gateway_svc.text.bundle import BundleError
from gateway_svc.wire import ProtocolError, error_from_refusal, tokens_from_deltas
from svc_common.errors import AlreadyExistsError, OverloadedError, QuireError, UnavailableError
from svc_common.serve import open_channel

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
HANDSHAKE_TIMEOUT_S = 10.0
BUNDLE_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 2.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
STABLE_AFTER_S = 5.0  # a stream that lived this long is dialled again at once
RESUBMIT_DELAY_S = 0.2
RETRY_AFTER_S = 1.0
MAX_HANDLE = 2**32

# A scheduler that is just back may say these for a moment: its workers, or the end of our old stream, come later.
PASSING = (UnavailableError, OverloadedError, AlreadyExistsError)


class SchedulerClient:
    """Owns the channel to one scheduler and all requests that are open there."""

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        bundles: BundleCache,
        patience_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.model: ServedModel | None = None
        self.is_connected = False
        self.ready_workers = 0
        self.problem = "not connected yet"
        self._gateway_id = gateway_id
        self._bundles = bundles
        self._patience_s = patience_s
        self._on_change = on_change
        self._channel = open_channel(address)
        self._stub = SchedulerServiceStub(self._channel)
        self._outbox: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()
        self._info: types.ModelInfo | None = None  # of the current stream's Welcome
        self._loader: asyncio.Task[None] | None = None
        self._open: set[SchedulerRequest] = set()
        self._by_handle: dict[int, SchedulerRequest] = {}
        self._patience: dict[SchedulerRequest, asyncio.TimerHandle] = {}
        self._last_handle = 0

    @property
    def is_ready(self) -> bool:
        """Requests can be sent now."""
        return self.is_connected and self.model is not None and self._info is not None

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: SchedulerRequest) -> None:
        """Send a request; its own waits tell what becomes of it. Raises UnavailableError when nobody is there."""
        if self.model is None or not self.is_ready:
            raise self.unavailable()
        request.revision = self.model.info.revision
        request.attach(self)
        self._open.add(request)
        self._send_submit(request)

    def unavailable(self) -> UnavailableError:
        """Why requests cannot be sent now, with advice."""
        return UnavailableError(
            f"scheduler {self.address} is not ready: {self.problem}; try again", retry_after_s=RETRY_AFTER_S
        )

    def _send_submit(self, request: SchedulerRequest) -> None:
        handle = self._new_handle()
        self._by_handle[handle] = request
        self._outbox.put_nowait(pb.AttachRequest(submit=request.next_submit(handle)))

    def _new_handle(self) -> int:
        self._last_handle = (self._last_handle + 1) % MAX_HANDLE
        while self._last_handle in self._by_handle:
            self._last_handle = (self._last_handle + 1) % MAX_HANDLE
        return self._last_handle

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: types.FinishReason.ValueType) -> bool:
        """Tell the scheduler; False when it does not have the request, so that no answer will come."""
        if request.handle is None:
            return False
        cancel = pb.Cancel(handle=request.handle, sample_index=sample_index, reason=reason)
        self._outbox.put_nowait(pb.AttachRequest(cancel=cancel))
        return True

    def release(self, request: SchedulerRequest) -> None:
        """Nobody reads this request any more: cancel what runs, deliver nothing."""
        if not request.is_finished:
            self.cancel(request, None, types.FINISH_REASON_ABORTED)
        self._forget(request)

    def _forget(self, request: SchedulerRequest) -> None:
        self._open.discard(request)
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
            request.handle = None
        timer = self._patience.pop(request, None)
        if timer is not None:
            timer.cancel()

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        loop = asyncio.get_running_loop()
        backoff = BACKOFF_FIRST_S / 2
        try:
            while True:
                started = loop.time()
                problem = await self._attach()
                self._on_detached(problem)
                is_stable = loop.time() - started > STABLE_AFTER_S
                backoff = BACKOFF_FIRST_S if is_stable else min(backoff * 2, BACKOFF_MOST_S)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
        finally:
            self._fail_all(UnavailableError("the gateway is shutting down; try again", retry_after_s=RETRY_AFTER_S))
            if self._loader is not None:
                self._loader.cancel()
            await self._channel.close()

    async def _attach(self) -> str:
        """One stream, from its start to its end; returns why it ended."""
        self._outbox = asyncio.Queue()
        hello = pb.Hello(gateway_id=self._gateway_id, protocol_version=PROTOCOL_VERSION)
        self._outbox.put_nowait(pb.AttachRequest(hello=hello))
        call = self._stub.Attach(_messages(self._outbox))
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                response = await call.read()
            while isinstance(response, pb.AttachResponse):
                self._on_response(response)
                response = await call.read()
            return f"the scheduler ended the stream: {await call.details() or 'it stops'}"
        except TimeoutError:
            return f"no Welcome within {HANDSHAKE_TIMEOUT_S:g} s"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except ProtocolError as error:
            log.error("scheduler %s broke the protocol: %s", self.address, error)
            return str(error)
        except Exception as error:
            log.exception("scheduler %s: the stream failed", self.address)
            return f"internal error: {type(error).__name__}"
        finally:
            call.cancel()

    def _on_detached(self, problem: str) -> None:
        if self.is_connected:
            log.warning("scheduler %s is gone: %s; %d requests wait for it", self.address, problem, len(self._open))
        elif problem != self.problem:
            log.info("scheduler %s cannot be reached yet: %s", self.address, problem)
        self.is_connected, self.ready_workers, self.problem, self._info = False, 0, problem, None
        self._by_handle.clear()
        for request in list(self._open):
            request.on_detached()
            self._wait_patiently(request)
        self._on_change()

    def _wait_patiently(self, request: SchedulerRequest) -> None:
        if request.is_over:
            self._forget(request)
        elif request not in self._patience:
            loop = asyncio.get_running_loop()
            self._patience[request] = loop.call_later(self._patience_s, self._give_up, request)

    def _give_up(self, request: SchedulerRequest) -> None:
        self._forget(request)
        request.fail(
            UnavailableError(
                f"scheduler {self.address} was lost and did not take the request again within "
                f"{self._patience_s:g} s ({self.problem}); go on with a continuation",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def _fail_all(self, error: QuireError) -> None:
        for request in list(self._open):
            self._forget(request)
            request.fail(error)

    # -- what the scheduler says --------------------------------------------------------------------------------------

    def _on_response(self, response: pb.AttachResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "deltas":
            self._on_deltas(response.deltas)
        elif kind == "submit_reply":
            self._on_submit_reply(response.submit_reply)
        elif kind == "welcome":
            self._on_welcome(response.welcome)
        elif kind != "heartbeat":  # it has done its work by having come
            raise ProtocolError(f"a message of kind {kind} in an Attach stream")

    def _on_deltas(self, deltas: pb.Deltas) -> None:
        requests = self._by_handle
        for handle, sample_index, offset, token_id in tokens_from_deltas(deltas):
            request = requests.get(handle)
            if request is not None:  # else it was cancelled here while this was under way
                request.on_token(sample_index, offset, token_id)
        for finish in deltas.finished:
            request = requests.get(finish.handle)
            if request is not None:
                request.on_finished(finish)
                if request.is_finished:
                    self._forget(request)

    def _on_submit_reply(self, reply: pb.SubmitReply) -> None:
        request = self._by_handle.get(reply.handle)
        if request is None:
            return
        if not reply.HasField("refusal"):
            timer = self._patience.pop(request, None)
            if timer is not None:
                timer.cancel()
            request.on_accepted()
            return
        self._by_handle.pop(reply.handle)
        request.handle = None
        self._on_refused(request, error_from_refusal(reply.refusal))

    def _on_refused(self, request: SchedulerRequest, error: QuireError) -> None:
        if request.num_submits == 1 or not isinstance(error, PASSING):
            self._forget(request)
            request.fail(error)
            return
        self._wait_patiently(request)
        delay = max(RESUBMIT_DELAY_S, error.retry_after_s or 0.0)
        asyncio.get_running_loop().call_later(delay, self._resubmit, request)

    def _resubmit(self, request: SchedulerRequest) -> None:
        if request not in self._open or request.handle is not None or self._info is None:
            return  # it ended meanwhile, or the next Welcome sends it
        if request.is_over:
            self._forget(request)
            return
        if request.revision != self._info.revision:
            self._forget(request)
            words = f"scheduler {self.address} came back with another revision of the model; start again"
            request.fail(UnavailableError(words, retry_after_s=RETRY_AFTER_S))
            return
        log.debug("request %s goes on at scheduler %s", request.request_id, self.address)
        self._send_submit(request)

    def _resubmit_all(self) -> None:
        waiting = [request for request in self._open if request.handle is None]
        if waiting:
            log.info("%d requests go on at scheduler %s", len(waiting), self.address)
        for request in waiting:
            self._resubmit(request)

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        if not self.is_connected:
            log.info("scheduler %s is attached", self.address)
        self.is_connected = True
        self.ready_workers = welcome.ready_workers
        if welcome.HasField("info"):
            self._info = welcome.info
            self._update_model(welcome.info)
            self._resubmit_all()
        elif self.model is None:
            self.problem = "no worker has registered yet"
        self._on_change()

    # -- the model ----------------------------------------------------------------------------------------------------

    def _update_model(self, info: types.ModelInfo) -> None:
        if self.model is not None and self.model.info == info:
            return
        if self.model is not None and self.model.info.revision != info.revision:
            self.model = None
        if self._loader is not None:
            self._loader.cancel()
        self.problem = f"the bundle of model {info.model!r} is on its way"
        self._loader = asyncio.create_task(self._load_model(info))

    async def _load_model(self, info: types.ModelInfo) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                text = await self._bundles.get(info.bundle_digest, lambda: self._fetch_bundle(info.bundle_digest))
                break
            except (grpc.aio.AioRpcError, BundleError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.problem = f"the bundle of model {info.model!r} cannot be used: {reason}"
                log.error("scheduler %s: %s", self.address, self.problem)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 10 * BACKOFF_MOST_S)
        self.model = ServedModel(info, text)
        describe_model(self.model)
        self._on_change()

    async def _fetch_bundle(self, digest: bytes) -> bytes:
        call = self._stub.GetBundle(pb.GetBundleRequest(digest=digest), timeout=BUNDLE_TIMEOUT_S)
        return b"".join([part.data async for part in call])

    async def get_status(self) -> public.SchedulerStatus:
        """What the scheduler says of itself; only address and connected=False when it does not answer in time."""
        try:
            response = await self._stub.GetSchedulerStatus(pb.GetSchedulerStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return public.SchedulerStatus(address=self.address)
        response.status.address = self.address
        response.status.connected = self.is_connected
        return response.status


async def _messages(outbox: asyncio.Queue[pb.AttachRequest]) -> AsyncIterator[pb.AttachRequest]:
    while True:
        yield await outbox.get()
