"""Blocks between two workers over gRPC: the target gets exactly the source's blocks, or fewer."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire_client.demo import demo_model_dir

from step_protocol.columns import u32_to_bytes
from svc_common.observe.inspection import Inspector
from svc_common.serve import GrpcServer, open_channel
from tests.unit.worker.test_kv_store import make_block
from worker_svc import blocks as worker_blocks
from worker_svc import flags as worker_flags
from worker_svc.blocks import MovementSettings, WorkerBlocks
from worker_svc.bundle import Bundle
from worker_svc.engine.config import EngineConfig
from worker_svc.kv_store import nixl_memory, outlets, record
from worker_svc.kv_store.nixl_memory import NixlAgent, has_nixl
from worker_svc.kv_store.outlets import Messages, SharedMemory, find_shared_memory
from worker_svc.kv_store.record import Origin, RecordFormat
from worker_svc.lifecycle import Lifecycle
from worker_svc.servicer import WorkerServicer
from worker_svc.simulator.model import SimConfig
from worker_svc.simulator.runner import SimRunner
from worker_svc.steps.executor import StepExecutor

BLOCK_SIZE, NUM_BLOCKS, NUM_MOVED = 4, 24, 10


@dataclass
class Served:
    """A worker that moves blocks, at its address."""

    runner: SimRunner
    blocks: WorkerBlocks
    executor: StepExecutor
    stub: Any
    address: str
    fence: worker_pb2.Fence


@asynccontextmanager
async def serve(epoch: int, **settings: Any) -> AsyncIterator[Served]:
    config = EngineConfig(
        model_dir=demo_model_dir(), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=2, max_model_len=64
    )
    executor = StepExecutor(worker_epoch=epoch)
    runner = SimRunner(config, SimConfig(step_ms=0.0))
    info = await executor.load(lambda: runner)
    blocks = WorkerBlocks(executor, MovementSettings(**settings), lambda address, worker_id: open_channel(address))
    await blocks.start(info)
    servicer = WorkerServicer(
        executor=executor,
        lifecycle=Lifecycle(),
        bundle=Bundle(b"", b"", False),
        drain=lambda timeout_s: asyncio.sleep(0, 0),
        inspector=Inspector("worker", "w", {}, lambda: b""),
        blocks=blocks,
    )
    server = GrpcServer(listen="127.0.0.1:0", service_names=["quire.internal.v1.WorkerService"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    address = await server.start()
    async with AsyncExitStack() as closing:
        closing.callback(executor.close)
        closing.push_async_callback(blocks.close)
        closing.push_async_callback(server.grpc.stop, 0)
        channel = await closing.enter_async_context(open_channel(address))
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield Served(runner, blocks, executor, stub, address, executor.lease(0, "test").fence)


def order(
    target: Served, source: Served, *, epoch: int | None = None, salt: bytes = b""
) -> worker_pb2.FetchBlocksRequest:
    """Fetch blocks 0 to 9 of the source, filled now, into blocks 10 to 19 of the target."""
    pool = source.runner._pool
    digests = [make_block(pool, block) for block in range(NUM_MOVED)]
    tokens = np.concatenate([pool.tokens_of(block) for block in range(NUM_MOVED)])
    request = worker_pb2.FetchBlocksRequest(
        fence=target.fence,
        block_ids=u32_to_bytes(np.arange(NUM_MOVED, 2 * NUM_MOVED, dtype=np.uint32)),
        hashes=b"".join(digests),
        token_ids=u32_to_bytes(tokens),
    )
    request.source.worker_id, request.source.address = "source", source.address
    request.source.worker_epoch = source.executor.worker_epoch if epoch is None else epoch
    request.source.block_ids = u32_to_bytes(np.arange(NUM_MOVED, dtype=np.uint32))
    return request


def num_equal(target: Served, source: Served) -> int:
    """Leading blocks of the target that hold what the source's blocks hold."""
    mine, theirs = target.runner._pool, source.runner._pool
    content = mine.digests.reshape(-1, BLOCK_SIZE)[NUM_MOVED:], theirs.digests.reshape(-1, BLOCK_SIZE)
    equal = [
        bool((content[0][i] == content[1][i]).all()) and mine.sums[NUM_MOVED + i] == theirs.sums[i]
        for i in range(NUM_MOVED)
    ]
    return equal.index(False) if False in equal else NUM_MOVED


def answer_each(source: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has an answer of its own."""
    for outlet in (outlets.Messages, outlets.Shared, outlets.OverNixl):
        monkeypatch.setattr(outlet, "part_bytes", source.blocks._records.num_bytes)


@pytest.fixture(params=["shared", "sent", "nixl"])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Served, Served]]:
    """With records in shared memory, and as if the workers were on two hosts."""
    if request.param != "shared":
        monkeypatch.setattr(worker_blocks, "find_shared_memory", lambda *_: None)
    settings = {"kv_transfer": True, "kv_nixl": request.param == "nixl"}
    if settings["kv_nixl"] and not has_nixl():
        pytest.skip("the package nixl is missing: pip install nixl")
    if settings["kv_nixl"]:
        monkeypatch.setattr(worker_blocks, "Messages", None)  # not used
    async with serve(1, **settings) as source, serve(2, **settings) as target:
        yield source, target


async def test_blocks_arrive_as_they_were(pair: tuple[Served, Served]) -> None:
    source, target = pair
    response = await target.stub.FetchBlocks(order(target, source))
    assert (response.num_fetched, response.message) == (NUM_MOVED, "")
    assert num_equal(target, source) == NUM_MOVED
    assert target.runner._pool.tokens_of(12).tolist() == source.runner._pool.tokens_of(2).tolist()
    assert list(target.runner.committed_blocks()) == [], "only the scheduler commits"


@pytest.mark.parametrize("pair", ["nixl"], indirect=True)
async def test_what_nixl_cannot_write_is_sent_the_next_time(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    monkeypatch.setattr(nixl_memory, "WRITE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(NixlAgent, "progress", lambda self: None)
    refused = await target.stub.FetchBlocks(order(target, source))
    assert refused.num_fetched == 0
    assert "UNAVAILABLE: NIXL does not write to the memory of the caller: the time is over" in refused.message
    monkeypatch.setattr(worker_blocks, "Messages", Messages)
    assert (await target.stub.FetchBlocks(order(target, source))).num_fetched == NUM_MOVED


async def test_memory_is_shared_again_and_by_its_name_only(pair: tuple[Served, Served]) -> None:
    source, target = pair
    for salt in (b"", b"1", b"22"):  # each time other blocks, in the same memory
        request = order(target, source)
        for block in range(NUM_MOVED):
            make_block(source.runner._pool, block, salt)
        request.hashes = b"".join(make_block(source.runner._pool, block, salt) for block in range(NUM_MOVED))
        tokens = [source.runner._pool.tokens_of(block) for block in range(NUM_MOVED)]
        request.token_ids = u32_to_bytes(np.concatenate(tokens))
        assert (await target.stub.FetchBlocks(request)).num_fetched == num_equal(target, source) == NUM_MOVED
    memory = SharedMemory(1 << 16)
    found = find_shared_memory(memory.pid, memory.descriptor, memory.name, 1 << 16)
    assert found is not None
    memory.view[5] = 7
    assert found[5] == 7
    for other in (
        (memory.pid, memory.descriptor, "0" * 32, 1 << 16),
        (memory.pid, memory.descriptor, "", 1 << 16),
        (memory.pid, memory.descriptor, memory.name, 1 << 17),
        (memory.pid, memory.descriptor + 500, memory.name, 1 << 16),
        (1 << 31, memory.descriptor, memory.name, 1 << 16),
        (memory.pid, 0, "../../../../../../../etc/passwd\x00", 16),
    ):
        assert find_shared_memory(*other) is None
    memory.close()
    assert find_shared_memory(memory.pid, memory.descriptor, memory.name, 1 << 16) is None


def test_memory_of_a_killed_reader_is_gone() -> None:
    code = f"""
import time
from {SharedMemory.__module__} import SharedMemory
memory = SharedMemory(1 << 16)
print(memory.pid, memory.descriptor, memory.name, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as reader:
        pid, descriptor, name = reader.stdout.readline().split()
        mapped = find_shared_memory(int(pid), int(descriptor), name, 1 << 16)
        reader.kill()
    assert mapped is not None
    mapped[5] = 7  # a source that writes meanwhile does not fail
    assert find_shared_memory(int(pid), int(descriptor), name, 1 << 16) is None
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]


async def test_records_that_are_larger_than_a_message_arrive_in_pieces(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    monkeypatch.setattr(outlets, "MESSAGE_BYTES", source.blocks._records.num_bytes - 1)
    answer_each(source, monkeypatch)
    response = await target.stub.FetchBlocks(order(target, source))
    assert (response.num_fetched, response.message) == (NUM_MOVED, "")
    assert num_equal(target, source) == NUM_MOVED


async def test_several_calls_write_to_the_same_memory(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    num_bytes = source.blocks._records.num_bytes
    monkeypatch.setattr(worker_blocks, "CALL_BYTES", 3 * num_bytes)
    answer_each(source, monkeypatch)
    assert (await target.stub.FetchBlocks(order(target, source))).num_fetched == NUM_MOVED
    assert num_equal(target, source) == NUM_MOVED


@pytest.mark.parametrize("is_part", [False, True], ids=["one message", "a message each"])
async def test_a_block_that_the_source_has_given_away_ends_the_fetch(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch, is_part: bool
) -> None:
    source, target = pair
    request = order(target, source)
    make_block(source.runner._pool, 4, b"other tenant")
    pack, packed = RecordFormat.pack, list[int]()

    def noted(records: RecordFormat, digest: bytes, origin: Origin, into: Any) -> bool:
        packed.append(origin.block_id)
        return pack(records, digest, origin, into)

    monkeypatch.setattr(RecordFormat, "pack", noted)
    if is_part:
        answer_each(source, monkeypatch)
    response = await target.stub.FetchBlocks(request)
    assert response.num_fetched == num_equal(target, source) == 4
    assert packed == [0, 1, 2, 3, 4], "what follows would be written to memory that may have been given back"


async def test_an_earlier_process_or_another_layout_serves_nothing(pair: tuple[Served, Served]) -> None:
    source, target = pair
    response = await target.stub.FetchBlocks(order(target, source, epoch=7))
    assert response.num_fetched == 0
    assert "FAILED_PRECONDITION" in response.message
    target.blocks._records.layout = bytes(16)
    response = await target.stub.FetchBlocks(order(target, source))
    assert response.num_fetched == 0
    assert "layout" in response.message


async def test_bits_that_flip_on_the_way_are_found(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    pack = RecordFormat.pack

    def flipped(records: RecordFormat, digest: bytes, origin: Origin, into: Any) -> bool:
        is_there = pack(records, digest, origin, into)
        into[-30] ^= 4 if origin.block_id == 6 else 0
        return is_there

    monkeypatch.setattr(RecordFormat, "pack", flipped)
    response = await target.stub.FetchBlocks(order(target, source))
    assert response.num_fetched == num_equal(target, source) == 6
    assert "checksum" in response.message
    assert target.blocks.counts.num_refused == 1


async def test_a_source_that_dies_in_the_middle_leaves_the_blocks_before(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    pack = RecordFormat.pack
    answer_each(source, monkeypatch)

    def dying(records: RecordFormat, digest: bytes, origin: Origin, into: Any) -> bool:
        if origin.block_id == 3:
            raise RuntimeError("the process ends")
        return pack(records, digest, origin, into)

    monkeypatch.setattr(RecordFormat, "pack", dying)
    response = await target.stub.FetchBlocks(order(target, source))
    assert response.num_fetched == num_equal(target, source) == 3
    response = await target.stub.FetchBlocks(_unreachable(target, source))
    assert response.num_fetched == 0
    assert "UNAVAILABLE" in response.message


def _unreachable(target: Served, source: Served) -> worker_pb2.FetchBlocksRequest:
    request = order(target, source)
    request.source.address = "127.0.0.1:1"
    return request


async def test_a_target_without_memory_for_copies_computes_the_blocks(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair

    def writing(_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 8.00 MiB.")

    monkeypatch.setattr(target.blocks._records.blocks, "writing", writing)
    response = await target.stub.FetchBlocks(order(target, source))
    assert (response.num_fetched, num_equal(target, source)) == (0, 0)
    assert "no memory for blocks that arrived: CUDA out of memory" in response.message


async def test_nothing_is_written_to_a_pool_that_sleeps(pair: tuple[Served, Served]) -> None:
    source, target = pair

    async def change(action: worker_pb2.WeightsAction.ValueType) -> None:
        request = worker_pb2.ChangeWeightsRequest(fence=target.fence, action=action, tags=["kv_cache"])
        await target.stub.ChangeWeights(request)

    await change(worker_pb2.WEIGHTS_ACTION_SLEEP)
    with pytest.raises(grpc.aio.AioRpcError, match="the KV pool of this worker sleeps") as refused:
        await target.stub.FetchBlocks(order(target, source))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert num_equal(target, source) == 0
    await change(worker_pb2.WEIGHTS_ACTION_WAKE)
    assert (await target.stub.FetchBlocks(order(target, source))).num_fetched == NUM_MOVED


async def test_a_fetch_of_an_ended_lease_writes_nothing(pair: tuple[Served, Served]) -> None:
    source, target = pair
    request = order(target, source)
    request.after_step_id = 1  # never sent
    fetching = asyncio.ensure_future(target.stub.FetchBlocks(request))
    # No event tells that all records have arrived and their write waits.
    while target.blocks.counts.blocks_in < NUM_MOVED:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    target.executor.lease(0, "another scheduler")
    with pytest.raises(grpc.aio.AioRpcError, match="has ended"):
        await fetching
    assert num_equal(target, source) == 0
    with pytest.raises(grpc.aio.AioRpcError, match="scheduler_epoch"):
        await target.stub.FetchBlocks(request)


@pytest.mark.parametrize(
    "change",
    [
        {"block_ids": b"\1\0\0\0" * 10},
        {"hashes": b"x"},
        {"token_ids": b"\1\0\0\0"},
        {"block_ids": u32_to_bytes(np.arange(20, 30, dtype=np.uint32))},
    ],
    ids=str,
)
async def test_columns_that_contradict_the_pool_are_refused(
    pair: tuple[Served, Served], change: dict[str, bytes]
) -> None:
    source, target = pair
    request = order(target, source)
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await target.stub.FetchBlocks(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_without_the_flags_moves_nothing(tmp_path: Path) -> None:
    async with serve(1) as source, serve(2, kv_disk=tmp_path / "tier", kv_disk_size=1 << 20) as target:
        response = await target.stub.FetchBlocks(order(target, source))
        assert response.num_fetched == 0
        assert "start it with" in response.message
        with pytest.raises(grpc.aio.AioRpcError, match="start it with"):
            await source.stub.FetchBlocks(order(source, target))
        listing = target.stub.WatchTier(worker_pb2.WatchTierRequest(fence=target.fence))
        first = await listing.read()
        assert first.is_listed
        assert not first.added + first.added_to_memory
        listing.cancel()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "decode"), "--role decode needs --kv-transfer"),
        (("--kv-transfer", "--tensor-parallel-size", "2"), "--tensor-parallel-size 2 cannot be set together with"),
        (("--kv-nixl",), "--kv-nixl needs --kv-transfer"),
        (("--kv-transfer", "--kv-nixl"), "needs the package nixl: pip install 'quire[nixl]'"),
    ],
)
def test_ways_of_blocks_need_what_they_go_over(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_flags, "has_nixl", lambda: False)
    with pytest.raises(ValueError, match=re.escape(message)):
        worker_flags.check_transfer(worker_flags.make_parser().parse_args(["--model", "m", *flags]))


def test_a_record_names_where_its_block_was_committed() -> None:
    """The scheduler checks the seal under these ids (scheduler_svc/workers/wire.py has the same layout)."""
    from scheduler_svc.workers.wire import ORIGIN

    assert ORIGIN.format == record.ORIGIN.format
