"""Helpers of the worker contract: a deterministic fake runner, a gate around any runner, and a client for steps."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import xxhash
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.v1 import types_pb2

from request_fields.fields import SamplingParams
from step_protocol.columns import U32, u32_from_bytes, u32_to_bytes
from step_protocol.messages import BadBatchError, RowOpen, StepBatch, StepOutput
from step_protocol.types import RowError, RowErrorCode
from svc_common.observe.inspection import Inspector
from svc_common.serve import GrpcServer, open_channel
from worker_svc.bundle import Bundle
from worker_svc.engine.config import EngineInfo
from worker_svc.engine.runner import Runner
from worker_svc.lifecycle import Lifecycle
from worker_svc.servicer import WorkerServicer
from worker_svc.steps.executor import StepExecutor

WORKER_EPOCH = 0xABCDEF0123456789
BLOCK_SIZE = 4
NUM_BLOCKS = 32


def make_info(**changes: object) -> EngineInfo:
    """The properties of a small engine."""
    facts: dict[str, object] = {
        "model": "tiny",
        "revision": "r1",
        "max_model_len": 64,
        "vocab_size": 211,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "eos_token_ids": (2,),
        "default_sampling": SamplingParams(temperature=0.5, top_k=20, top_p=0.75, min_p=0.0, seed=0),
        "dtype": "float32",
        "determinism": "exact",
        "backend": "fake",
        "numerics": "fake",
        "build": "fake",
    }
    return EngineInfo(**{**facts, **changes})  # type: ignore[arg-type]


class FakeRunner(Runner):
    """The engine's contract without a model: a row's next token is a hash of all tokens before it."""

    def __init__(self) -> None:
        self.info = make_info()
        self._rows: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}  # token in each written slot
        self._committed: dict[int, bytes] = {}

    def execute(self, batch: StepBatch) -> StepOutput:
        if len(batch.copy_src) and int(batch.copy_src.max()) >= self.info.num_blocks:
            block = int(batch.copy_src.max())
            raise BadBatchError(f"copy_src names block {block}, but the pool has {NUM_BLOCKS} blocks")
        self._apply(batch)
        errors = [
            RowError(int(row), "row is not open", RowErrorCode.BAD_INPUT) for row in batch.rows if not self._has(row)
        ]
        self._write(batch)
        samplers = [int(row) for row, samples in zip(batch.rows, batch.sample_mask, strict=True) if samples]
        samplers = [row for row in samplers + batch.fork_rows.tolist() if self._has(row)]
        token_ids = [self._sample(row) for row in samplers]
        return StepOutput(batch.step_id, np.array(samplers, np.uint32), np.array(token_ids, np.uint32), errors, 1)

    def _apply(self, batch: StepBatch) -> None:
        for row in batch.close_rows.tolist():
            self._rows.pop(row, None)
        for item in batch.opens:
            self._rows[item.row] = self._history(item)
        for block, digest in zip(batch.commit_blocks.tolist(), batch.commit_digests, strict=True):
            self._committed[block] = digest

    def _history(self, item: RowOpen) -> list[int]:
        if item.fork_of_row is None:
            return [int(token) for token in item.token_ids]
        return self._rows[item.fork_of_row][: item.prompt_len]

    def _has(self, row: int) -> bool:
        return int(row) in self._rows

    def _write(self, batch: StepBatch) -> None:
        slots = iter(batch.slot_mapping.tolist())
        for row, start, length in zip(batch.rows, batch.context_lens, batch.query_lens, strict=True):
            for position in range(int(start), int(start) + int(length)):
                slot = next(slots)
                if self._has(row):
                    self._slots[slot] = self._rows[int(row)][position]

    def _sample(self, row: int) -> int:
        token = xxhash.xxh32_intdigest(u32_to_bytes(np.array(self._rows[row]))) % self.info.vocab_size
        self._rows[row].append(token)
        return token

    def committed_blocks(self) -> Iterator[tuple[U32, list[bytes], U32]]:
        for block, digest in self._committed.items():
            first = block * BLOCK_SIZE
            tokens = [self._slots.get(slot, 0) for slot in range(first, first + BLOCK_SIZE)]
            yield np.array([block], np.uint32), [digest], np.array([tokens], np.uint32)

    def forget_prefixes(self) -> None:
        self._committed.clear()

    def reset_rows(self) -> None:
        self._rows.clear()

    def rows_used(self) -> int:
        return len(self._rows)


class GatedRunner(Runner):
    """Wraps a runner: counts its steps, and blocks before a step while `gate` is closed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info = runner.info
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = False  # a step has reached the closed gate
        self.num_steps = 0
        self.failure: Exception | None = None
        self.committed_blocks = runner.committed_blocks  # type: ignore[method-assign]
        self.forget_prefixes = runner.forget_prefixes  # type: ignore[method-assign]
        self.reset_rows = runner.reset_rows  # type: ignore[method-assign]
        self.rows_used = runner.rows_used  # type: ignore[method-assign]

    def execute(self, batch: StepBatch) -> StepOutput:
        self.is_held = not self.gate.is_set()
        if not self.gate.wait(timeout=60):
            raise RuntimeError("the test never opened the gate")
        self.is_held = False
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        return self._runner.execute(batch)


@dataclass(slots=True)
class Row:
    """The state of a sequence in the test."""

    row: int
    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]


SAMPLING = types_pb2.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


@dataclass(slots=True)
class WorkerUnderTest:
    """A served worker and the calls of a scheduler: leases, builds batches, sends them."""

    stub: worker_pb2_grpc.WorkerServiceStub
    runner: GatedRunner
    executor: StepExecutor
    lifecycle: Lifecycle
    fatal: list[BaseException]
    fence: worker_pb2.Fence = field(default_factory=worker_pb2.Fence)
    next_step_id: int = 0

    async def lease(self, epoch: int = 0) -> worker_pb2.LeaseResponse:
        request = worker_pb2.LeaseRequest(scheduler_epoch=epoch, scheduler_id="test", protocol_version=1)
        response = await self.stub.Lease(request, timeout=60)
        self.fence, self.next_step_id = response.fence, response.next_step_id
        return response

    def batch(self, rows: Sequence[Row] = (), *, opens: Sequence[Row] = (), **columns: object) -> worker_pb2.StepBatch:
        """The next step: computes all missing tokens of each row and samples at the end. Increases the step id."""
        starts = [row.num_computed for row in rows]
        ends = [max(len(row.token_ids), row.num_computed + 1) for row in rows]
        slots = [slot for row, start, end in zip(rows, starts, ends, strict=True) for slot in row.slots(start, end)]
        for row, end in zip(rows, ends, strict=True):
            row.num_computed = end
        step_id, self.next_step_id = self.next_step_id, self.next_step_id + 1
        batch = worker_pb2.StepBatch(
            step_id=step_id,
            fence=self.fence,
            opens=[_open(row) for row in opens],
            rows=column([row.row for row in rows]),
            query_lens=column([end - start for start, end in zip(starts, ends, strict=True)]),
            context_lens=column(starts),
            slot_mapping=column(slots),
        )
        batch.MergeFrom(worker_pb2.StepBatch(**columns))  # type: ignore[arg-type]
        return batch

    async def step(self, batch: worker_pb2.StepBatch) -> worker_pb2.StepOutput:
        """One step through the unary RPC."""
        response = await self.stub.StepBatch(worker_pb2.StepBatchRequest(batch=batch), timeout=60)
        return response.output

    def stream(self) -> Stream:
        return Stream(self.stub.StepStream(timeout=60))


class Stream:
    """A StepStream, with one method per direction."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def send(self, batch: worker_pb2.StepBatch, *then: worker_pb2.StepBatch) -> None:
        await self.call.write(worker_pb2.StepStreamRequest(batch=batch, then=then))

    async def receive(self) -> worker_pb2.StepOutput:
        return (await self.receive_all())[0]

    async def receive_all(self) -> list[worker_pb2.StepOutput]:
        """The answers of one message."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"the stream has ended: {await self.call.code()} {await self.call.details()}")
        return [response.output, *response.then]

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end of the stream; returns its status."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self.call.code(), await self.call.details()


def _open(row: Row) -> worker_pb2.RowOpen:
    return worker_pb2.RowOpen(
        row=row.row,
        token_ids=column(row.token_ids),
        prompt_len=len(row.token_ids),
        block_table=column(row.blocks),
        num_computed_tokens=row.num_computed,
        sampling=SAMPLING,
    )


def column(values: Sequence[int]) -> bytes:
    return u32_to_bytes(np.array(values, dtype=np.uint32))


def sampled(output: worker_pb2.StepOutput) -> dict[int, int]:
    """Tokens by row of one output."""
    rows, tokens = u32_from_bytes(output.rows, "rows"), u32_from_bytes(output.token_ids, "token_ids")
    return dict(zip(rows.tolist(), tokens.tolist(), strict=True))


@asynccontextmanager
async def serve_worker(runner: Runner | None, *, pipeline_depth: int = 2) -> AsyncIterator[WorkerUnderTest]:
    """Serve `runner` over real gRPC; None: the worker is still loading."""
    fatal: list[BaseException] = []
    executor = StepExecutor(worker_epoch=WORKER_EPOCH, on_fatal=fatal.append)
    lifecycle = Lifecycle()
    gated = GatedRunner(runner) if runner is not None else None
    if gated is not None:
        await executor.load(lambda: gated)

    async def drain(timeout_s: float) -> int:
        lifecycle.set_draining()
        return int(timeout_s)

    servicer = WorkerServicer(
        executor=executor,
        lifecycle=lifecycle,
        bundle=Bundle(data=bytes(range(256)) * 10_000, digest=b"d" * 16, names=()),
        drain=drain,
        inspector=Inspector("worker", "test", "", lambda: b""),
        pipeline_depth=pipeline_depth,
    )
    server = GrpcServer(listen="127.0.0.1:0", service_names=["quire.internal.v1.WorkerService"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    channel = open_channel(await server.start())
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        yield WorkerUnderTest(stub, gated, executor, lifecycle, fatal)  # type: ignore[arg-type]
    finally:
        if gated is not None:
            gated.gate.set()
        await channel.close()
        await server.grpc.stop(0)
        executor.close()
