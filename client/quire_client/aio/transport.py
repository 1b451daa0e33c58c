"""The functions of grpc.aio that the client uses. `quire_client.sync.transport` has the same for synchronous gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

from quire_client.channel import HEALTH_METHOD, channel_options, health_request
from quire_client.errors import Cancelled, QuireError, client_closed, error_from_rpc, unanswered
from quire_client.retry import PROBE_TIMEOUT_S
from quire_client.targets import TargetRing

if TYPE_CHECKING:
    from quire.v1.inference_pb2_grpc import AdminServiceAsyncStub, InferenceServiceAsyncStub

T = TypeVar("T")

__all__ = ["AsyncGateways", "Call", "Flag", "Gateway", "in_thread", "open_channel", "read_event", "sleep"]


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
    health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

    @classmethod
    def on(cls, channel: grpc.aio.Channel) -> Self:
        return cls(
            channel, InferenceServiceStub(channel), AdminServiceStub(channel), channel.unary_unary(HEALTH_METHOD)
        )


class AsyncGateways:
    """The gateways of one client; `ring` records which of them work. Calls raise QuireErrors."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], metadata: tuple[tuple[str, str], ...]) -> None:
        self._gateways = [Gateway.on(channel) for channel in channels]
        self._metadata = metadata
        self.ring = TargetRing(len(channels))
        self.raw = self._gateways[0].stub
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._gateways)

    async def close(self) -> None:
        self.is_closed = True
        for gateway in self._gateways:
            await gateway.channel.close()

    async def unary(
        self,
        target: int,
        method: Callable[[Gateway], Callable[..., Awaitable[T]]],
        request: Any,
        timeout_s: float | None,
    ) -> T:
        """Call a unary method on one gateway."""
        with _typed_errors():
            return await method(self._gateways[target])(request, timeout=timeout_s, metadata=self._metadata)

    def open_stream(self, target: int, request: pb.GenerateRequest | pb.ResumeRequest, timeout_s: float | None) -> Call:
        """Start Generate or Resume on one gateway."""
        stub = self._gateways[target].stub
        with _typed_errors():
            if isinstance(request, pb.ResumeRequest):
                return stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
            return stub.Generate(request, timeout=timeout_s, metadata=self._metadata)

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


class Flag(asyncio.Event):
    """An event with a bounded wait."""

    async def wait_for(self, timeout_s: float) -> None:
        """Wait until the flag is set, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), timeout_s)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, security_options: list[tuple[str, Any]]
) -> grpc.aio.Channel:
    options = [*channel_options(target), *security_options]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function without blocking the event loop."""
    return await asyncio.to_thread(function)


async def read_event(call: Call, request_id: str) -> pb.GenerateResponse | None:
    """The next event of a stream; None at its end."""
    with _typed_errors(request_id):
        event = await call.read()
    return event if isinstance(event, pb.GenerateResponse) else None


@contextlib.contextmanager
def _typed_errors(request_id: str = "") -> Iterator[None]:
    """Turn the exceptions of a grpc.aio call into QuireErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error, request_id) from None
    except grpc.aio.UsageError:  # a closed channel
        raise client_closed() from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc.aio also raises CancelledError for a cancelled call. This task itself was not cancelled.
        raise Cancelled("the call was cancelled", request_id=request_id) from None
