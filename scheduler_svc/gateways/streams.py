"""Attached gateways. Their requests go to the step loop. Messages to a gateway wait in its outbox.

An outbox holds at most one Welcome, one heartbeat, the replies to Submits, and one growing set of columns:

    Welcome (newest) | SchedulerHeartbeat (newest) | SubmitReply ... | Deltas of all updates since the last write

That a request was queued is part of the Deltas, and waits for them for at most QUEUED_WAIT_S: with short steps, one
message reports the request and its first token. Older gateways get a SubmitReply instead.

A gateway that reads slowly gets fewer and larger messages, and so does a gateway that sets an interval for chunks. A
gateway that stops reading is cut off at `MAX_PENDING_TOKENS` and its requests are aborted. So memory stays bounded, and
no other gateway waits. A gateway whose heartbeats stop is cut off too; its clients continue through another gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.messages import Deltas
from scheduler_svc.gateways import wire
from scheduler_svc.gateways.submits import SubmitReader
from scheduler_svc.refusals import RETRY_NO_WORKER_S
from scheduler_svc.step_loop import StepLoop
from step_protocol.columns import u32_to_bytes
from svc_common.errors import InvalidRequestError, OverloadedError, ServiceError, UnavailableError, shown_error
from svc_common.flush import FlushTimer
from svc_common.memory import MemoryLimit
from svc_common.tasks import SilenceWatch

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_PENDING_TOKENS = 1 << 20  # 16 MiB of columns; two entries of log probabilities count as a token
MAX_PENDING_REPLIES = 1 << 16
QUEUED_WAIT_S = 0.02


class Outbox:
    """Messages that wait for one gateway's stream. Filled by the step loop, emptied by the stream's handler.

    A first token or an end takes along all that waits; further tokens wait for the end of the interval of `interval_s`
    (svc_common/flush.py). An end begins no interval, so that intervals stay aligned with those of the gateway.
    """

    def __init__(self, gateway_id: str, interval_s: float = 0.0, *, takes_queued_handles: bool = False) -> None:
        self._gateway_id = gateway_id
        self._takes_queued_handles = takes_queued_handles
        self._welcome: scheduler_pb2.Welcome | None = None
        self._heartbeat: scheduler_pb2.SchedulerHeartbeat | None = None
        self._replies: deque[scheduler_pb2.SubmitReply] = deque()
        self._queued: list[int] = []  # handles of queued requests, for the next Deltas
        self._deltas: list[Deltas] = []
        self._ready: deque[scheduler_pb2.AttachResponse] = deque()  # to be sent before them
        self._num_tokens = 0
        self._flush = FlushTimer(self._send, interval_s)
        self._is_due = False  # `_deltas` and `_queued` may be sent
        self._wake = asyncio.Event()
        self._error: ServiceError | None = None
        self._is_closed = False

    @property
    def num_pending_tokens(self) -> int:
        return self._num_tokens

    def welcome(self, welcome: scheduler_pb2.Welcome) -> None:
        """Queue this Welcome. It replaces a Welcome that was not sent yet."""
        self._welcome = welcome
        self._wake.set()

    def heartbeat(self, heartbeat: scheduler_pb2.SchedulerHeartbeat) -> None:
        """Queue this heartbeat. It replaces a heartbeat that was not sent yet."""
        self._heartbeat = heartbeat
        self._wake.set()

    def reply(self, handle: int, error: ServiceError | None) -> None:
        """Reply to one Submit, before any Deltas of that handle."""
        if error is None and self._takes_queued_handles:
            self._queued.append(handle)
            self._flush.by(asyncio.get_running_loop().time() + QUEUED_WAIT_S)
            if len(self._queued) > MAX_PENDING_REPLIES:
                self._overflow(f"{len(self._queued)} unread replies")
            return
        refusal = None if error is None else wire.refusal_to_proto(error)
        self._replies.append(scheduler_pb2.SubmitReply(handle=handle, refusal=refusal))
        self._wake.set()
        if len(self._replies) > MAX_PENDING_REPLIES:
            self._overflow(f"{len(self._replies)} unread replies")

    def deliver(self, deltas: Deltas) -> None:
        """Send new tokens and finishes, merged with the waiting ones."""
        if self._is_closed:
            return
        self._deltas.append(deltas)
        self._num_tokens += deltas.size
        if has_first := not deltas.offsets.all():
            self._flush.begin()
        if has_first or deltas.finished:
            self._flush.now()
        else:
            self._flush.soon()
        if self._num_tokens > MAX_PENDING_TOKENS:
            self._overflow(f"{self._num_tokens} unread tokens")

    def change_weights(self, change: scheduler_pb2.WeightsChange) -> None:
        """Send that later tokens are computed by other weights, behind the tokens that wait."""
        if self._is_closed:
            return
        if self._deltas or self._queued:
            self._ready.append(self._take_deltas())
        self._ready.append(scheduler_pb2.AttachResponse(weights=change))
        self._wake.set()

    def _send(self) -> None:
        self._is_due = True
        self._wake.set()

    def close(self, error: ServiceError | None = None) -> None:
        """End `messages` after the waiting messages, with `error` if it is set."""
        self._error = self._error or error
        self._is_closed = True
        self._flush.now()

    def cut_off(self, error: ServiceError) -> None:
        """Drop the waiting messages and end `messages` with `error`."""
        log.warning("disconnecting gateway %s: %s", self._gateway_id, error.message)
        self._welcome = self._heartbeat = None
        self._replies.clear()
        self._queued.clear()
        self._deltas.clear()
        self._ready.clear()
        self._num_tokens = 0
        self.close(error)

    def _overflow(self, what: str) -> None:
        self.cut_off(OverloadedError(f"this gateway does not read fast enough: it has {what}; attach again"))

    async def messages(self) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """All messages for the stream, in order. Ends after `close`, or raises the error that `close` got."""
        while True:
            while (message := self._take()) is not None:
                yield message
            if self._is_closed:
                break
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error

    def _take(self) -> scheduler_pb2.AttachResponse | None:
        if self._welcome is not None:
            welcome, self._welcome = self._welcome, None
            return scheduler_pb2.AttachResponse(welcome=welcome)
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            return scheduler_pb2.AttachResponse(heartbeat=heartbeat)
        if self._replies:
            return scheduler_pb2.AttachResponse(submit_reply=self._replies.popleft())
        if self._ready:
            return self._ready.popleft()
        if (self._deltas or self._queued) and self._is_due:
            self._is_due = False
            return self._take_deltas()
        return None

    def _take_deltas(self) -> scheduler_pb2.AttachResponse:
        parts, self._deltas, self._num_tokens = self._deltas, [], 0
        response = scheduler_pb2.AttachResponse()
        if parts:
            wire.deltas_to_proto(parts, response.deltas)
        if self._queued:
            response.deltas.queued_handles = u32_to_bytes(np.array(self._queued, np.uint32))
            self._queued = []
        return response


@dataclass(slots=True, eq=False)
class Attached:
    """One gateway's stream."""

    gateway_id: str
    owner: int
    outbox: Outbox
    silence: SilenceWatch
    sends_heartbeats: bool = False


class Gateways:
    """Owns the streams of all attached gateways. Informs them about the model and this scheduler's load.

    Both sides send heartbeats every `heartbeat_interval_s`. With 0 the scheduler neither sends nor expects any.
    """

    def __init__(
        self,
        step_loop: StepLoop,
        scheduler_epoch: int,
        heartbeat_interval_s: float = 1.0,
        memory: MemoryLimit | None = None,
    ) -> None:
        self._step_loop = step_loop
        self._memory = memory or MemoryLimit(None)
        self._outboxes: dict[int, Outbox] = {}
        self._interval_s = heartbeat_interval_s
        self._is_stopping = False
        self._reader: SubmitReader | None = None  # set with the model
        self._welcome = scheduler_pb2.Welcome(
            scheduler_epoch=scheduler_epoch, heartbeat_interval_s=heartbeat_interval_s, takes_batches=True
        )

    @property
    def num_attached(self) -> int:
        return len(self._outboxes)

    @property
    def info(self) -> types_pb2.ModelInfo | None:
        """The announced model; None before the first worker."""
        return self._welcome.info if self._welcome.HasField("info") else None

    def announce(self, info: types_pb2.ModelInfo | None, ready_workers: int) -> None:
        """Send the model and the number of ready workers to every gateway, if either has changed."""
        self._send_welcome(info, 0 if self._is_stopping else ready_workers)

    def announce_stop(self) -> None:
        """From now on announce 0 ready workers, and that gateways send new requests to other schedulers."""
        self._is_stopping = True
        self._send_welcome(self.info, 0)

    def _send_welcome(self, info: types_pb2.ModelInfo | None, ready_workers: int) -> None:
        welcome = scheduler_pb2.Welcome(
            scheduler_epoch=self._welcome.scheduler_epoch,
            info=info,
            ready_workers=ready_workers,
            heartbeat_interval_s=self._interval_s,
            takes_batches=True,
            is_stopping=self._is_stopping,
        )
        if welcome == self._welcome:
            return
        if info != self.info:
            self._reader = None if info is None else SubmitReader(info)
        self._welcome = welcome
        for outbox in self._outboxes.values():
            outbox.welcome(welcome)

    def close(self) -> None:
        """End every stream after its waiting messages."""
        for outbox in self._outboxes.values():
            outbox.close()

    async def attach(
        self, requests: AsyncIterator[scheduler_pb2.AttachRequest]
    ) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """Serve one gateway's stream, from Hello to its end. When it ends, the gateway's requests are aborted."""
        hello = await _read_hello(requests)
        outbox = Outbox(
            hello.gateway_id, hello.deltas_interval_ms / 1000, takes_queued_handles=hello.takes_queued_handles
        )
        silence = SilenceWatch.of_heartbeats(self._interval_s, asyncio.get_running_loop().time())
        attached = Attached(hello.gateway_id, self._step_loop.attach(outbox), outbox, silence)
        self._outboxes[attached.owner] = outbox
        outbox.welcome(self._welcome)
        log.info("gateway %s attached", hello.gateway_id)
        tasks = [asyncio.create_task(self._read(requests, attached))]
        if self._interval_s:
            tasks.append(asyncio.create_task(self._beat(attached)))
        try:
            async for message in outbox.messages():
                yield message
        finally:
            for task in tasks:
                task.cancel()
            del self._outboxes[attached.owner]
            self._step_loop.detach(attached.owner)
            log.info("gateway %s left", hello.gateway_id)

    async def _read(self, requests: AsyncIterator[scheduler_pb2.AttachRequest], attached: Attached) -> None:
        """Read until the gateway ends its side or breaks the protocol. Then close the outbox."""
        loop, outbox = asyncio.get_running_loop(), attached.outbox
        try:
            async for request in requests:
                attached.silence.on_message(loop.time())
                self._take_request(request, attached)
            outbox.close()
        except Exception as error:
            outbox.close(shown_error("SchedulerService/Attach", error))

    async def _beat(self, attached: Attached) -> None:
        """Send heartbeats until the gateway has been silent for too long. A gateway without heartbeats never is."""
        loop, silence = asyncio.get_running_loop(), attached.silence
        while not silence.is_silent(loop.time()):
            attached.outbox.heartbeat(self._heartbeat())
            await asyncio.sleep(silence.pause_s(loop.time(), self._interval_s))
            silence.on_wake(loop.time())
            if not attached.sends_heartbeats:
                silence.on_message(loop.time())  # no heartbeat is expected
        # Abort its requests now, because the stream may be stuck in a write to a process that does not read.
        self._step_loop.detach(attached.owner)
        timeout_s = silence.timeout_s
        attached.outbox.cut_off(UnavailableError(f"no heartbeat from this gateway for {timeout_s:g} s; attach again"))

    def _heartbeat(self) -> scheduler_pb2.SchedulerHeartbeat:
        load, stats = self._step_loop.core.load(), self._step_loop.core.stats()
        return scheduler_pb2.SchedulerHeartbeat(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            pending_tokens=load.pending_tokens,
            ready_workers=self._welcome.ready_workers,
            kv_cache_usage=stats.kv_cache_usage,
        )

    def _take_request(self, request: scheduler_pb2.AttachRequest, attached: Attached) -> None:
        kind, owner = request.WhichOneof("message"), attached.owner
        if kind == "submit":
            self._submit(request.submit, attached)
        elif kind == "cancel":
            cancel = request.cancel
            sample_index = cancel.sample_index if cancel.HasField("sample_index") else None
            self._step_loop.cancel(owner, cancel.handle, sample_index, wire.cancel_reason(cancel))
        elif kind == "batch":
            self._take_batch(request.batch, attached)
        elif kind == "heartbeat":
            attached.sends_heartbeats = True
        else:
            raise InvalidRequestError(
                f"unexpected {kind or 'empty message'} in an Attach stream; send submit, cancel, heartbeat or batch"
            )

    def _take_batch(self, batch: scheduler_pb2.AttachBatch, attached: Attached) -> None:
        for message in batch.messages:
            if message.HasField("batch"):
                raise InvalidRequestError("a batch contains a batch; send its messages in one batch", field="batch")
            self._take_request(message, attached)

    def _submit(self, submit: scheduler_pb2.Submit, attached: Attached) -> None:
        try:
            if self._reader is None:
                raise UnavailableError("no worker has registered yet; retry later", retry_after_s=RETRY_NO_WORKER_S)
            if self._memory.exceeded_by() is not None and self._step_loop.core.load().num_running:
                self._memory.check()
            group = self._reader.group(submit, owner=attached.owner, origin=attached.gateway_id)
        except ServiceError as error:
            attached.outbox.reply(submit.handle, error)
            return
        self._step_loop.submit(group)


async def _read_hello(requests: AsyncIterator[scheduler_pb2.AttachRequest]) -> scheduler_pb2.Hello:
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message of Attach must be hello", field="hello")
    if first.hello.protocol_version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"hello.protocol_version is {first.hello.protocol_version}; must be {PROTOCOL_VERSION}",
            field="hello.protocol_version",
        )
    return first.hello
