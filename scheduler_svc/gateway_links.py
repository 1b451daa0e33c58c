"""Attached gateways: what they ask goes to the step loop, what they are told waits in an outbox each.

An outbox holds at most one Welcome, the answers to Submits, and one growing set of columns:

    Welcome (newest only) | SubmitReply ... | Deltas of all updates since the last write

A gateway that reads slowly gets fewer and larger messages. One that has stopped reading is cut off at
`MAX_PENDING_TOKENS` and its requests are aborted: memory stays bounded and nobody else waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from quire.v1 import scheduler_pb2, types_pb2

from scheduler_svc import wire
from scheduler_svc.core.messages import Deltas
from scheduler_svc.step_loop import RETRY_NO_WORKER_S, StepLoop
from svc_common.errors import InvalidRequestError, OverloadedError, QuireError, UnavailableError

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_PENDING_TOKENS = 1 << 20  # 16 MiB of columns
MAX_PENDING_REPLIES = 1 << 16


class Outbox:
    """Messages that wait for one gateway's stream. Filled by the step loop, emptied by the stream's handler."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._welcome: scheduler_pb2.Welcome | None = None
        self._replies: deque[scheduler_pb2.SubmitReply] = deque()
        self._deltas: list[Deltas] = []
        self._num_tokens = 0
        self._wake = asyncio.Event()
        self._error: QuireError | None = None
        self._is_closed = False

    @property
    def num_pending_tokens(self) -> int:
        return self._num_tokens

    def welcome(self, welcome: scheduler_pb2.Welcome) -> None:
        """Replaces a Welcome that was not written yet."""
        self._welcome = welcome
        self._wake.set()

    def reply(self, handle: int, error: QuireError | None) -> None:
        """The answer to one Submit; written before any Deltas of that handle."""
        refusal = None if error is None else wire.refusal_to_proto(error)
        self._replies.append(scheduler_pb2.SubmitReply(handle=handle, refusal=refusal))
        self._wake.set()
        if len(self._replies) > MAX_PENDING_REPLIES:
            self._cut_off(f"{len(self._replies)} unread answers")

    def deliver(self, deltas: Deltas) -> None:
        """Columns and finishes; merged with what waits."""
        if self._is_closed:
            return
        self._deltas.append(deltas)
        self._num_tokens += len(deltas.token_ids)
        self._wake.set()
        if self._num_tokens > MAX_PENDING_TOKENS:
            self._cut_off(f"{self._num_tokens} unread tokens")

    def close(self, error: QuireError | None = None) -> None:
        """End `messages` once what waits has been taken, with `error` if there is one."""
        self._error = self._error or error
        self._is_closed = True
        self._wake.set()

    def _cut_off(self, what: str) -> None:
        log.warning("gateway %s does not read: %s; its stream ends", self._gateway_id, what)
        self._welcome = None
        self._replies.clear()
        self._deltas.clear()
        self._num_tokens = 0
        self.close(OverloadedError(f"this gateway left {what} waiting; attach again and read faster"))

    async def messages(self) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """Everything for the stream, in order; ends after `close`, or raises what it was closed with."""
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
        if self._replies:
            return scheduler_pb2.AttachResponse(submit_reply=self._replies.popleft())
        if self._deltas:
            parts, self._deltas, self._num_tokens = self._deltas, [], 0
            return scheduler_pb2.AttachResponse(deltas=wire.deltas_to_proto(parts))
        return None


class Gateways:
    """All attached gateways, and what every one of them must know of the model."""

    def __init__(self, step_loop: StepLoop, scheduler_epoch: int) -> None:
        self._step_loop = step_loop
        self._outboxes: dict[int, Outbox] = {}
        self._welcome = scheduler_pb2.Welcome(scheduler_epoch=scheduler_epoch)

    @property
    def info(self) -> types_pb2.ModelInfo | None:
        """The model as gateways know it; None before the first worker."""
        return self._welcome.info if self._welcome.HasField("info") else None

    def announce(self, info: types_pb2.ModelInfo | None, ready_workers: int) -> None:
        """Tell every gateway of the model and of how many workers serve it; nothing is sent when nothing changed."""
        welcome = scheduler_pb2.Welcome(
            scheduler_epoch=self._welcome.scheduler_epoch, info=info, ready_workers=ready_workers
        )
        if welcome == self._welcome:
            return
        self._welcome = welcome
        for outbox in self._outboxes.values():
            outbox.welcome(welcome)

    def close(self) -> None:
        """End every stream once its outbox is empty."""
        for outbox in self._outboxes.values():
            outbox.close()

    async def attach(
        self, requests: AsyncIterator[scheduler_pb2.AttachRequest]
    ) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """One gateway's stream, from Hello to its end. Its requests end with it."""
        hello = await _read_hello(requests)
        outbox = Outbox(hello.gateway_id)
        owner = self._step_loop.attach(outbox)
        self._outboxes[owner] = outbox
        outbox.welcome(self._welcome)
        log.info("gateway %s attached", hello.gateway_id)
        reader = asyncio.create_task(self._read(requests, owner, outbox))
        try:
            async for message in outbox.messages():
                yield message
        finally:
            reader.cancel()
            del self._outboxes[owner]
            self._step_loop.detach(owner)
            log.info("gateway %s left", hello.gateway_id)

    async def _read(self, requests: AsyncIterator[scheduler_pb2.AttachRequest], owner: int, outbox: Outbox) -> None:
        """Until the gateway ends its side or breaks the protocol; then the outbox is closed."""
        try:
            async for request in requests:
                self._take_request(request, owner, outbox)
            outbox.close()
        except QuireError as error:
            outbox.close(error)
        except Exception as error:
            log.exception("reading a gateway's stream failed")
            outbox.close(QuireError(f"internal error: {type(error).__name__}; the server's log has it"))

    def _take_request(self, request: scheduler_pb2.AttachRequest, owner: int, outbox: Outbox) -> None:
        kind = request.WhichOneof("message")
        if kind == "submit":
            self._submit(request.submit, owner, outbox)
        elif kind == "cancel":
            cancel = request.cancel
            sample_index = cancel.sample_index if cancel.HasField("sample_index") else None
            self._step_loop.cancel(owner, cancel.handle, sample_index, wire.cancel_reason(cancel))
        else:
            raise InvalidRequestError(f"{kind or 'an empty message'} is not expected here; send submit or cancel")

    def _submit(self, submit: scheduler_pb2.Submit, owner: int, outbox: Outbox) -> None:
        try:
            if self.info is None:
                raise UnavailableError("no worker has registered yet; try again soon", retry_after_s=RETRY_NO_WORKER_S)
            group = wire.group_from_proto(submit, self.info, owner=owner)
        except QuireError as error:
            outbox.reply(submit.handle, error)
            return
        self._step_loop.submit(group)


async def _read_hello(requests: AsyncIterator[scheduler_pb2.AttachRequest]) -> scheduler_pb2.Hello:
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message of Attach must be hello", field="hello")
    if first.hello.protocol_version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"hello.protocol_version is {first.hello.protocol_version}; this scheduler speaks {PROTOCOL_VERSION}",
            field="hello.protocol_version",
        )
    return first.hello
