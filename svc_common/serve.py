"""Run one gRPC service: health, reflection, errors, drain on SIGTERM, clean exit.

server = GrpcServer(listen="0.0.0.0:50051", service_names=[...])
add_FooServicer_to_server(Foo(), server.grpc)
await server.start()                  # port is bound: server.address
server.set_serving(True)
await server.run_until_stopped(drain) # SIGTERM or SIGINT: NOT_SERVING, drain(), stop
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import uvloop
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from svc_common.calls import Admit, ErrorInterceptor, OnCall
from svc_common.channels import (
    MAX_MESSAGE_BYTES,
    PUBLIC_PINGS,
    SCHEDULER_PINGS,
    ConnectionLimits,
    Pings,
    ServiceChannel,
    raise_file_limit,
)
from svc_common.errors import NotFoundError
from svc_common.memory import Intake
from svc_common.tasks import cancel

log = logging.getLogger(__name__)
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Implements Check, List and Watch. All services of a process have one status, NOT_SERVING at first.

    Unlike grpc_health's servicer, `set` never waits for a watcher that does not read, and a watcher that leaves does
    not end the notifications of others.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset(("", *service_names))
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def set(self, is_serving: bool) -> None:
        """Set the status and notify all watchers."""
        self._is_serving = is_serving
        self._notify()

    def close(self) -> None:
        """End all Watch streams after they have sent the status, so that they do not delay the exit of the process."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The current status. Raises NotFoundError for a service that this process does not have."""
        if request.service not in self._names:
            known = ", ".join(sorted(name for name in self._names if name))
            raise NotFoundError(f"unknown service {request.service[:200]!r}; known services: {known}", field="service")
        return self._response(request.service)

    async def List(self, request: bytes, context: Context) -> bytes:
        """The status of every service, as the bytes of a HealthListResponse, which older packages do not have."""
        return b"".join(_pair(name, self._response(name)) for name in sorted(self._names))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current status and each change; SERVICE_UNKNOWN for a service that this process does not have."""
        last = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response.status != last:
                last = response.status
                yield response
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        if service not in self._names:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if self._is_serving else response.NOT_SERVING)


def _pair(service: str, response: health_pb2.HealthCheckResponse) -> bytes:
    """An entry of the map `statuses`: field 1 is the key, field 2 the value. It is shorter than 128 bytes."""
    key: bytes = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    value: bytes = response.SerializeToString()
    return bytes([0x0A, len(key) + 2 + len(value)]) + key + bytes([0x12, len(value)]) + value


REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
ONLY_IDENTITY = 1 << 0  # bit set of compression algorithms with only GRPC_COMPRESS_NONE

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),  # otherwise a second server could bind the same port without an error
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping this often, also during a long prefill. More pings end the connection (too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    *PUBLIC_PINGS.options().items(),
]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *SCHEDULER_PINGS.options().items(),
    # A restarted peer is back soon, so do not wait minutes before reconnecting.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # peers are inside the cluster; http_proxy is for what is outside
]


def open_channel(target: str) -> grpc.aio.Channel:
    """A plaintext channel between Quire's services, with their keepalive and message limits."""
    return ServiceChannel(grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS))


class _Loop(uvloop.Loop):
    """uvloop with asyncio's clock: uvloop's own clock counts milliseconds and does not advance while callbacks run."""

    def time(self) -> float:
        return time.monotonic()


def run_service(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for a service, tuned for cheap messages (docs/adr/0014-when-bytes-leave-a-process.md).

    Uses uvloop. `svc_common` selects gRPC's older poller: per message it wakes one thread before the event loop, while
    the event engine wakes four.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


def settle_gc() -> None:
    """Make garbage collections rare and short, because each one pauses every stream.

    Modules, code and a loaded model live as long as the process, so collections skip them. Most objects of requests and
    steps are freed by their reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _register_nothing(service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
    """Does nothing."""


class BindError(RuntimeError):
    """The server cannot listen on the address."""


class GrpcServer:
    """A grpc.aio server with health and reflection. Owns the process's signal handlers while it runs.

    `credentials`: TLS; None is plaintext. `max_receive_bytes` limits a message before and after decompression,
    `max_bytes` the messages of some methods. Without `accepts_compression` a compressed request is refused with
    UNIMPLEMENTED; Quire's own services never compress. `on_call`, `admit` and `intake`: see `ErrorInterceptor`.
    """

    def __init__(
        self,
        *,
        listen: str,
        service_names: Iterable[str],
        credentials: grpc.ServerCredentials | None = None,
        connections: ConnectionLimits | None = None,
        pings: Pings = PUBLIC_PINGS,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        max_bytes: Mapping[str, int] | None = None,
        accepts_compression: bool = False,
        has_reflection: bool = True,
        on_call: OnCall | None = None,
        admit: Admit | None = None,
        intake: Intake | None = None,
    ) -> None:
        self._intake, intake = intake, intake or Intake()
        intake.max_message_bytes = max_receive_bytes
        errors = ErrorInterceptor(on_call=on_call, max_bytes=max_bytes, admit=admit, intake=intake)
        self.rpc = errors.stats
        self.set_trailers = errors.set_trailers
        options = dict(SERVER_OPTIONS) | (connections or ConnectionLimits()).options() | pings.options()
        options["grpc.max_receive_message_length"] = max_receive_bytes
        if not accepts_compression:
            options["grpc.compression_enabled_algorithms_bitset"] = ONLY_IDENTITY
        self.grpc = grpc.aio.server(interceptors=[errors], options=list(options.items()))
        # Generated code also registers each method with gRPC's core. The server then waits for the next call with one
        # task per method: 50 us per call with 13 methods. Handlers that are found by name need no such tasks.
        self.grpc.add_registered_method_handlers = _register_nothing  # type: ignore[method-assign]
        self.stopping = asyncio.Event()
        self.is_serving = False
        self._listen = listen
        self._credentials = credentials
        names = list(service_names)
        self._health = HealthServicer((*names, health.SERVICE_NAME))
        self.address = ""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        listing: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "List": grpc.unary_unary_rpc_method_handler(self._health.List)
        }
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, listing),))
        if has_reflection:
            self._add_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1))

    def _add_reflection(self, names: Sequence[str]) -> None:
        """Reflection under both of its names. The package has v1alpha only; the messages of v1 are the same."""
        text = str(descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
        v1 = text_format.Parse(text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
        descriptor_pool.Default().AddSerializedFile(v1.SerializeToString(deterministic=True))
        reflection.enable_server_reflection(names, self.grpc)
        info = grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": info})
        self.grpc.add_generic_rpc_handlers((handler,))

    async def start(self) -> str:
        """Bind and accept calls. Health is NOT_SERVING until `set_serving`. Returns host:port. Raises BindError."""
        host = self._listen.rpartition(":")[0]
        try:
            port = self._bind()
        except RuntimeError as error:
            raise BindError(f"cannot listen on {self._listen}: {error}") from None
        self.address = f"{host}:{port}"
        await self.grpc.start()
        return self.address

    def _bind(self) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(self._listen)
        return self.grpc.add_secure_port(self._listen, self._credentials)

    def set_serving(self, is_serving: bool) -> None:
        """Set the health status, which load balancers follow."""
        self.is_serving = is_serving
        self._health.set(is_serving)

    async def run_until_stopped(self, drain: Callable[[], Awaitable[None]], *, grace_s: float = 5.0) -> None:
        """Wait for SIGTERM, SIGINT or `stopping`. Then set NOT_SERVING, await `drain()`, and stop; open calls get
        `grace_s`.

        A second signal skips the drain.
        """
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.stopping.set)
        trimming = None if self._intake is None else asyncio.create_task(self._intake.keep_trimmed())
        await self.stopping.wait()
        if trimming is not None:
            await cancel(trimming)
        self.set_serving(False)
        log.info("draining; a second signal stops the process at once")
        hurried = asyncio.Event()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, hurried.set)
        await _first_of(drain(), hurried.wait())
        self._health.close()
        await _first_of(self.grpc.stop(0 if hurried.is_set() else grace_s), hurried.wait())
        await self.grpc.stop(0)
        log.info("stopped")


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await cancel(*pending)
    for task in done:
        if task.exception() is not None:
            log.error("drain failed", exc_info=task.exception())
