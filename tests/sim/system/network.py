"""gRPC without sockets: calls that look like grpc.aio's to both ends, over links that lose, delay and reset.

Messages of one stream keep their order; different streams do not wait for each other. A link between two processes can
be blocked (everything waits, as with TCP) and healed. It can also be torn: each end then learns of it at its own time,
or only by keepalive. Messages are serialized, so the ends share no objects by accident.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from grpc.aio import EOF, AioRpcError, Metadata

from svc_common.calls import ErrorInterceptor
from tests.sim.system.virtual_loop import PROCESS, Process, VirtualLoop

KEEPALIVE_S = 40.0  # CHANNEL_OPTIONS: a ping every 30 s, an answer within 10 s
CONNECT_TIMEOUT_S = 20.0
WINDOW = 64  # messages of one stream that may be unread before a write waits

Handler = grpc.RpcMethodHandler
OK = grpc.StatusCode.OK
CANCEL = object()
HALF_CLOSE = object()


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call. `is_torn`: its connection was reset, and unread messages may be lost."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    is_torn: bool = False


LOST = Status(grpc.StatusCode.UNAVAILABLE, "keepalive watchdog timeout", is_torn=True)


class Inbox:
    """The messages that have arrived at one end of a call. One reader at a time."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.num_sent = 0  # not read yet, including those in transit
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until a message may have arrived."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> Any:
        item = self.items.popleft()
        self.num_sent -= 1
        self.open_window()
        return item

    def open_window(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def room(self, is_over: Callable[[], bool]) -> None:
        """For the sender: wait until less than a window is unread, or until the reader is gone."""
        while self.num_sent >= WINDOW and not is_over():
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None


@dataclass(slots=True)
class Link:
    """The link between two processes, by name."""

    is_blocked: bool = False
    held: list[tuple[Call, str, Any]] = field(default_factory=list)


class Network:
    """All servers, links and calls."""

    def __init__(self, loop: VirtualLoop, rng: Random, *, delay_s: float = 0.0005) -> None:
        self.loop = loop
        self.rng = rng
        self.delay_s = delay_s
        self.servers: dict[str, Server] = {}
        self.away: set[str] = set()  # addresses of hosts that are gone: not even a refusal comes back
        self.silent: set[Process] = set()  # processes whose hosts are gone
        self.calls: dict[Call, None] = {}
        self.num_messages = 0
        self.on_write: Callable[[Call, Any], None] = lambda call, message: None
        self.on_answer: Callable[[Call, bytes], None] = lambda call, data: None
        self.on_response: Callable[[Call, bytes], list[bytes]] = lambda call, data: [data]
        self.processes: dict[str, Process] = {}  # the latest life of each
        self._links: dict[frozenset[str], Link] = {}

    def channel(self, target: str) -> Channel:
        """Opens the channels of the running process."""
        process = PROCESS.get()
        if process is None:
            raise RuntimeError("only a process has channels")
        return Channel(self, process, target)

    def link(self, one: str, other: str) -> Link:
        return self._links.setdefault(frozenset((one, other)), Link())

    def delay(self) -> float:
        return self.delay_s * (0.2 + 1.6 * self.rng.random())

    # -- what happens to links ----------------------------------------------------------------------------------------

    def block(self, one: str, other: str) -> None:
        """Lose packets: everything waits for retransmission."""
        self.link(one, other).is_blocked = True

    def heal(self, one: str, other: str, *, tears: bool) -> None:
        """Let packets through again: waiting messages arrive, or find the connection reset."""
        link = self.link(one, other)
        link.is_blocked = False
        held, link.held = link.held, []
        if tears:
            self.tear(one, other)
        for call, end, item in held:
            call.transmit(end, item)

    def tear(self, one: str, other: str, *, hides_s: float = 0.0) -> None:
        """Reset the connection; one of the ends may learn of it `hides_s` later."""
        names = frozenset((one, other))
        for call in [c for c in self.calls if c.server is not None and c.names == names]:
            late = self.rng.choice(("client", "server"))
            call.tear(client_s=self.delay() + hides_s * (late == "client"), server_s=hides_s * (late == "server"))

    def lose(self, process: Process, *, is_silent: bool) -> None:
        """A process was killed: its kernel resets its connections, unless its host is gone too."""
        for address in [a for a, server in self.servers.items() if server.process is process]:
            del self.servers[address]
            if is_silent:
                self.away.add(address)
        if is_silent:
            self.silent.add(process)
        for call in list(self.calls):
            learns_s = KEEPALIVE_S if is_silent else self.delay()
            if call.client is process:
                call.tear(client_s=None, server_s=learns_s)
            elif call.server is not None and call.server.process is process:
                call.tear(client_s=learns_s, server_s=None)


class Server:
    """A process that serves calls at an address."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.handlers: dict[str, Handler] = {}
        self.is_serving = True
        self.address = address
        network.servers[address] = self
        network.away.discard(address)

    # called by `add_..._to_server`
    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Not needed: `add_registered_method_handlers` has them all."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        interceptor = ErrorInterceptor()
        for name, handler in handlers.items():
            path = f"/{service}/{name}"
            self.handlers[path] = _intercepted(interceptor, path, handler)


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: tuple[()] = ()


def _intercepted(interceptor: ErrorInterceptor, path: str, handler: Handler) -> Handler:
    async def found(details: Any) -> Handler:
        return handler

    work = interceptor.intercept_service(found, _Details(path))  # type: ignore[arg-type]
    try:
        work.send(None)
    except StopIteration as result:
        return result.value
    raise RuntimeError("the interceptor waits for something")


class Channel:
    """The part of grpc.aio.Channel that generated stubs and our services use."""

    def __init__(self, network: Network, process: Process, target: str) -> None:
        self._network, self._process, self._target = network, process, target
        self._calls: list[Call] = []
        self._connection: Server | None = None

    def connection(self) -> Server | None:
        """The server that the channel believes to be connected to; only a reset corrects it."""
        server = self._connection
        if server is not None and server.process.is_dead and server.process not in self._network.silent:
            self._connection = None
        return self._connection

    def connected(self, server: Server | None) -> None:
        self._connection = server

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    def _open(self, path: str, encode: Any, decode: Any, timeout: float | None, kind: str) -> Call:
        self._calls = [c for c in self._calls if not c.done()]
        for other in self._calls:
            if other._is_torn:
                other._meet_strangers("server")
        call = Call(self._network, self._process, self._target, path, encode, decode, timeout, kind)
        call.channel = self
        self._calls.append(call)
        return call

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def start(request: Any, *, timeout: float | None = None, **_: Any) -> Call:
            call = self._open(path, request_serializer, response_deserializer, timeout, "unary_unary")
            call.send_only(request)
            return call

        return start

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def start(request: Any, *, timeout: float | None = None, **_: Any) -> Call:
            call = self._open(path, request_serializer, response_deserializer, timeout, "unary_stream")
            call.send_only(request)
            return call

        return start

    def stream_unary(self, path: str, *_: Any, **__: Any) -> Any:
        def start(*_: Any, **__: Any) -> Call:
            raise NotImplementedError(f"no simulation calls {path}")

        return start

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def start(request_iterator: Any = None, *, timeout: float | None = None, **_: Any) -> Call:
            call = self._open(path, request_serializer, response_deserializer, timeout, "stream_stream")
            if request_iterator is not None:
                call.feed(request_iterator)
            return call

        return start


class Call:
    """One RPC: the client's grpc.aio call object and its transport."""

    def __init__(
        self,
        network: Network,
        client: Process,
        target: str,
        path: str,
        encode: Any,
        decode: Any,
        timeout: float | None,
        kind: str,
    ) -> None:
        self.network, self.client, self.target, self.path, self.kind = network, client, target, path, kind
        self.server: Server | None = None
        self.channel: Channel
        self.answered: int = 0  # for observers
        self._encode, self._decode = encode, decode
        self.to_server, self.to_client = Inbox(), Inbox()
        self._status: Status | None = None
        self._is_torn = False
        self._unaware = ""  # the end that does not know yet that the connection is gone
        self._last = {"client": 0.0, "server": 0.0}
        self._callbacks: list[Callable[[Any], object]] = []
        self._feeder: asyncio.Task[None] | None = None
        self._side: ServerSide | None = None
        self._has_side_ended = False
        self._timer: asyncio.TimerHandle | None = None
        loop = network.loop
        self.deadline = None if timeout is None else loop.time() + timeout
        self._gives_up_at = loop.time() + CONNECT_TIMEOUT_S
        if client.is_dead:
            self._status = Status(grpc.StatusCode.UNAVAILABLE, "dead")
            return
        network.calls[self] = None
        if timeout is not None:
            self._timer = client.call_later(max(0.0, timeout), self._time_out)
        loop.call_later(network.delay(), self._dial)

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.client.name, self.server.process.name if self.server is not None else ""))

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code is grpc.StatusCode.CANCELLED

    # -- carrying -----------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        """The kernels' part of a connection: no process has to run for it."""
        if self.client.is_dead or self.done():
            return self._forget()
        server = self.channel.connection() or self.network.servers.get(self.target)
        if server is None and self.target in self.network.away and self.network.loop.time() < self._gives_up_at:
            self.network.loop.call_later(0.2, self._dial)  # no answer, not even a refusal
            return None
        if server is not None and server.process.is_dead:
            self.server, self._is_torn, self._unaware = server, True, "client"  # the channel does not know yet
            self._meet_strangers("server")
            self.network.loop.call_later(KEEPALIVE_S, self.deliver, "client", LOST, context=self.client.context)
            return None
        if server is None:
            refused = Status(grpc.StatusCode.UNAVAILABLE, "connection refused", is_torn=True)
            self.network.loop.call_soon(self.deliver, "client", refused, context=self.client.context)
            return None
        if self.network.link(self.client.name, server.process.name).is_blocked:
            self.network.loop.call_later(0.2, self._dial)
            return None
        self.server = server
        self.channel.connected(server)
        self._last["server"] = self.network.loop.time() + self.network.delay()
        self.network.loop.call_at(self._last["server"], self._accept, context=server.process.context)
        for item in list(self.to_server.items):
            self.transmit("server", item)
        self.to_server.items.clear()
        return None

    def _accept(self) -> None:
        if self.server is not None and not self._is_torn:
            self._side = ServerSide(self, self.server)

    def _post(self, end: str, item: Any) -> None:
        """Send an item from one end to the other."""
        sender = self.client if end == "server" else self.server.process if self.server is not None else None
        if sender is None or not sender.is_dead:
            inbox = self.to_server if end == "server" else self.to_client
            inbox.num_sent += 1
            self.transmit(end, item)

    def transmit(self, end: str, item: Any) -> None:
        """Transport an item to one end of the call: 'client' or 'server'."""
        if self._is_torn:
            self._meet_strangers(end)
            return
        if self.server is None:
            self.to_server.items.append(item)  # is lost with the connection
            return
        link = self.network.link(self.client.name, self.server.process.name)
        if link.is_blocked:
            link.held.append((self, end, item))
            return
        self.network.num_messages += 1
        loop = self.network.loop
        receiver = self.client if end == "client" else self.server.process
        at = self._last[end] = max(self._last[end] + 1e-6, loop.time() + self.network.delay())
        loop.call_at(at, self.deliver, end, item, context=receiver.context)

    def deliver(self, end: str, item: Any) -> None:
        """Hand an item over in the receiver's process."""
        if end == "server":
            if item is CANCEL:
                self._cancel_side()
            else:
                self.to_server.put(item)
            return
        if not isinstance(item, Status):
            self.to_client.put(item)
        elif item.is_torn and self.network.rng.random() < 0.5:
            self.to_client.items.clear()
            self._end(item)
        elif self.to_client.items:
            self.to_client.put(item)
        else:
            self._end(item)

    def tear(self, *, client_s: float | None, server_s: float | None) -> None:
        """Reset the connection; each end learns of it after these seconds, or never (None)."""
        if self._is_torn:
            return
        self._is_torn = True
        self._unaware = "client" if (client_s or 0.0) > (server_s or 0.0) else "server"
        loop = self.network.loop
        if client_s is not None and not self.done():
            status = Status(grpc.StatusCode.UNAVAILABLE, "connection reset", is_torn=True)
            at = max(self._last["client"] + 1e-6, loop.time() + client_s)
            loop.call_at(at, self.deliver, "client", status, context=self.client.context)
        if server_s is not None and self.server is not None:
            at = max(self._last["server"] + 1e-6, loop.time() + server_s)
            loop.call_at(at, self._cancel_side, context=self.server.process.context)
        self._has_side_ended = self._has_side_ended or server_s is None
        if client_s is None:
            self.network.calls.pop(self, None)

    def _meet_strangers(self, end: str) -> None:
        """Answer a packet of a connection that the receiver no longer knows with a reset, unless the receiver's host is
        gone.
        """
        if self.server is None:
            return
        sender, receiver = ("client", self.server.process) if end == "server" else ("server", self.client)
        if self._unaware not in (sender, "") or self.network.processes[receiver.name].is_dead:
            return
        for call in [c for c in self.network.calls if c.server is self.server and c.client is self.client]:
            if call._is_torn and call._unaware in (sender, ""):
                call._learn(sender)

    def _learn(self, end: str) -> None:
        if self.server is None:
            return
        loop, delay_s = self.network.loop, 2 * self.network.delay()
        if end == "server":
            loop.call_later(delay_s, self._cancel_side, context=self.server.process.context)
        elif not self.done():
            status = Status(grpc.StatusCode.UNAVAILABLE, "connection reset", is_torn=True)
            loop.call_later(delay_s, self.deliver, "client", status, context=self.client.context)

    def _cancel_side(self) -> None:
        if self._side is not None:
            self._side.cancel()

    def side_ended(self, status: Status) -> None:
        """The server's handler has ended."""
        self._has_side_ended = True
        self._post("client", status)
        self.to_server.open_window()
        self._forget()

    def _forget(self) -> None:
        if self.done() and (self._has_side_ended or self._side is None):
            self.network.calls.pop(self, None)

    # -- the client's end ---------------------------------------------------------------------------------------------

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if status.is_torn:
            self.channel.connected(None)
        if self._timer is not None:
            self._timer.cancel()
        if self._feeder is not None:
            self._feeder.cancel()
        self.to_client.wake()
        self.to_server.open_window()
        for callback in self._callbacks:
            callback(self)
        self._forget()

    def _time_out(self) -> None:
        if not self.done():
            self._post("server", CANCEL)
            self._end(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def cancel(self) -> bool:
        if self.done():
            return False
        self._post("server", CANCEL)
        self._end(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - self.network.loop.time())

    def send_only(self, request: Any) -> None:
        self.network.on_write(self, request)
        self._post("server", self._encode(request) if self._encode else request)
        self._post("server", HALF_CLOSE)

    def feed(self, requests: Any) -> None:
        self._feeder = asyncio.get_running_loop().create_task(self._feed(requests))

    async def _feed(self, requests: Any) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (AioRpcError, asyncio.InvalidStateError):
            return

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self.to_server.room(lambda: self.done() or self._has_side_ended)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            self._raise_for_status()
        self.network.on_write(self, request)
        self._post("server", self._encode(request) if self._encode else request)

    async def done_writing(self) -> None:
        if not self.done():
            self._post("server", HALF_CLOSE)

    async def read(self) -> Any:
        while not self.to_client.items and self._status is None:
            await self._wait()
        if self.cancelled():
            raise asyncio.CancelledError
        if self.to_client.items:
            item = self.to_client.take()
            if not isinstance(item, Status):
                self.network.on_answer(self, item)
                return self._decode(item) if self._decode else item
            self._end(item)
        self._raise_for_status()
        return EOF

    async def _wait(self) -> None:
        try:
            await self.to_client.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        status = self._status
        assert status is not None
        if status.code is grpc.StatusCode.CANCELLED and status.details.startswith("Locally"):
            raise asyncio.CancelledError
        if status.code is not OK:
            raise AioRpcError(status.code, Metadata(), Metadata(*status.trailing), details=status.details)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        response = await self.read()
        if response is EOF:
            raise AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details="no response")
        await self.read()
        return response

    async def _ended(self) -> Status:
        while self._status is None:
            if self.to_client.items and isinstance(self.to_client.items[0], Status):
                self._end(self.to_client.take())
            else:
                await self._wait()
        return self._status

    async def code(self) -> grpc.StatusCode:
        return (await self._ended()).code

    async def details(self) -> str:
        return (await self._ended()).details

    async def trailing_metadata(self) -> Metadata:
        return Metadata(*(await self._ended()).trailing)

    async def initial_metadata(self) -> Metadata:
        return Metadata()

    async def wait_for_connection(self) -> None:
        """Returns at once: reads notice a broken connection."""


class ServerSide:
    """A running handler and its ServicerContext."""

    def __init__(self, call: Call, server: Server) -> None:
        self._call = call
        self._status = Status(OK)
        self._callbacks: list[Callable[[Any], object]] = []
        self._is_cancelled = self._is_done = False
        self._handler = server.handlers.get(call.path)
        self._task = call.network.loop.create_task(self._handle())
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """The client is gone: cancel the handler."""
        self._is_cancelled = True
        self._call.to_client.open_window()
        self._task.cancel()

    async def _handle(self) -> None:
        handler = self._handler
        if handler is None:
            self._status = Status(grpc.StatusCode.UNIMPLEMENTED, f"no method {self._call.path}")
            return
        requests = self._requests = self._read_all(handler)
        try:
            if handler.response_streaming:
                await handler.stream_stream(requests, self)
            else:
                response = await handler.stream_unary(requests, self)
                await self._write(handler.response_serializer(response))
        except grpc.aio.AbortError:
            return

    async def _write(self, data: bytes) -> None:
        call = self._call
        await call.to_client.room(lambda: self._is_cancelled)
        for part in call.network.on_response(call, data):
            call._post("client", part)

    async def _read_all(self, handler: Handler) -> AsyncIterator[Any]:
        inbox = self._call.to_server
        while True:
            while not inbox.items:
                await inbox.wait()
            item = inbox.take()
            if item is HALF_CLOSE:
                return
            yield handler.request_deserializer(item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._is_done = True
        if task.cancelled():
            self._status = Status(grpc.StatusCode.CANCELLED, "the server cancelled the call")
        elif (error := task.exception()) is not None:
            self._status = Status(grpc.StatusCode.UNKNOWN, repr(error))
            self._call.network.loop.fail(error)
        for callback in self._callbacks:
            callback(self)
        self._call.side_ended(self._status)

    # -- grpc.aio.ServicerContext -------------------------------------------------------------------------------------

    async def read(self) -> Any:
        return await anext(self._requests, EOF)

    async def write(self, response: Any) -> None:
        if self._handler is not None:
            await self._write(self._handler.response_serializer(response))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._status = Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._is_cancelled

    def done(self) -> bool:
        return self._is_done

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return self._call.client.name
