"""A fake scheduler whose answers are set by the test, and a gateway in front of it, both over real gRPC."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
import xxhash
from quire.internal.v1 import scheduler_pb2 as pb
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire.v1 import inference_pb2 as public
from quire.v1 import types_pb2 as types
from quire.v1.inference_pb2_grpc import (
    AdminServiceStub,
    InferenceServiceStub,
    add_AdminServiceServicer_to_server,
    add_InferenceServiceServicer_to_server,
)
from quire.v1.session_pb2_grpc import SessionServiceStub, add_SessionServiceServicer_to_server

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.foreign.services import add_services
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.process.ports import MAX_RECEIVE_BYTES
from gateway_svc.request.models import BundleCache
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from gateway_svc.request.validation import RequestLimits
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.routes import ModelRoutes
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from gateway_svc.servicer import SessionServicer, make_servicer
from gateway_svc.text.chat_output import ParserNames
from svc_common.calls import Admit
from svc_common.channels import ConnectionLimits
from svc_common.memory import Intake, MemoryLimit
from svc_common.observe.inspection import Inspector
from svc_common.serve import GrpcServer, open_channel
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

PATIENCE_S = 10.0
CALL_TIMEOUT_S = 60.0
LENGTH, STOP, EOS, ABORTED = (
    types.FINISH_REASON_LENGTH,
    types.FINISH_REASON_STOP,
    types.FINISH_REASON_EOS,
    types.FINISH_REASON_ABORTED,
)


def u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def digest_of(ids: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(u32(ids))


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; fails after a minute."""
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110  (the state belongs to other tasks and has no event to await)
            await asyncio.sleep(0.002)


async def rest(call: Any) -> list[public.GenerateResponse]:
    """The remaining events of a call."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


def make_bundle(files: dict[str, bytes] | None = None) -> bytes:
    files = bundle_files(byte_level(), chat_template="{{ messages[0].content }}") if files is None else files
    return types.ModelBundle(
        files=[types.BundleFile(name=name, data=data) for name, data in sorted(files.items())]
    ).SerializeToString(deterministic=True)


def make_info(bundle: bytes = b"", **changes: Any) -> types.ModelInfo:
    facts: dict[str, Any] = {
        "model": "demo",
        "revision": "r1",
        "max_model_len": 256,
        "vocab_size": 500,
        "eos_token_ids": [1],
        "block_size": 16,
        "max_num_blocks": 64,
        "max_num_seqs": 8,
        "determinism": types.DETERMINISM_BEST_EFFORT,
        "dtype": "float32",
        "bundle_digest": xxhash.xxh3_128_digest(bundle) if bundle else b"",
    }
    return types.ModelInfo(**{**facts, **changes})


ADAPTER_DIGEST = bytes(range(16))


class FakeScheduler(SchedulerServiceServicer):
    """Accepts every request unless `refusals` has an entry. Tests send the tokens and the finished samples."""

    def __init__(self, info: types.ModelInfo | None, bundle: bytes = b"") -> None:
        self.info = info
        self.bundle = bundle
        self.submits: list[pb.Submit] = []
        self.cancels: list[pb.Cancel] = []
        self.refusals: deque[pb.Refusal | None] = deque()
        self.on_submit: Callable[[pb.Submit], None] = lambda submit: None
        self.answers_cancels = True
        self.answers_submits = True
        self.num_attached = 0
        self.num_bundle_calls = 0
        self.gives_bundle = asyncio.Event()  # a test clears it to block GetBundle
        self.gives_bundle.set()
        self.heartbeat_interval_s = 0.0
        self.ready_workers = 2
        self.scheduler_epoch = 1
        self.num_heartbeats = 0
        self.takes_batches = False
        self.batch_sizes: list[int] = []
        self.reports_queued_handles = False  # in Deltas instead of a SubmitReply each
        self.workers: list[public.WorkerInfo] = []
        self.released: list[pb.ReleaseWorkerRequest] = []
        self.asked_to_abort: list[str] = []
        self.elsewhere: set[str] = set()  # requests of other gateways
        self._outbox: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        """Listen; after a `stop`, on the same port again."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_SchedulerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def say(self, **message: Any) -> None:
        self._outbox.put_nowait(pb.AttachResponse(**message))

    def hang_up(self) -> None:
        """End the Attach stream; the server keeps running."""
        self._outbox.put_nowait(None)

    def welcome(self) -> None:
        self.say(
            welcome=pb.Welcome(
                scheduler_epoch=self.scheduler_epoch,
                info=self.info,
                ready_workers=self.ready_workers,
                heartbeat_interval_s=self.heartbeat_interval_s,
                takes_batches=self.takes_batches,
            )
        )

    def send(self, handle: int, ids: Sequence[int], *, offset: int = 0, sample: int = 0) -> None:
        """Send tokens of one sample in one Deltas message."""
        self.say(deltas=self._columns(handle, ids, offset, sample))

    def finish(
        self,
        handle: int,
        reason: int = LENGTH,
        *,
        ids: Sequence[int] = (),
        offset: int = 0,
        sample: int = 0,
        **facts: Any,
    ) -> None:
        """Send the end of a sample, with its last tokens in the same message."""
        usage = types.Usage(cached_tokens=3, recomputed_tokens=2)
        deltas = self._columns(handle, ids, offset, sample)
        deltas.finished.add(handle=handle, sample_index=sample, reason=reason, usage=usage, **facts)  # type: ignore[arg-type]
        self.say(deltas=deltas)

    def _columns(self, handle: int, ids: Sequence[int], offset: int, sample: int) -> pb.Deltas:
        n = len(ids)
        return pb.Deltas(
            handles=u32([handle] * n),
            sample_indices=u32([sample] * n) if sample else b"",
            offsets=u32(range(offset, offset + n)),
            token_ids=u32(ids),
        )

    def play(self, ids: Sequence[int], reason: int = LENGTH) -> None:
        """Answer every sample of all later requests with these tokens."""

        def on_submit(submit: pb.Submit) -> None:
            have = {s.index: s for s in submit.continuation.samples}
            for sample in range(submit.sampling.n):
                if sample in have and have[sample].finished:
                    continue
                start = len(have[sample].output_token_ids) if sample in have else 0
                self.finish(submit.handle, reason, ids=ids[start:], offset=start, sample=sample)

        self.on_submit = on_submit

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        hello = await anext(aiter(requests))
        assert hello.hello.protocol_version == 1
        self.num_attached += 1
        self._outbox = asyncio.Queue()
        self.welcome()
        reader = asyncio.create_task(self._read(requests))
        try:
            while (message := await self._outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            if request.HasField("batch"):
                self.batch_sizes.append(len(request.batch.messages))
            for message in request.batch.messages or [request]:
                self._take(message)

    def _take(self, request: pb.AttachRequest) -> None:
        if request.HasField("submit"):
            self._take_submit(request.submit)
        elif request.HasField("heartbeat"):
            self.num_heartbeats += 1
        else:
            self._take_cancel(request.cancel)

    def _take_submit(self, submit: pb.Submit) -> None:
        self.submits.append(submit)
        if not self.answers_submits:
            return
        refusal = self.refusals.popleft() if self.refusals else None
        if refusal is None and self.reports_queued_handles:
            self.say(deltas=pb.Deltas(queued_handles=u32([submit.handle])))
        else:
            self.say(submit_reply=pb.SubmitReply(handle=submit.handle, refusal=refusal))
        if refusal is None:
            self.on_submit(submit)

    def _take_cancel(self, cancel: pb.Cancel) -> None:
        self.cancels.append(cancel)
        if not self.answers_cancels:
            return
        n = next(s.sampling.n for s in self.submits if s.handle == cancel.handle)
        samples = [cancel.sample_index] if cancel.HasField("sample_index") else range(n)
        for sample in samples:
            self.finish(cancel.handle, cancel.reason, sample=sample)

    async def GetBundle(self, request: pb.GetBundleRequest, context: Any) -> AsyncIterator[pb.GetBundleResponse]:
        self.num_bundle_calls += 1
        await self.gives_bundle.wait()
        for start in range(0, len(self.bundle), 1000):
            yield pb.GetBundleResponse(data=self.bundle[start : start + 1000])

    async def GetSchedulerStatus(self, request: Any, context: Any) -> pb.GetSchedulerStatusResponse:
        return pb.GetSchedulerStatusResponse(
            status=public.SchedulerStatus(
                address="inside", model=self.info.model if self.info else "", num_waiting=4, workers=self.workers
            )
        )

    async def AbortRequests(self, request: pb.AbortRequestsRequest, context: Any) -> pb.AbortRequestsResponse:
        self.asked_to_abort.extend(request.request_ids)
        return pb.AbortRequestsResponse(aborted_ids=[id_ for id_ in request.request_ids if id_ in self.elsewhere])

    async def AddAdapter(self, request: pb.AddAdapterRequest, context: Any) -> pb.AddAdapterResponse:
        """Announce the adapter by the stream, later than the answer of this call arrives."""
        assert self.info is not None
        info = types.ModelInfo()
        info.CopyFrom(self.info)
        info.adapters.add(name=request.name, digest=ADAPTER_DIGEST)
        self.info = info
        asyncio.get_running_loop().call_later(0.05, self.welcome)
        return pb.AddAdapterResponse(adapter=public.Adapter(name=request.name, digest=ADAPTER_DIGEST.hex()))

    async def ReleaseWorker(self, request: pb.ReleaseWorkerRequest, context: Any) -> pb.ReleaseWorkerResponse:
        self.released.append(request)
        return pb.ReleaseWorkerResponse(num_moved=3)


class TestGateway:
    """The parts of a gateway in this process, and a client channel to it."""

    __test__ = False

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        patience_s: float = PATIENCE_S,
        max_streams: int = 64,
        max_request_bytes: int = 1 << 20,
        memory: MemoryLimit | None = None,
        min_priority: int = -1000,
        reader: Any = None,
        admit: Admit | None = None,
        recorder: Any = None,
        isolates_tenants: bool = False,
        on_call: Any = None,
        limits: Any = None,
        tool_parsers: Sequence[str] = (),
        routes: ModelRoutes | None = None,
    ) -> None:
        options: Any = {"bundles": BundleCache(), "open_channel": open_channel}
        parsers = ParserNames.from_flags(tool_parsers, ())
        self.clients = [
            SchedulerClient(address, gateway_id="test", parsers=parsers, **options) for address in addresses
        ]
        self.dispatcher = Dispatcher(self.clients, patience_s=patience_s)
        self.directory = ModelDirectory(self.clients, routes)
        self.templates = TemplateRenderer()
        self.threads = Threads()
        self.prompts = PromptReaders(self.threads, self.templates)
        self.grammars = GrammarChecker()
        self.servicer = make_servicer(
            self.directory,
            self.dispatcher,
            self.prompts,
            self.grammars,
            OpenStreams(max_streams, max_request_bytes),
            admission=CallAdmission(
                self.directory, requests=RequestLimits(min_priority), keys=limits, isolates_tenants=isolates_tenants
            ),
            reader=reader,
            recorder=recorder,
        )
        self.generation = self.servicer.generation
        self.streams = self.generation.streams
        self._server = GrpcServer(
            listen="127.0.0.1:0",
            service_names=["quire.v1.InferenceService"],
            connections=ConnectionLimits(max_streams=2 * max_streams),
            max_receive_bytes=MAX_RECEIVE_BYTES,
            accepts_compression=True,
            admit=admit,
            intake=Intake(memory),
            on_call=on_call,
        )
        add_InferenceServiceServicer_to_server(self.servicer, self._server.grpc)
        add_SessionServiceServicer_to_server(SessionServicer(self.servicer.generation.sessions), self._server.grpc)
        add_AdminServiceServicer_to_server(
            AdminServicer(self.directory, Inspector("gateway", "test", "", lambda: b"")), self._server.grpc
        )
        add_services("loads", self.servicer, self.directory, self.threads.requests, self._server, is_open=False)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TestGateway:
        self.address = await self._server.start()
        self._tasks = [asyncio.create_task(client.run()) for client in self.clients]
        self.channel = open_channel(self.address)
        self.stub = InferenceServiceStub(self.channel)
        self.sessions = SessionServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.grpc.stop(None)
        self.threads.close()
        await self.grammars.close()
        await self.templates.close()

    async def ready(self) -> TestGateway:
        await until(lambda: all(client.is_ready for client in self.clients))
        return self

    @property
    def num_open(self) -> int:
        return len(self.streams)

    def generate(self, request: public.GenerateRequest | None = None, **options: Any) -> Any:
        """Start a Generate call."""
        if request is None:
            options.setdefault("prompt", public.Prompt(tokens=types.TokenIds(ids=[5, 6, 7])))
            request = public.GenerateRequest(**options)
        return self.stub.Generate(request, timeout=CALL_TIMEOUT_S)

    async def collect(self, request: public.GenerateRequest | None = None, **options: Any) -> Result:
        """All events of a Generate call, with the checks that every stream must pass."""
        return Result([event async for event in self.generate(request, **options)])


class Result:
    """The events of a stream."""

    def __init__(self, events: list[public.GenerateResponse]) -> None:
        self.events = events
        self.accepted = events[0].accepted
        self.chunks = [event.chunk for event in events if event.HasField("chunk")]
        self.finished = {event.finished.index: event.finished for event in events if event.HasField("finished")}
        assert events[0].HasField("accepted")
        assert [event.event_seq for event in events] == list(range(len(events)))

    def ids(self, index: int = 0) -> list[int]:
        return [id_ for chunk in self.chunks if chunk.index == index for id_ in chunk.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def check_offsets(self, index: int = 0, *, start: int = 0, text_start: int = 0) -> None:
        for chunk in (chunk for chunk in self.chunks if chunk.index == index):
            assert (chunk.offset, chunk.text_offset) == (start, text_start)
            start += len(chunk.token_ids)
            text_start += len(chunk.text.encode())
