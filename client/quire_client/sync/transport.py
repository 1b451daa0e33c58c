"""The functions of synchronous gRPC that the client uses. `quire_client.aio.transport` has the same for grpc.aio."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from time import sleep
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub
from quire.v1.rollouts_pb2_grpc import RolloutServiceStub
from quire.v1.session_pb2_grpc import SessionServiceStub

from quire_client.connection import channel as connection
from quire_client.connection.channel import HEALTH_METHOD, Metadata, TargetRing, health_request, health_state, joined
from quire_client.errors import Cancelled, QuireError, client_closed, error_from_rpc, unanswered
from quire_client.retry import PROBE_TIMEOUT_S, REDIAL_S

T = TypeVar("T")

__all__ = ["BoundedEvent", "Call", "Gateway", "Gateways", "channel_openers", "in_thread", "read_event", "sleep"]


class Call(Protocol):
    """An open Generate call."""

    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: its channel and its stubs."""

    channel: grpc.Channel
    stub: InferenceServiceStub
    admin: AdminServiceStub
    sessions: SessionServiceStub
    rollouts: RolloutServiceStub
    health: grpc.UnaryUnaryMultiCallable[bytes, bytes]

    @classmethod
    def on(cls, channel: grpc.Channel) -> Self:
        return cls(
            channel,
            InferenceServiceStub(channel),
            AdminServiceStub(channel),
            SessionServiceStub(channel),
            RolloutServiceStub(channel),
            channel.unary_unary(HEALTH_METHOD),
        )


class Gateways:
    """The gateways of one client; `ring` records which of them work. Calls raise QuireErrors."""

    def __init__(self, openers: Sequence[Callable[[], grpc.Channel]], metadata: Metadata) -> None:
        self._openers = openers
        self._opened: list[Gateway] = []
        self._metadata = metadata
        self._opening = threading.Lock()
        self._redials: dict[int, grpc.Future[bytes]] = {}
        self.ring = TargetRing(len(openers))
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._openers)

    @property
    def _gateways(self) -> list[Gateway]:
        """The gateways. The first call opens the channels."""
        with self._opening:
            if not self._opened:
                self._opened = [Gateway.on(open_one()) for open_one in self._openers]
            return self._opened

    @property
    def raw(self) -> InferenceServiceStub:
        """The stub of the first gateway."""
        return self._gateways[0].stub

    def close(self) -> None:
        self.is_closed = True
        for gateway in self._opened:
            gateway.channel.close()

    def unary(
        self,
        target: int,
        method: Callable[[Gateway], Callable[..., T]],
        request: Any,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> T:
        """Call a unary method on one gateway. `metadata` is sent with the client's own and has precedence."""
        with _TypedErrors():
            return method(self._gateways[target])(request, timeout=timeout_s, metadata=joined(self._metadata, metadata))

    def open_stream(
        self,
        target: int,
        request: pb.GenerateRequest | pb.ResumeRequest,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> Call:
        """Start Generate or Resume on one gateway."""
        stub = self._gateways[target].stub
        with _TypedErrors():
            if isinstance(request, pb.ResumeRequest):
                return stub.Resume(request, timeout=timeout_s, metadata=joined(self._metadata, metadata))
            return stub.Generate(request, timeout=timeout_s, metadata=joined(self._metadata, metadata))

    def abort_on_all(
        self, request: pb.AbortRequest, timeout_s: float
    ) -> tuple[list[pb.AbortResponse], list[QuireError]]:
        """Send Abort to every gateway at once. Returns all responses and all errors."""
        with _TypedErrors():
            calls = [g.stub.Abort.future(request, timeout=timeout_s, metadata=self._metadata) for g in self._gateways]
        responses: list[pb.AbortResponse] = []
        errors: list[QuireError] = []
        for call in calls:
            try:
                responses.append(call.result())
            except grpc.RpcError as error:
                errors.append(error_from_rpc(error))
        return responses, errors

    def leave(self, target: int, now: float) -> None:
        """Avoid a gateway that has failed, until it serves again."""
        self.ring.failed(target, now)
        self._redial(target)

    def probe(self, targets: Collection[int]) -> set[int]:
        """Check the health of these gateways at once. Returns the gateways that answer. Never raises."""
        return self._check_health(targets, PROBE_TIMEOUT_S, is_first_enough=False)[0]

    def first_answer(self, timeout_s: float) -> QuireError | None:
        """Check the health of all gateways at once. Returns None as soon as one answers, else the error of one."""
        targets = range(len(self))
        answered, error = self._check_health(targets, timeout_s, is_first_enough=True)
        if answered:
            return None
        for target in targets:
            self._redial(target)
        return error

    def _check_health(
        self, targets: Collection[int], timeout_s: float, *, is_first_enough: bool
    ) -> tuple[set[int], QuireError | None]:
        """The gateways that answered, and the error of one gateway that did not. Any answer of a server counts."""
        answered: set[int] = set()
        errors: list[QuireError] = []
        num_open = len(targets)
        changed = threading.Condition()

        def note(target: int, call: grpc.Future[bytes]) -> None:
            nonlocal num_open
            error = _health_error(call)
            with changed:
                num_open -= 1
                if error is None:
                    answered.add(target)
                else:
                    errors.append(error)
                changed.notify()

        try:
            calls = [self._start_check(target, timeout_s, note) for target in targets]
        except QuireError as error:
            return set(), error
        with changed:
            changed.wait_for(lambda: num_open == 0 or (is_first_enough and len(answered) > 0))
            found = set(answered), errors[0] if errors else None
        for call in calls:
            call.cancel()
        return found

    def _start_check(self, target: int, timeout_s: float, note: Callable[[int, Any], None]) -> grpc.Future[bytes]:
        with _TypedErrors():
            call = self._gateways[target].health.future(health_request(""), timeout=timeout_s, metadata=self._metadata)
        call.add_done_callback(lambda done: note(target, done))
        return call

    def _redial(self, target: int) -> None:
        """Keep a health check open on a gateway, to detect at once that it serves again.

        Synchronous gRPC reconnects to a lost server only while a call is open. Between two attempts no call is open, so
        it would detect a restarted server only after ten seconds.
        """
        waiting = self._redials.get(target)
        if self.is_closed or (waiting is not None and not waiting.done()):
            return
        check = self._gateways[target].health.future
        try:
            call = check(health_request(""), timeout=REDIAL_S, metadata=self._metadata, wait_for_ready=True)
        except ValueError:  # closed by another thread
            return
        self._redials[target] = call
        call.add_done_callback(lambda done: self._record_return(target, done))

    def _record_return(self, target: int, call: grpc.Future[bytes]) -> None:
        if not call.cancelled() and call.exception() is None and health_state(call.result()) == "serving":
            self.ring.works(target, time.monotonic())


class BoundedEvent(threading.Event):
    """An event with a bounded wait."""

    def wait_for(self, timeout_s: float) -> None:
        """Wait until the flag is set, at most `timeout_s`."""
        self.wait(timeout_s)


channel_openers = partial(connection.channel_openers, grpc)


def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function. The asyncio client calls it in a thread."""
    return function()


def read_event(call: Call, request_id: str) -> pb.GenerateResponse | None:
    """The next event of a stream; None at its end."""
    with _TypedErrors(request_id):
        return next(call, None)


class _TypedErrors:
    """Turns the exceptions of a gRPC call into QuireErrors. A class, because a generator costs time per event."""

    __slots__ = ("_request_id",)

    def __init__(self, request_id: str = "") -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.RpcError):
            raise error_from_rpc(error, self._request_id) from None
        if isinstance(error, ValueError):  # a closed channel
            raise client_closed() from None


def _health_error(call: grpc.Future[bytes]) -> QuireError | None:
    """The error of a health check without an answer; None if the server answered anything."""
    if call.cancelled():
        return Cancelled("the health check was cancelled")
    error = call.exception()
    if not isinstance(error, grpc.RpcError):
        return None
    return unanswered(error_from_rpc(error))
