"""One Attach stream to a scheduler: what is sent on it, what arrives, and when it counts as lost."""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc
from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers.logprobs import entries_from_columns
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from gateway_svc.schedulers.wire import ProtocolError
from prefix_index.hashing import ColumnError, ids_from_bytes
from svc_common.channels import MAX_MESSAGE_BYTES
from svc_common.errors import InvalidRequestError, ServiceError, error_from_code
from svc_common.flush import FlushTimer
from svc_common.tasks import SilenceWatch, cancel

if TYPE_CHECKING:
    from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = logging.getLogger(__name__)

# Load of a request in addition to its prompt: it takes a row in every step and blocks for its output.
REQUEST_TOKENS = 32
AttachCall = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]

HANDSHAKE_TIMEOUT_S = 10.0
MAX_HANDLE = 2**32
# A batch ends with the message that reaches this size, so a batch is at most this much larger than a single message.
BATCH_BYTES = 256 << 10
BATCH_GAP_S = 0.002
# A message above gRPC's limit would end the stream, and all its requests would have to move.
MAX_SUBMIT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)


class StreamEvents(Protocol):
    """Callbacks of the client, for messages about the scheduler itself."""

    def on_welcome(self, welcome: pb.Welcome) -> None: ...
    def on_heartbeat(self, heartbeat: pb.SchedulerHeartbeat) -> None: ...
    def on_accepted(self, request: SchedulerRequest) -> None: ...
    def on_refused(self, request: SchedulerRequest, error: ServiceError) -> None: ...
    def on_finished(self, request: SchedulerRequest) -> None: ...


class AttachStream:
    """Owns the handles of the requests that the scheduler has, from the Attach call until it ends.

    A request is sent once per stream, under a handle that no other request of the stream has. `withdraw` gives the
    handle back at once: messages for it that are on their way find no request and are dropped.
    """

    def __init__(self, address: str, events: StreamEvents) -> None:
        self.address = address
        self.takes_batches = False  # from the Welcome
        self.sent_tokens = 0  # number of tokens in Submits since the last heartbeat
        self._events = events
        self._by_handle: dict[int, SchedulerRequest] = {}
        self._last_handle = 0
        self._weights: pb.WeightsChange | None = None  # weights that compute the next tokens of this stream
        self._waiting: list[pb.AttachRequest] = []
        self._writes = asyncio.Event()
        self._flush = FlushTimer(self._writes.set, holds=True)
        self._limit: asyncio.Timeout | None = None  # ends the stream
        self._limit_reason = f"no Welcome within {HANDSHAKE_TIMEOUT_S:g} s"  # the problem to report when it expires
        self._watcher: asyncio.Task[None] | None = None
        self._silence: SilenceWatch | None = None  # set when a Welcome with a heartbeat interval has arrived

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._by_handle)

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
        if (weights := self._weights) is not None:
            if weights.weights.version or request.base_weights is not None:
                request.on_weights(weights)
            request.base_weights = request.base_weights or weights
        self.sent_tokens += request.num_prompt_tokens + request.num_output_tokens + REQUEST_TOKENS
        self._send(message)

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
        self._send(pb.AttachRequest(cancel=cancel))
        return True

    def withdraw(self, request: SchedulerRequest) -> None:
        """Remove a request: cancel its running samples and deliver nothing more."""
        if request.handle is None:
            return
        if not request.is_finished:
            self.cancel(request, None, types.FINISH_REASON_ABORTED)
        self._by_handle.pop(request.handle, None)
        request.handle = None

    def end(self) -> list[SchedulerRequest]:
        """Give back all handles. Returns the requests that were open."""
        requests = self.requests()
        self._by_handle.clear()
        for request in requests:
            request.handle = None
        return requests

    # -- the call -----------------------------------------------------------------------------------------------------

    async def run(self, stub: SchedulerServiceAsyncStub, hello: pb.Hello) -> str:
        """Run the stream from start to end. Returns why it ended."""
        self._send(pb.AttachRequest(hello=hello))
        call = stub.Attach()
        writer = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as self._limit:
                return await self._read(call)
        except TimeoutError:
            return self._limit_reason
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (ProtocolError, ColumnError) as error:
            log.error("scheduler %s violated the protocol: %s", self.address, error)
            return str(error)
        except Exception as error:
            log.exception("scheduler %s: the stream failed", self.address)
            return f"internal error: {type(error).__name__}"
        finally:
            self._limit = None
            if self._watcher is not None:
                self._watcher.cancel()
            self._flush.stop()
            call.cancel()
            await cancel(writer)

    def _send(self, message: pb.AttachRequest) -> None:
        """Send a message at once, or with others BATCH_GAP_S after the last ones."""
        self._waiting.append(message)
        self._flush.soon()

    async def _write(self, call: AttachCall) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._writes.wait()
            self._writes.clear()
            waiting, self._waiting = self._waiting, []
            for message in batches_of(waiting) if self.takes_batches else waiting:
                await call.write(message)
            self._flush.free(loop.time() + BATCH_GAP_S)

    async def _read(self, call: AttachCall) -> str:
        loop = asyncio.get_running_loop()
        response = await call.read()
        if self._limit is not None:
            self._limit.reschedule(None)
        while isinstance(response, pb.AttachResponse):
            if self._silence is not None:
                self._silence.on_message(loop.time())
            self.on_response(response)
            response = await call.read()
        if response is not grpc.aio.EOF:  # None: grpc could not decode the message but keeps the stream open
            raise ProtocolError("received bytes that are not a valid AttachResponse")
        return f"the scheduler ended the stream: {await call.details() or 'no reason given'}"

    async def _watch(self, silence: SilenceWatch, interval_s: float) -> None:
        """Send heartbeats, and end the stream when the scheduler has been silent for too long."""
        loop = asyncio.get_running_loop()
        while not silence.is_silent(loop.time()):
            self._send(pb.AttachRequest(heartbeat=pb.GatewayHeartbeat()))
            await asyncio.sleep(silence.pause_s(loop.time(), interval_s))
            silence.on_wake(loop.time())
        if self._limit is not None:
            self._limit_reason = f"no heartbeat for {silence.timeout_s:g} s"
            self._limit.reschedule(loop.time())

    # -- messages from the scheduler ----------------------------------------------------------------------------------

    def on_response(self, response: pb.AttachResponse) -> None:
        """Deliver a message. Raises ProtocolError or ColumnError."""
        kind = response.WhichOneof("message")
        if kind == "deltas":
            self._on_deltas(response.deltas)
        elif kind == "submit_reply":
            self._on_submit_reply(response.submit_reply)
        elif kind == "weights":
            self._on_weights(response.weights)
        elif kind == "welcome":
            self._on_welcome(response.welcome)
        elif kind == "heartbeat":
            self.sent_tokens = 0
            self._events.on_heartbeat(response.heartbeat)
        else:
            raise ProtocolError(f"received an Attach message of unknown kind {kind}")

    def _on_deltas(self, deltas: pb.Deltas) -> None:
        requests = self._by_handle
        if deltas.queued_handles:
            for handle in ids_from_bytes(deltas.queued_handles):
                if (request := requests.get(handle)) is not None:
                    self._events.on_accepted(request)
        if deltas.prompt_positions:
            self._on_prompt_logprobs(deltas)
        if deltas.HasField("logprobs"):
            self._on_scored_tokens(deltas)
        else:
            for handle, sample_index, offset, token_ids in _runs_of(deltas):
                request = requests.get(handle)
                if request is not None:  # else the request was withdrawn before this message arrived
                    request.on_tokens(sample_index, offset, token_ids)
        if deltas.pooled_handles:
            for handle, numbers in _pooled_of(deltas):
                if (request := requests.get(handle)) is not None:
                    request.on_pooled(numbers)
        for finish in deltas.finished:
            request = requests.get(finish.handle)
            if request is None:
                continue
            request.on_finished(finish)
            if request.is_finished:
                self.withdraw(request)
                self._events.on_finished(request)

    def _on_scored_tokens(self, deltas: pb.Deltas) -> None:
        tokens = list(_tokens_of(deltas))
        entries = entries_from_columns(deltas.logprobs, len(tokens))
        for (handle, sample_index, offset, token_id), scored in zip(tokens, entries, strict=True):
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_tokens(sample_index, offset, array("I", (token_id,)), scored)

    def _on_prompt_logprobs(self, deltas: pb.Deltas) -> None:
        handles, positions = ids_from_bytes(deltas.prompt_handles), ids_from_bytes(deltas.prompt_positions)
        if len(handles) != len(positions):
            raise ProtocolError(f"Deltas have {len(handles)} prompt_handles but {len(positions)} prompt_positions")
        entries = entries_from_columns(deltas.prompt_logprobs, len(handles))
        for handle, position, scored in zip(handles, positions, entries, strict=True):
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_prompt_logprobs(position, scored)

    def _on_weights(self, change: pb.WeightsChange) -> None:
        self._weights = change
        for request in self._by_handle.values():
            request.on_weights(change)

    def _on_submit_reply(self, reply: pb.SubmitReply) -> None:
        request = self._by_handle.get(reply.handle)
        if request is None:
            return
        if not reply.HasField("refusal"):
            self._events.on_accepted(request)
            return
        self._by_handle.pop(reply.handle)
        request.handle = None
        self._events.on_refused(request, _refusal_of(reply.refusal))

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        self.takes_batches = welcome.takes_batches
        if self._weights is None and welcome.HasField("info"):
            self._weights = _weights_of(welcome.info)
        if self._watcher is None and (interval_s := welcome.heartbeat_interval_s) > 0:
            self._silence = SilenceWatch.of_heartbeats(interval_s, asyncio.get_running_loop().time())
            self._watcher = asyncio.create_task(self._watch(self._silence, interval_s))
        self._events.on_welcome(welcome)


def _weights_of(info: types.ModelInfo) -> pb.WeightsChange:
    """The weights when a stream begins."""
    weights = types.WeightVersion(
        version=info.weight_version, revision=info.weights_revision or info.revision, weights_digest=info.weights_digest
    )
    return pb.WeightsChange(weights=weights)


def _tokens_of(deltas: pb.Deltas) -> Iterator[tuple[int, int, int, int]]:
    """(handle, sample index, output position, token id) per new token. Raises ProtocolError."""
    handles, offsets = ids_from_bytes(deltas.handles), ids_from_bytes(deltas.offsets)
    token_ids = ids_from_bytes(deltas.token_ids)
    samples = ids_from_bytes(deltas.sample_indices) if deltas.sample_indices else array("I", bytes(4 * len(handles)))
    if not len(handles) == len(offsets) == len(token_ids) == len(samples):
        raise ProtocolError(
            f"Deltas columns differ in length: {len(handles)} handles, {len(samples)} sample indices, "
            f"{len(offsets)} offsets, {len(token_ids)} token ids"
        )
    return zip(handles, samples, offsets, token_ids, strict=True)


def _runs_of(deltas: pb.Deltas) -> Iterator[tuple[int, int, int, array[int]]]:
    """Like `_tokens_of`, with all tokens of a sample that follow each other. Raises ProtocolError."""
    runs: dict[tuple[int, int], tuple[int, array[int]]] = {}
    for handle, sample_index, offset, token_id in _tokens_of(deltas):
        key = handle, sample_index
        run = runs.get(key)
        if run is not None and run[0] + len(run[1]) == offset:
            run[1].append(token_id)
            continue
        if run is not None:
            yield *key, *run
        runs[key] = offset, array("I", (token_id,))
    for key, run in runs.items():
        yield *key, *run


def _pooled_of(deltas: pb.Deltas) -> Iterator[tuple[int, array[float]]]:
    """Handles of pooled requests and their numbers. Raises ProtocolError if the columns disagree."""
    handles, lens = ids_from_bytes(deltas.pooled_handles), ids_from_bytes(deltas.pooled_lens)
    if len(handles) != len(lens) or 4 * sum(lens) != len(deltas.pooled_values):
        raise ProtocolError(
            f"Deltas have {len(handles)} pooled_handles, {len(lens)} pooled_lens and {len(deltas.pooled_values)} bytes "
            "of pooled_values"
        )
    values = array("f")
    values.frombytes(deltas.pooled_values)
    if sys.byteorder == "big":
        values.byteswap()
    start = 0
    for handle, count in zip(handles, lens, strict=True):
        yield handle, values[start : start + count]
        start += count


def _refusal_of(refusal: pb.Refusal) -> ServiceError:
    """A scheduler's refusal as an error with the same code, field and retry delay."""
    retry_after_s = refusal.retry_after_ms / 1000 if refusal.retry_after_ms else None
    return error_from_code(refusal.code, refusal.message, field=refusal.field, retry_after_s=retry_after_s)


def batches_of(messages: Sequence[pb.AttachRequest]) -> Iterator[pb.AttachRequest]:
    """The same messages in fewer ones, in order."""
    start, size = 0, 0
    for end, message in enumerate(messages, 1):
        size += message.ByteSize()
        if size >= BATCH_BYTES or end == len(messages):
            parts = messages[start:end]
            yield message if len(parts) == 1 else pb.AttachRequest(batch=pb.AttachBatch(messages=parts))
            start, size = end, 0


def _too_large(size: int) -> ServiceError:
    words = (
        f"sampling.n: the prompt and the output of all samples so far have {size} bytes, but a message to a scheduler "
        f"holds at most {MAX_SUBMIT_BYTES}; request fewer or shorter samples"
    )
    return InvalidRequestError(words, field="sampling.n")
