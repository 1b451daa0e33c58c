"""Two schedulers of one model: the choice for a request, and the move when its scheduler is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.stream import MAX_CHUNK_TOKENS
from tests.unit.gateway.fakes import (
    ABORTED,
    CALL_TIMEOUT_S,
    LENGTH,
    FakeScheduler,
    TestGateway,
    digest_of,
    make_info,
    refused,
    rest,
    until,
)
from tests.unit.gateway.test_reconnect import continuation, ids_of, read_tokens

UNAVAILABLE, RESOURCE_EXHAUSTED, INVALID_ARGUMENT = 14, 8, 3


@pytest.fixture
async def pair(bundle: bytes) -> AsyncIterator[list[FakeScheduler]]:
    fakes = [FakeScheduler(make_info(bundle), bundle) for _ in range(2)]
    for epoch, fake in enumerate(fakes):
        fake.scheduler_epoch = 100 + epoch
        await fake.start()
    yield fakes
    for fake in fakes:
        await fake.stop()


@pytest.fixture
async def both(pair: list[FakeScheduler]) -> AsyncIterator[TestGateway]:
    async with TestGateway([fake.address for fake in pair]) as running:
        await running.ready()
        yield running


def owner_and_other(pair: list[FakeScheduler]) -> tuple[FakeScheduler, FakeScheduler]:
    """The scheduler that has the request, and the other scheduler."""
    first, second = pair
    return (first, second) if first.submits else (second, first)


async def start_one(gateway: TestGateway, pair: list[FakeScheduler], ids: list[int], **options: Any) -> Any:
    """A call after its first tokens, its events so far, the scheduler that has it, and the other scheduler."""
    call = gateway.generate(**options)
    await call.read()
    owner, other = owner_and_other(pair)
    owner.send(owner.submits[0].handle, ids)
    events = await read_tokens(call, len(ids))
    return call, events, owner, other


async def test_a_broken_stream_moves_its_requests_at_once(both: TestGateway, pair: list[FakeScheduler]) -> None:
    call, events, owner, other = await start_one(both, pair, [10, 11])
    other.play([10, 11, 12, 13])
    await owner.stop()
    events += await rest(call)
    assert ids_of(events) == [10, 11, 12, 13]
    assert events[-1].finished.output_digest == digest_of([10, 11, 12, 13])
    assert [event.event_seq for event in events] == list(range(1, len(events) + 1))
    again = other.submits[0]
    assert (again.takes_over, owner.submits[0].takes_over) == (True, False)
    assert list(again.continuation.samples[0].output_token_ids) == [10, 11]


async def test_a_second_revision_gets_no_request_while_the_first_has_workers(
    pair: list[FakeScheduler], bundle: bytes
) -> None:
    """Replicas with different checkpoints are an error of an operator, which must not show in tokens."""
    old, new = pair
    new.info = make_info(bundle, revision="r2", max_model_len=512)  # would be preferred for its longer limit
    await new.stop()
    async with TestGateway([new.address, old.address]) as gateway:
        await until(lambda: gateway.directory.is_ready)
        assert (await gateway.generate().read()).accepted.revision == "r1"
        await new.start()
        await until(lambda: gateway.directory.revisions("demo") == {"r1", "r2"})
        for _ in range(3):
            assert (await gateway.generate().read()).accepted.revision == "r1"
        await old.stop()
        await until(lambda: gateway.directory.revisions("demo") == {"r2"})
        assert (await gateway.generate().read()).accepted.revision == "r2"


@pytest.mark.parametrize("code", [UNAVAILABLE, RESOURCE_EXHAUSTED])
async def test_a_refused_request_is_sent_to_the_other_replica(
    both: TestGateway, pair: list[FakeScheduler], code: int
) -> None:
    for fake in pair:
        fake.play([10])
    refusal = scheduler_pb2.Refusal(code=code, message="no")
    for fake in pair:
        fake.refusals.append(refusal)
    error = await refused(both.generate())
    assert error.code().value[0] == code
    assert [len(fake.submits) for fake in pair] == [1, 1]

    pair[0].refusals.extend([refusal] * 20)
    results = await asyncio.gather(*(both.collect() for _ in range(20)))
    assert all(result.ids() == [10] for result in results)
    assert not any(submit.takes_over for fake in pair for submit in fake.submits)


async def test_the_client_gets_overloaded_rather_than_unavailable(both: TestGateway, pair: list[FakeScheduler]) -> None:
    pair[0].refusals.append(scheduler_pb2.Refusal(code=UNAVAILABLE, message="away", retry_after_ms=10))
    pair[1].refusals.append(scheduler_pb2.Refusal(code=RESOURCE_EXHAUSTED, message="full", retry_after_ms=700))
    error = await refused(both.generate())
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert error.trailing_metadata()["grpc-retry-pushback-ms"] == "700"


async def test_a_request_is_sent_to_a_replica_where_it_fits(
    both: TestGateway, pair: list[FakeScheduler], bundle: bytes
) -> None:
    pair[0].info = make_info(bundle, max_num_blocks=4)
    pair[0].welcome()
    await until(lambda: both.clients[0].info.max_num_blocks == 4)
    pair[1].play([10])
    for _ in range(5):
        await both.collect(stop=types.StopParams(max_tokens=100))
    assert (len(pair[0].submits), len(pair[1].submits)) == (0, 5)


async def test_an_invalid_request_is_not_sent_to_another_replica(both: TestGateway, pair: list[FakeScheduler]) -> None:
    for fake in pair:
        fake.refusals.append(scheduler_pb2.Refusal(code=INVALID_ARGUMENT, message="bad"))
    assert (await refused(both.generate())).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(len(fake.submits) for fake in pair) == 1


async def test_requests_move_from_a_replica_without_workers_and_it_gets_no_new_ones(
    both: TestGateway, pair: list[FakeScheduler]
) -> None:
    call, events, owner, other = await start_one(both, pair, [10, 11])
    other.play([10, 11, 12])
    owner.ready_workers = 0
    owner.welcome()
    events += await rest(call)
    assert ids_of(events) == [10, 11, 12]
    await until(lambda: owner.cancels)  # sent while the other scheduler answered
    assert [cancel.reason for cancel in owner.cancels] == [ABORTED]
    assert other.submits[0].takes_over
    await asyncio.gather(*(both.collect() for _ in range(10)))
    assert len(owner.submits) == 1


async def test_a_heartbeat_reports_the_load(both: TestGateway, pair: list[FakeScheduler]) -> None:
    for fake in pair:
        fake.play([10])
    pair[0].say(heartbeat=scheduler_pb2.SchedulerHeartbeat(pending_tokens=10**6, ready_workers=2))
    pair[1].say(heartbeat=scheduler_pb2.SchedulerHeartbeat(pending_tokens=10, ready_workers=2))
    await until(lambda: both.clients[0].load_tokens >= 10**6 and both.clients[1].load_tokens >= 10)
    await asyncio.gather(*(both.collect() for _ in range(10)))
    assert (len(pair[0].submits), len(pair[1].submits)) == (0, 10)


class FakeReader:
    """An index that has hits for every prompt."""

    def __init__(self, blocks: dict[int, int]) -> None:
        self.blocks = blocks
        self.asked: list[int] = []

    async def lookup(self, digests: list[bytes]) -> dict[int, int]:
        self.asked.append(len(digests))
        return self.blocks


@pytest.mark.parametrize("holder", [0, 1])
async def test_the_replica_with_the_cached_prefix_gets_the_request(pair: list[FakeScheduler], holder: int) -> None:
    reader = FakeReader({100 + holder: 12, 7: 12})
    for fake in pair:
        fake.play([10])
    async with TestGateway([fake.address for fake in pair], reader=reader) as gateway:
        await gateway.ready()
        prompt = pb.Prompt(tokens=types.TokenIds(ids=range(2, 202)))
        await gateway.collect(prompt=prompt)
        assert (len(pair[holder].submits), len(pair[1 - holder].submits)) == (1, 0)
        assert reader.asked == [200 // 16]
        await gateway.collect()
        assert len(reader.asked) == 1


# -- clients that resume a request -------------------------------------------------------------------------------------


async def test_a_resumed_request_replaces_its_former_stream(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    seeded = types.SamplingParams(seed=3)
    former = gateway.generate(request_id="a", sampling=seeded)
    await former.read()
    scheduler.send(scheduler.submits[0].handle, [10, 11, 12])
    await read_tokens(former, 3)
    latter = gateway.generate(request_id="a", sampling=seeded, continuation=continuation([10]))
    await latter.read()
    error = await refused(former)
    assert error.code() is grpc.StatusCode.ABORTED
    await until(lambda: len(scheduler.submits) == 2)
    assert scheduler.submits[1].takes_over
    assert [cancel.handle for cancel in scheduler.cancels] == [scheduler.submits[0].handle]
    scheduler.finish(scheduler.submits[1].handle, ids=[11, 12, 13], offset=1)
    assert ids_of(await rest(latter)) == [11, 12, 13]
    await until(lambda: gateway.num_open == 0)


async def test_a_resumed_request_waits_while_the_queue_is_full(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.refusals.append(scheduler_pb2.Refusal(code=RESOURCE_EXHAUSTED, message="full"))
    scheduler.play([10, 11])
    result = await gateway.collect(sampling=types.SamplingParams(seed=3), continuation=continuation([10]))
    assert result.ids() == [11]
    assert [submit.takes_over for submit in scheduler.submits] == [True, True]


# -- request metadata --------------------------------------------------------------------------------------------------


async def test_the_deadline_and_the_tenant_reach_the_scheduler(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([10])
    await gateway.collect(scheduling=pb.SchedulingParams(tenant_id="acme"))
    submit = scheduler.submits[0]
    assert submit.tenant_id == "acme"
    assert 0 < submit.deadline_ms <= 1000 * CALL_TIMEOUT_S + 1000  # gRPC rounds timeouts up
    request = pb.GenerateRequest(prompt=pb.Prompt(tokens=types.TokenIds(ids=[5])))
    async for _ in gateway.stub.Generate(request):
        pass
    assert not scheduler.submits[1].HasField("deadline_ms")


async def test_open_requests_are_limited_by_their_total_size(scheduler: FakeScheduler) -> None:
    async with TestGateway([scheduler.address], max_request_bytes=100) as gateway:
        await gateway.ready()
        prompt = pb.Prompt(tokens=types.TokenIds(ids=[5] * 60))
        call = gateway.generate(prompt=prompt)
        await call.read()
        error = await refused(gateway.generate(prompt=prompt))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-request-bytes" in error.details()
        scheduler.finish(scheduler.submits[0].handle, LENGTH)
        await rest(call)
        scheduler.play([10])
        await until(lambda: gateway.num_open == 0)
        assert (await gateway.collect(prompt=prompt)).ids() == [10]


# -- draining a worker -------------------------------------------------------------------------------------------------


async def test_a_worker_that_moved_to_another_scheduler_is_not_shown_as_lost(
    both: TestGateway, pair: list[FakeScheduler]
) -> None:
    pair[0].workers = [
        pb.WorkerInfo(worker_id="moved", state=types.WORKER_STATE_LOST),
        pb.WorkerInfo(worker_id="gone", state=types.WORKER_STATE_LOST),
    ]
    pair[1].workers = [pb.WorkerInfo(worker_id="moved", state=types.WORKER_STATE_READY)]
    response = await both.stub.GetStatus(pb.GetStatusRequest())
    assert [[worker.worker_id for worker in status.workers] for status in response.schedulers] == [["gone"], ["moved"]]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.DrainWorkerRequest(worker_id="w7"), grpc.StatusCode.NOT_FOUND, "'w7'; known workers: w0, w1"),
        (pb.DrainWorkerRequest(worker_id="w0", model="x"), grpc.StatusCode.NOT_FOUND, "known workers: none"),
        (pb.DrainWorkerRequest(), grpc.StatusCode.INVALID_ARGUMENT, "worker_id is empty"),
        (pb.DrainWorkerRequest(worker_id="w0", timeout_s=-1), grpc.StatusCode.INVALID_ARGUMENT, "timeout_s is -1"),
    ],
)
async def test_a_worker_that_cannot_be_drained(
    both: TestGateway, pair: list[FakeScheduler], request_: pb.DrainWorkerRequest, code: grpc.StatusCode, words: str
) -> None:
    pair[0].workers = [pb.WorkerInfo(worker_id="w1"), pb.WorkerInfo(worker_id="w0")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await both.admin.DrainWorker(request_)
    assert caught.value.code() is code
    assert words in caught.value.details()


# -- slow readers ------------------------------------------------------------------------------------------------------


async def test_many_pending_tokens_are_sent_in_several_chunks(scheduler: FakeScheduler, bundle: bytes) -> None:
    scheduler.info = make_info(bundle, max_model_len=8192, max_num_blocks=1024)
    async with TestGateway([scheduler.address]) as gateway:
        await gateway.ready()
        ids = [100 + i % 300 for i in range(5000)]
        scheduler.play(ids)
        result = await gateway.collect(stop=types.StopParams(max_tokens=5000, stop=["never"]))
        assert result.ids() == ids
        assert max(len(chunk.token_ids) for chunk in result.chunks) == MAX_CHUNK_TOKENS
        result.check_offsets()
        assert result.finished[0].output_digest == digest_of(ids)
