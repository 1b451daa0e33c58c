"""The functions of grpc.aio that the client uses. `quire_client.sync.transport` has the same for synchronous gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub
from quire.v1.rollouts_pb2_grpc import RolloutServiceStub
from quire.v1.session_pb2_grpc import SessionServiceStub

from quire_client.connection import channel as connection
from quire_client.connection.channel import HEALTH_METHOD, Metadata, TargetRing, health_request, joined
from quire_client.errors import Cancelled, QuireError, client_closed, error_from_rpc, unanswered
from quire_client.retry import PROBE_TIMEOUT_S

if TYPE_CHECKING:
    from quire.v1.inference_pb2_grpc import AdminServiceAsyncStub, InferenceServiceAsyncStub
    from quire.v1.rollouts_pb2_grpc import RolloutServiceAsyncStub
    from quire.v1.session_pb2_grpc import SessionServiceAsyncStub

T = TypeVar("T")
OTHER_LOOP = (
    "this AsyncClient is used in a second event loop, e.g. a second asyncio.run(); create one client per event loop, "
    "or use the synchronous Client"
)

__all__ = ["AsyncGateways", "BoundedEvent", "Call", "Gateway", "channel_openers", "in_thread", "read_event", "sleep"]


class Call(Protocol):
    """An open Generate call. `read` returns grpc.aio.EOF at the end."""

    async def read(self) -> Any: ...
    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: its channel and its stubs."""

    channel: grpc.aio.Channel
    stub: InferenceServiceAsyncStub
    admin: AdminServiceAsyncStub
    sessions: SessionServiceAsyncStub
    rollouts: RolloutServiceAsyncStub
    health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

    @classmethod
    def on(cls, channel: grpc.aio.Channel) -> Self:
        return cls(
            channel,
            InferenceServiceStub(channel),
            AdminServiceStub(channel),
            SessionServiceStub(channel),
            RolloutServiceStub(channel),
            channel.unary_unary(HEALTH_METHOD),
        )


class AsyncGateways:
    """The gateways of one client; `ring` records which of them work. Calls raise QuireErrors."""

    def __init__(self, openers: Sequence[Callable[[], grpc.aio.Channel]], metadata: Metadata) -> None:
        self._openers = openers
        self._opened: list[Gateway] = []
        self._metadata = metadata
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ring = TargetRing(len(openers))
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._openers)

    @property
    def _gateways(self) -> list[Gateway]:
        """Owns the channels of the gateways. The first call opens them in its event loop."""
        loop = asyncio.get_running_loop()
        if not self._opened:
            self._loop = loop
            self._opened = [Gateway.on(open_one()) for open_one in self._openers]
        if self._loop is not loop:
            raise RuntimeError(OTHER_LOOP)
        return self._opened

    @property
    def raw(self) -> InferenceServiceAsyncStub:
        """The stub of the first gateway."""
        return self._gateways[0].stub

    async def close(self) -> None:
        self.is_closed = True
        for gateway in self._gateways if self._opened else ():
            await gateway.channel.close()

    async def unary(
        self,
        target: int,
        method: Callable[[Gateway], Callable[..., Awaitable[T]]],
        request: Any,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> T:
        """Call a unary method on one gateway. `metadata` is added to the client's metadata and overrides it."""
        with _TypedErrors():
            return await method(self._gateways[target])(
                request, timeout=timeout_s, metadata=joined(self._metadata, metadata)
            )

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

    async def abort_on_all(
        self, request: pb.AbortRequest, timeout_s: float
    ) -> tuple[list[pb.AbortResponse], list[QuireError]]:
        """Send Abort to every gateway at once. Returns all responses and all errors."""

        async def ask(target: int) -> pb.AbortResponse | QuireError:
            try:
                return await self.unary(target, lambda gateway: gateway.stub.Abort, request, timeout_s)
            except QuireError as error:
                return error

        answers = await asyncio.gather(*map(ask, range(len(self))))
        responses = [answer for answer in answers if isinstance(answer, pb.AbortResponse)]
        return responses, [answer for answer in answers if isinstance(answer, QuireError)]

    def leave(self, target: int, now: float) -> None:
        """Avoid a gateway that has failed."""
        self.ring.failed(target, now)

    async def probe(self, targets: Collection[int]) -> set[int]:
        """Check the health of these gateways at once. Returns the gateways that answer. Never raises."""
        probed = list(targets)
        errors = await asyncio.gather(*(self._health_error(target, PROBE_TIMEOUT_S) for target in probed))
        return {target for target, error in zip(probed, errors, strict=True) if error is None}

    async def first_answer(self, timeout_s: float) -> QuireError | None:
        """Check the health of all gateways at once. Returns None as soon as one answers, else the error of one."""
        checks = [asyncio.create_task(self._health_error(target, timeout_s)) for target in range(len(self))]
        errors: list[QuireError] = []
        try:
            for check in asyncio.as_completed(checks):
                error = await check
                if error is None:
                    return None
                errors.append(error)
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        return errors[0]

    async def _health_error(self, target: int, timeout_s: float) -> QuireError | None:
        """The error of a health check without an answer; None if the server answered anything."""
        try:
            await self.unary(target, lambda gateway: gateway.health, health_request(""), timeout_s)
        except QuireError as error:
            return unanswered(error)
        return None


class BoundedEvent(asyncio.Event):
    """An event with a bounded wait."""

    async def wait_for(self, timeout_s: float) -> None:
        """Wait until the flag is set, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), timeout_s)


channel_openers = partial(connection.channel_openers, grpc.aio)


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function without blocking the event loop."""
    return await asyncio.to_thread(function)


async def read_event(call: Call, request_id: str) -> pb.GenerateResponse | None:
    """The next event of a stream; None at its end."""
    with _TypedErrors(request_id):
        event = await call.read()
    return event if isinstance(event, pb.GenerateResponse) else None


class _TypedErrors:
    """Turns the exceptions of a grpc.aio call into QuireErrors. A class, because a generator costs time per event."""

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
        if isinstance(error, grpc.aio.UsageError):  # a closed channel
            raise client_closed() from None
        if not isinstance(error, asyncio.CancelledError):
            return
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            # grpc.aio also raises CancelledError for a cancelled call. This task itself was not cancelled.
            raise Cancelled("the call was cancelled", request_id=self._request_id) from None
