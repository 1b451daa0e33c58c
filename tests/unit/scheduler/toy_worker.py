"""A worker with a toy model behind the real gRPC service: a token is a function of all tokens of its row.

So a wrong or lost token of a resumed sequence changes every later token.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from quire.v1 import types_pb2
from xxhash import xxh3_128_digest

from svc_common.serve import open_channel

BUNDLE = types_pb2.ModelBundle(files=[types_pb2.BundleFile(name="config.json", data=b"{}")]).SerializeToString()
VOCAB_SIZE = 1000


def next_token(history: list[int], sample_index: int) -> int:
    """The toy model's next token; never 0."""
    return 1 + zlib.crc32(np.array([*history, sample_index], dtype="<u4").tobytes()) % (VOCAB_SIZE - 1)


def expected_tokens(prompt: list[int], count: int, sample_index: int = 0) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, sample_index))
    return history[len(prompt) :]


def make_info(**changes: Any) -> types_pb2.ModelInfo:
    facts: dict[str, Any] = {
        "model": "toy",
        "revision": "r1",
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [0],
        "bundle_digest": xxh3_128_digest(BUNDLE),
        "block_size": 4,
        "determinism": types_pb2.DETERMINISM_EXACT,
        "dtype": "float32",
        "numerics": "cpu, avx2",
        "build": "torch-1",
    }
    return types_pb2.ModelInfo(**(facts | changes))


class ToyWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves on a free port and keeps itself registered until `stop`.

    Clear `gate` to hold answers back. `steps` counts steps, `refusals` collects the errors that ended registrations.
    """

    def __init__(
        self,
        scheduler: str,
        worker_id: str = "w0",
        *,
        epoch: int = 11,
        replaces_revision: bool = False,
        **info: Any,
    ) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self.replaces_revision = replaces_revision
        self.info = make_info(**info)
        self.state = types_pb2.WORKER_STATE_READY
        self.scheduler_epoch = 0
        self.lease_epochs: list[int] = []
        self.num_blocks = 64
        self.gate = asyncio.Event()
        self.gate.set()
        self.steps = self.messages = 0
        self.num_acknowledged = 0
        self.drains = True
        self.has_drained = False
        self.bundle = BUNDLE
        self.refusals: list[grpc.aio.AioRpcError] = []
        self._scheduler = scheduler
        self._rows: dict[int, tuple[list[int], int]] = {}
        self._server = grpc.aio.server()
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""

    async def start(self) -> ToyWorker:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._stay_registered()))
        return self

    async def stop(self) -> None:
        """Stop like a crash: streams break at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.gate.set()
        await self._server.stop(0)

    # -- registration -------------------------------------------------------------------------------------------------

    async def _stay_registered(self) -> None:
        while True:
            async with open_channel(self._scheduler) as channel:
                try:
                    await self._register_once(scheduler_pb2_grpc.SchedulerServiceStub(channel))
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.INTERNAL:  # a write right after the end hides the reason
                        self.refusals.append(error)
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        return
                except asyncio.InvalidStateError:
                    pass
                if self.has_drained:
                    return
                await asyncio.sleep(0.02)

    async def _register_once(self, stub: Any) -> None:
        call = stub.Register()
        try:
            await call.write(self.registration())
            accepted = await call.read()
            while accepted is not grpc.aio.EOF:
                await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=0.05)
                if not call.done():
                    await call.write(self.registration())
                accepted = await call.read()
                self.num_acknowledged += 1
        finally:
            call.cancel()

    def registration(self) -> scheduler_pb2.RegisterRequest:
        capacity = scheduler_pb2.WorkerCapacity(
            degradations=["toys are slow"],
            info=self.info,
            num_blocks=self.num_blocks,
            block_size=self.info.block_size,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            pipeline_depth=2,
        )
        return scheduler_pb2.RegisterRequest(
            worker_id=self.worker_id,
            address=self.address,
            worker_epoch=self.epoch,
            state=self.state,
            capacity=None if self.state == types_pb2.WORKER_STATE_LOADING else capacity,
            replaces_revision=self.replaces_revision,
        )

    # -- service ------------------------------------------------------------------------------------------------------

    async def Lease(self, request: worker_pb2.LeaseRequest, context: Any) -> worker_pb2.LeaseResponse:
        epoch = request.scheduler_epoch or self.scheduler_epoch + 1
        if epoch <= self.scheduler_epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"scheduler_epoch {epoch} is stale")
        self.scheduler_epoch = epoch
        self.lease_epochs.append(epoch)
        self._rows.clear()
        fence = worker_pb2.Fence(scheduler_epoch=epoch, worker_epoch=self.epoch)
        return worker_pb2.LeaseResponse(fence=fence, next_step_id=1)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        if not self.drains:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        self.has_drained = True
        self.state = types_pb2.WORKER_STATE_DRAINING
        await self.gate.wait()
        return worker_pb2.DrainResponse()

    async def GetWorkerBundle(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GetWorkerBundleResponse]:
        for i in range(0, len(self.bundle), 3):
            yield worker_pb2.GetWorkerBundleResponse(data=self.bundle[i : i + 3])

    async def ListBlocks(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.ListBlocksResponse]:
        for message in ():
            yield message

    async def StepStream(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.StepStreamResponse]:
        async for request in requests:
            self.messages += 1
            await self.gate.wait()
            if request.batch.fence.scheduler_epoch != self.scheduler_epoch:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the lease was taken by another scheduler")
            outputs = [self._step(batch) for batch in (request.batch, *request.then)]
            yield worker_pb2.StepStreamResponse(output=outputs[0], then=outputs[1:])

    def _step(self, batch: worker_pb2.StepBatch) -> worker_pb2.StepOutput:
        assert batch.fence.scheduler_epoch == self.scheduler_epoch
        assert batch.fence.worker_epoch == self.epoch
        self.steps += 1
        for row in _u32(batch.close_rows):
            del self._rows[row]
        for opened in batch.opens:
            self._open(opened)
        sampled = self._sample(batch)
        return worker_pb2.StepOutput(
            step_id=batch.step_id,
            worker_epoch=self.epoch,
            rows=np.array(list(sampled), dtype="<u4").tobytes(),
            token_ids=np.array(list(sampled.values()), dtype="<u4").tobytes(),
        )

    def _open(self, opened: worker_pb2.RowOpen) -> None:
        tokens = _u32(opened.token_ids)
        if opened.HasField("fork_of_row"):
            tokens = self._rows[opened.fork_of_row][0][: opened.prompt_len]
        self._rows[opened.row] = (list(tokens), opened.sample_index)

    def _sample(self, batch: worker_pb2.StepBatch) -> dict[int, int]:
        rows = _u32(batch.rows)
        query_lens = _u32(batch.query_lens) or [1] * len(rows)
        context_lens = _u32(batch.context_lens)
        mask = list(batch.sample_mask) or [1] * len(rows)
        sampled: dict[int, int] = {}
        for row, query_len, context_len, samples in zip(rows, query_lens, context_lens, mask, strict=True):
            history, index = self._rows[row]
            assert context_len + query_len <= len(history)
            if samples:
                assert context_len + query_len == len(history)
                sampled[row] = next_token(history, index)
        for row in _u32(batch.fork_rows):
            sampled[row] = next_token(*self._rows[row])
        for row, token in sampled.items():
            self._rows[row][0].append(token)
        return sampled


def _u32(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u4").tolist()


class ToyGateway:
    """Attaches to a scheduler and keeps all messages."""

    def __init__(self, scheduler: str) -> None:
        self.welcomes: list[scheduler_pb2.Welcome] = []
        self.replies: dict[int, scheduler_pb2.Refusal | None] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], scheduler_pb2.SampleFinished] = {}
        self.heartbeats: list[scheduler_pb2.SchedulerHeartbeat] = []
        self.num_messages = 0
        self.error: grpc.aio.AioRpcError | None = None

        self._channel = open_channel(scheduler)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self.call: Any = self.stub.Attach()
        self._task = asyncio.create_task(self._read())

    async def heartbeat(self) -> None:
        await self.call.write(scheduler_pb2.AttachRequest(heartbeat=scheduler_pb2.GatewayHeartbeat()))

    async def hello(self) -> ToyGateway:
        hello = scheduler_pb2.Hello(gateway_id="toy", protocol_version=1)
        await self.call.write(scheduler_pb2.AttachRequest(hello=hello))
        return self

    async def submit(self, handle: int, prompt: list[int], *, max_tokens: int = 8, n: int = 1, **fields: Any) -> None:
        await self.call.write(scheduler_pb2.AttachRequest(submit=make_submit(handle, prompt, max_tokens, n, **fields)))

    async def cancel(self, handle: int, sample_index: int | None = None) -> None:
        cancel = scheduler_pb2.Cancel(handle=handle, sample_index=sample_index, reason=types_pb2.FINISH_REASON_ABORTED)
        await self.call.write(scheduler_pb2.AttachRequest(cancel=cancel))

    async def _read(self) -> None:
        try:
            while True:
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    return
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    def _take(self, message: scheduler_pb2.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self.heartbeats.append(message.heartbeat)
            return
        self.num_messages += 1
        if kind == "welcome":
            self.welcomes.append(message.welcome)
        elif kind == "submit_reply":
            reply = message.submit_reply
            self.replies[reply.handle] = reply.refusal if reply.HasField("refusal") else None
        else:
            self._take_deltas(message.deltas)

    def _take_deltas(self, deltas: scheduler_pb2.Deltas) -> None:
        handles = _u32(deltas.handles)
        samples = _u32(deltas.sample_indices) or [0] * len(handles)
        for handle, sample, offset, token in zip(
            handles, samples, _u32(deltas.offsets), _u32(deltas.token_ids), strict=True
        ):
            tokens = self.tokens.setdefault((handle, sample), [])
            assert offset == len(tokens), "a token is lost or repeated"
            tokens.append(token)
        for finished in deltas.finished:
            self.finished[finished.handle, finished.sample_index] = finished

    async def close(self) -> None:
        self.call.cancel()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._channel.close()


def make_submit(handle: int, prompt: list[int], max_tokens: int = 8, n: int = 1, **fields: Any) -> scheduler_pb2.Submit:
    """A Submit as a gateway sends it, with every served field set."""
    sampling = types_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1, n=n)
    return scheduler_pb2.Submit(
        handle=handle,
        request_id=fields.pop("request_id", f"request-{handle}"),
        prompt_token_ids=np.array(prompt, dtype="<u4").tobytes(),
        sampling=sampling,
        stop=types_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )
