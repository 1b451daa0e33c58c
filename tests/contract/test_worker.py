"""One suite for every worker: the servicer around a fake runner, a simulated one, and the engine with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from quire.internal.v1 import worker_pb2
from quire_client.demo import demo_model_dir

from step_protocol.columns import u32_from_bytes
from tests.contract.worker_fakes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WORKER_EPOCH,
    FakeRunner,
    Row,
    WorkerUnderTest,
    sampled,
    serve_worker,
)
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.runner import Runner
from worker_svc.simulator.model import SimConfig
from worker_svc.simulator.runner import SimRunner
from worker_svc.steps.lease import NUM_KEPT_ANSWERS

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.engine.models import make_model

    return make_model(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(params=["fake", "sim", "engine"])
def make_runner(request: pytest.FixtureRequest) -> Callable[[], Runner]:
    if request.param == "fake":
        return FakeRunner
    if request.param == "sim":
        return lambda: SimRunner(make_config(demo_model_dir()), SimConfig(step_ms=0.1))
    folder = request.getfixturevalue("tiny_model")

    def engine() -> Runner:
        from worker_svc.engine.model_runner import ModelRunner

        return ModelRunner(make_config(folder))

    return engine


def make_config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=folder,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        threads=1,
    )


@pytest.fixture
async def worker(make_runner: Callable[[], Runner]) -> AsyncIterator[WorkerUnderTest]:
    async with serve_worker(make_runner()) as served:
        yield served


def make_row(row: int = 0, first_block: int = 0, num_tokens: int = 6) -> Row:
    blocks = list(range(first_block, first_block + 4))
    return Row(row, token_ids=list(range(10, 10 + num_tokens)), blocks=blocks)


async def generate(worker: WorkerUnderTest, row: Row, num_tokens: int) -> list[int]:
    """Prefill and decode one row through the unary RPC."""
    tokens = [sampled(await worker.step(worker.batch([row], opens=[row])))[row.row]]
    while len(tokens) < num_tokens:
        tokens.append(sampled(await worker.step(worker.batch([row])))[row.row])
    return tokens


async def refusal(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


# -- leases ----------------------------------------------------------------------------------------------------------


async def test_lease_epochs_increase_and_lower_epochs_are_refused(worker: WorkerUnderTest) -> None:
    first = await worker.lease()
    assert (first.fence.scheduler_epoch, first.fence.worker_epoch, first.next_step_id) == (1, WORKER_EPOCH, 1)
    assert (await worker.lease(9)).fence.scheduler_epoch == 9
    assert (await worker.lease()).fence.scheduler_epoch == 10
    for epoch in (9, 10):
        error = await refusal(worker.lease(epoch))
        assert error.code() is FAILED_PRECONDITION
        assert f"scheduler_epoch {epoch} is stale" in error.details()
        assert "10" in error.details()


async def test_an_epoch_far_above_the_last_one_is_refused_and_later_leases_work(worker: WorkerUnderTest) -> None:
    assert (await worker.lease(7)).fence.scheduler_epoch == 7
    for epoch in (2**64 - 1, 2**63, 7 + 2**32 + 1):
        error = await refusal(worker.lease(epoch))
        assert error.code() is FAILED_PRECONDITION
        assert f"scheduler_epoch {epoch} is more than 4294967296 above the last epoch" in error.details()
    assert (await worker.lease()).fence.scheduler_epoch == 8
    assert (await worker.lease(8 + 2**32)).fence.scheduler_epoch == 8 + 2**32
    assert (await worker.lease()).fence.scheduler_epoch == 9 + 2**32


async def test_another_protocol_version_is_refused(worker: WorkerUnderTest) -> None:
    error = await refusal(worker.stub.Lease(worker_pb2.LeaseRequest(protocol_version=2), timeout=60))
    assert error.code() is INVALID_ARGUMENT
    assert "protocol_version is 2" in error.details()


async def test_nothing_runs_without_a_lease(worker: WorkerUnderTest) -> None:
    worker.fence = worker_pb2.Fence(scheduler_epoch=1, worker_epoch=WORKER_EPOCH)
    error = await refusal(worker.step(worker.batch()))
    assert error.code() is FAILED_PRECONDITION
    assert "call Lease first" in error.details()
    assert (await worker.stream().end())[0] is FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("fence", "says"),
    [
        (
            worker_pb2.Fence(scheduler_epoch=1, worker_epoch=WORKER_EPOCH),
            "scheduler_epoch 1 does not hold the lease; 2",
        ),
        (worker_pb2.Fence(scheduler_epoch=2, worker_epoch=5), "worker_epoch 0x5 does not match this process"),
    ],
)
async def test_a_wrong_fence_is_refused_everywhere(worker: WorkerUnderTest, fence: worker_pb2.Fence, says: str) -> None:
    await worker.lease(2)
    worker.fence = fence
    batch = worker.batch()
    stream = worker.stream()
    await stream.send(batch)
    code, details = await stream.end()
    listing = worker.stub.ListBlocks(worker_pb2.ListBlocksRequest(fence=fence), timeout=60)
    for error in (await refusal(worker.step(batch)), await refusal(listing.read())):
        assert (error.code(), says in error.details()) == (FAILED_PRECONDITION, True)
    assert (code, says in details) == (FAILED_PRECONDITION, True)
    assert worker.runner.num_steps == 0


async def test_a_fence_needs_the_nonce_of_its_lease(worker: WorkerUnderTest) -> None:
    await worker.lease(2)
    batch, nonce = worker.batch(), worker.fence.nonce
    for wrong in (0, nonce ^ 1):
        batch.fence.nonce = wrong
        error = await refusal(worker.step(batch))
        assert (error.code(), error.details()) == (
            FAILED_PRECONDITION,
            "the nonce is not that of the lease; call Lease",
        )
    await worker.lease()
    assert worker.fence.nonce != nonce


async def test_a_new_lease_ends_an_idle_stream(worker: WorkerUnderTest) -> None:
    await worker.lease()
    stream = worker.stream()
    await stream.send(worker.batch())
    await stream.receive()
    await worker.lease()
    code, details = await stream.end()
    assert code is FAILED_PRECONDITION
    assert "scheduler_epoch 1 has ended" in details


async def test_a_new_lease_discards_waiting_steps(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    stream = worker.stream()
    worker.runner.gate.clear()
    await stream.send(worker.batch([row], opens=[row]))
    await stream.send(worker.batch([row]))
    await until(lambda: worker.executor.num_in_flight == 2 and worker.runner.is_held)
    await worker.lease()  # answered while the step still runs
    assert worker.executor.num_in_flight == 2
    listing = asyncio.ensure_future(
        worker.stub.ListBlocks(worker_pb2.ListBlocksRequest(fence=worker.fence), timeout=60).read()
    )
    worker.runner.gate.set()
    assert (await stream.end())[0] is FAILED_PRECONDITION
    assert await listing is grpc.aio.EOF
    assert worker.runner.num_steps == 1
    assert worker.executor.rows_used == worker.runner.rows_used() == 0
    assert len(await generate(worker, make_row(), 3)) == 3


async def test_a_lease_keeps_committed_blocks_until_they_are_forgotten_and_closes_rows(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row(num_tokens=9)
    await worker.step(worker.batch([row], opens=[row]))
    digests = [bytes([i]) * 16 for i in range(2)]
    commits = {"commit_blocks": b"\0\0\0\0\1\0\0\0", "commit_hashes": b"".join(digests)}
    await worker.step(worker.batch(**commits))
    await worker.lease()
    output = await worker.step(worker.batch([row]))
    assert [(error.row, error.code) for error in output.errors] == [(0, worker_pb2.ROW_ERROR_CODE_BAD_INPUT)]
    found = {}
    async for part in worker.stub.ListBlocks(worker_pb2.ListBlocksRequest(fence=worker.fence), timeout=60):
        blocks = u32_from_bytes(part.block_ids, "block_ids").tolist()
        tokens = u32_from_bytes(part.token_ids, "token_ids").reshape(len(blocks), BLOCK_SIZE).tolist()
        hashes = [part.hashes[i * 16 : i * 16 + 16] for i in range(len(blocks))]
        found |= dict(zip(blocks, zip(hashes, tokens, strict=True), strict=True))
    assert found == {0: (digests[0], [10, 11, 12, 13]), 1: (digests[1], [14, 15, 16, 17])}
    forget = worker_pb2.WEIGHTS_ACTION_FORGET_PREFIXES
    await worker.stub.ChangeWeights(worker_pb2.ChangeWeightsRequest(fence=worker.fence, action=forget))
    await worker.lease()
    assert not [part async for part in worker.stub.ListBlocks(worker_pb2.ListBlocksRequest(fence=worker.fence))]


async def test_a_committed_block_keeps_its_tag_and_the_epoch_of_its_lease(worker: WorkerUnderTest) -> None:
    async def seals() -> bytes:
        request = worker_pb2.ListBlocksRequest(fence=worker.fence)
        return b"".join([part.seals async for part in worker.stub.ListBlocks(request, timeout=60)])

    async def fill_and_commit(tags: bytes) -> None:
        row = make_row(num_tokens=9)
        await worker.step(worker.batch([row], opens=[row]))
        blocks = {"commit_blocks": b"\0\0\0\0\1\0\0\0", "commit_hashes": bytes(32), "commit_tags": tags}
        await worker.step(worker.batch(**blocks))

    epochs = [epoch.to_bytes(8, "little") for epoch in (5, 6, 7)]
    await worker.lease(5)
    await fill_and_commit(b"")
    assert await seals() == b""
    await worker.lease(6)
    await fill_and_commit(b"a" * 16 + b"b" * 16)
    assert await seals() == epochs[1] + b"a" * 16 + epochs[1] + b"b" * 16
    await worker.lease(7)
    await fill_and_commit(b"")
    assert await seals() == 2 * (epochs[2] + bytes(16)), "the tag of an earlier lease does not stay"
    with pytest.raises(grpc.aio.AioRpcError, match="commit_tags has 15 bytes, expected 32"):
        await fill_and_commit(b"c" * 15)


# -- steps -----------------------------------------------------------------------------------------------------------


async def test_the_stream_answers_in_order_with_two_in_flight(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    stream = worker.stream()
    await stream.send(worker.batch([row], opens=[row]))
    tokens = []
    for step_id in range(1, 8):
        await stream.send(worker.batch([row]))
        output = await stream.receive()
        assert (output.step_id, output.worker_epoch) == (step_id, WORKER_EPOCH)
        tokens.append(sampled(output)[0])
    await worker.lease()
    assert tokens == await generate(worker, make_row(first_block=8), 7)


async def test_at_most_pipeline_depth_messages_are_read_ahead(worker: WorkerUnderTest) -> None:
    await worker.lease()
    stream = worker.stream()
    worker.runner.gate.clear()
    for _ in range(6):
        await stream.send(worker.batch())
    await until(lambda: worker.executor.num_in_flight == 2)
    unary = asyncio.ensure_future(worker.stub.StepBatch(worker_pb2.StepBatchRequest(), timeout=60).code())
    await unary  # after one more round trip
    assert worker.executor.num_in_flight == 2
    worker.runner.gate.set()
    assert [(await stream.receive()).step_id for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    await stream.call.done_writing()
    assert (await stream.end())[0] is grpc.StatusCode.OK


async def test_a_burst_is_answered_together(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    stream = worker.stream()
    first = worker.batch([row], opens=[row])
    await stream.send(first, *(worker.batch([row]) for _ in range(3)))
    outputs = await stream.receive_all()
    assert [output.step_id for output in outputs] == [1, 2, 3, 4]
    await worker.lease()
    assert [sampled(output)[0] for output in outputs] == await generate(worker, make_row(first_block=8), 4)


async def test_the_steps_of_a_burst_before_a_refused_step_are_answered(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    stream = worker.stream()
    good = [worker.batch([row], opens=[row]), worker.batch([row])]
    await stream.send(*good, worker.batch([row], step_id=99), worker.batch([row]))
    assert [output.step_id for output in await stream.receive_all()] == [1, 2]
    code, details = await stream.end()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "expected step 3, got 99" in details


async def test_a_repeated_step_gets_the_cached_answer(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    first = worker.batch([row], opens=[row])
    answer = await worker.step(first)
    stream = worker.stream()
    await stream.send(first)
    assert (await stream.receive()) == answer
    assert (await worker.step(first)) == answer
    assert worker.runner.num_steps == 1


async def test_a_step_survives_its_stream(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    batch = worker.batch([row], opens=[row])
    worker.runner.gate.clear()
    stream = worker.stream()
    await stream.send(batch)
    await until(lambda: worker.executor.num_in_flight == 1)
    stream.call.cancel()
    again = worker.stream()
    await again.send(batch)
    worker.runner.gate.set()
    assert 0 in sampled(await again.receive())
    assert worker.runner.num_steps == 1


async def test_a_gap_and_a_forgotten_step_are_refused(worker: WorkerUnderTest) -> None:
    await worker.lease()
    batches = [worker.batch() for _ in range(NUM_KEPT_ANSWERS + 3)]
    error = await refusal(worker.step(batches[1]))
    assert (error.code(), "expected step 1, got 2" in error.details()) == (FAILED_PRECONDITION, True)
    for batch in batches[:-1]:
        await worker.step(batch)
    await worker.step(batches[2])
    error = await refusal(worker.step(batches[1]))
    assert error.code() is FAILED_PRECONDITION
    assert f"expected step {NUM_KEPT_ANSWERS + 3}, got 2" in error.details()


@pytest.mark.parametrize(
    ("column", "data", "says"),
    [
        ("rows", b"\0\0\0", "batch.rows has 3 bytes; the length must be a multiple of 4"),
        ("context_lens", b"\0" * 8, "batch.context_lens has 2 items, expected 1"),
        ("query_lens", b"\3\0\0\0" * 2, "batch.query_lens has 2 items, expected 1"),
        ("query_lens", b"\0" * 4, "batch.query_lens is 0 at index 0"),
        ("sample_mask", b"\2", "batch.sample_mask has 2 at index 0"),
        ("sample_mask", b"\1\1", "batch.sample_mask has 2 items, expected 1"),
        ("slot_mapping", b"\0" * 20, "batch.slot_mapping has 5 items, expected 6 (the sum of query_lens)"),
        ("table_rows", b"\0" * 4, "batch.table_indices has 0 items, expected 1"),
        ("copy_src", b"\0" * 4, "batch.copy_dst has 0 items, expected 1"),
        ("commit_blocks", b"\0" * 4, "batch.commit_hashes has 0 bytes, expected 16"),
        ("fork_rows", b"\0" * 4, "batch.fork_parents has 0 items, expected 1"),
    ],
)
async def test_malformed_columns_change_nothing(worker: WorkerUnderTest, column: str, data: bytes, says: str) -> None:
    await worker.lease()
    row = make_row()
    good = worker.batch([row], opens=[row])
    bad = worker_pb2.StepBatch()
    bad.CopyFrom(good)
    setattr(bad, column, data)
    error = await refusal(worker.step(bad))
    assert error.code() is INVALID_ARGUMENT
    assert says in error.details()
    stream = worker.stream()
    await stream.send(bad)
    assert (await stream.end())[0] is INVALID_ARGUMENT
    assert worker.runner.num_steps == 0
    assert 0 in sampled(await worker.step(good))


async def test_a_refused_batch_refuses_the_batches_after_it(worker: WorkerUnderTest) -> None:
    await worker.lease()
    row = make_row()
    bad = worker.batch(copy_src=b"\xff\0\0\0", copy_dst=b"\0\0\0\0")
    follower = worker.batch([row], opens=[row])
    stream = worker.stream()
    worker.runner.gate.clear()
    await stream.send(bad)
    await stream.send(follower)
    await until(lambda: worker.executor.num_in_flight == 2)
    worker.runner.gate.set()
    code, details = await stream.end()
    assert (code, "copy_src names block 255" in details) == (INVALID_ARGUMENT, True)
    await until(lambda: worker.executor.num_in_flight == 0)
    assert worker.runner.num_steps == 1
    bad.ClearField("copy_src")
    bad.ClearField("copy_dst")
    await worker.step(bad)
    assert 0 in sampled(await worker.step(follower))
    assert not worker.fatal


async def test_an_invalid_row_does_not_affect_others(worker: WorkerUnderTest) -> None:
    await worker.lease()
    expected = await generate(worker, make_row(), 1)
    await worker.lease()
    good, unopened = make_row(row=2, first_block=4), make_row(row=5, first_block=12)
    output = await worker.step(worker.batch([unopened, good], opens=[good]))
    assert sampled(output) == {2: expected[0]}
    assert [(error.row, error.code) for error in output.errors] == [(5, worker_pb2.ROW_ERROR_CODE_BAD_INPUT)]
    assert "not open" in output.errors[0].message


async def test_an_error_that_could_corrupt_the_pool_is_fatal(worker: WorkerUnderTest) -> None:
    await worker.lease()
    worker.runner.failure = RuntimeError("planted")
    error = await refusal(worker.step(worker.batch()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert [str(fatal) for fatal in worker.fatal] == ["planted"]


# -- other RPCs ------------------------------------------------------------------------------------------------------


async def test_the_bundle_is_sent_in_pieces(worker: WorkerUnderTest) -> None:
    call = worker.stub.GetWorkerBundle(worker_pb2.GetWorkerBundleRequest(), timeout=60)
    parts = [part.data async for part in call]
    assert len(parts) == 3
    assert b"".join(parts) == bytes(range(256)) * 10_000


async def test_a_draining_worker_refuses_a_lease(worker: WorkerUnderTest) -> None:
    response = await worker.stub.Drain(worker_pb2.DrainRequest(timeout_s=3), timeout=60)
    assert response.rows_left == 3
    error = await refusal(worker.lease())
    assert (error.code(), "draining" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    bad = await refusal(worker.stub.Drain(worker_pb2.DrainRequest(timeout_s=-1), timeout=60))
    assert (bad.code(), "timeout_s" in bad.details()) == (INVALID_ARGUMENT, True)


async def test_a_loading_worker_reports_its_state() -> None:
    async with serve_worker(None) as worker:
        error = await refusal(worker.lease())
        assert (error.code(), "loading" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        error = await refusal(worker.step(worker_pb2.StepBatch()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_busy_engine_makes_progress_and_a_frozen_one_does_not() -> None:
    async with serve_worker(FakeRunner()) as worker:
        assert worker.executor.stalled_s == 0.0
        await worker.lease()
        row = Row(row=0, token_ids=[5, 6, 7], blocks=[0, 1, 2, 3])
        await worker.step(worker.batch([row], opens=[row]))
        assert worker.executor.stalled_s == 0.0  # idle
        worker.runner.gate.clear()
        sending = asyncio.ensure_future(worker.step(worker.batch([row])))
        async with asyncio.timeout(30):
            while not worker.executor.stalled_s > 0.2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        worker.runner.gate.set()
        await sending
        assert worker.executor.stalled_s == 0.0
