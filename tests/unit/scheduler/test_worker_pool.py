"""Workers over real gRPC: registration, leases, mismatches, losses, reconnects, drain."""

from __future__ import annotations

import asyncio
import time
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.workers import wire as worker_wire
from scheduler_svc.workers.adapters import Adapters
from svc_common.errors import InvalidRequestError, UnavailableError
from tests.unit.scheduler import toy_worker
from tests.unit.scheduler.conftest import MakeStack, Stack
from tests.unit.scheduler.fakes import until
from tests.unit.scheduler.toy_worker import BUNDLE, ToyGateway, ToyWorker, expected_tokens, make_info

PROMPT = [5, 6, 7, 8, 9]
DRAINING = types_pb2.WORKER_STATE_DRAINING


async def ready(stack: Stack, count: int = 1) -> None:
    await until(lambda: stack.parts.pool.num_ready == count)


async def finished(gateway: ToyGateway, *handles: int) -> None:
    await until(lambda: all((handle, 0) in gateway.finished for handle in handles))


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    ("field", "changes", "shown"),
    [
        ("model", {"model": "other"}, ("'toy'", "'other'")),
        ("quantization", {"revision": "r2", "quantization": "int8"}, ("'int8'", "none")),
        ("kv_cache_dtype", {"revision": "r2", "kv_cache_dtype": "fp8"}, ("'fp8'", "none")),
        ("weights_digest", {"revision": "r2", "weights_digest": "d2"}, ("'d2'", "none", "the same checkpoint")),
        ("revision", {"revision": "r2"}, ("'r1'", "'r2'")),
        ("numerics", {"revision": "r2", "numerics": "cuda/triton, sm_90"}, ("'cpu, avx2'", "'cuda/triton, sm_90'")),
        ("block_size", {"block_size": 8}, ("4", "8")),
        ("max_model_len", {"max_model_len": 128}, ("256", "128")),
        ("dtype", {"dtype": "bfloat16"}, ("'float32'", "'bfloat16'")),
        ("determinism", {"determinism": types_pb2.DETERMINISM_BEST_EFFORT}, ("exact", "best_effort")),
        ("bundle_digest", {"bundle_digest": b"x" * 16}, (b"x".hex() * 16,)),
    ],
)
async def test_a_worker_that_differs_is_refused_with_both_values(
    make_stack: MakeStack, field: str, changes: dict[str, object], shown: tuple[str, ...]
) -> None:
    stack = await make_stack()
    await stack.worker()
    await ready(stack)
    gateway = await stack.gateway()
    await gateway.submit(1, PROMPT, max_tokens=100)
    other = await stack.worker("w1", epoch=12, **changes)
    await until(lambda: other.refusals)
    [error] = other.refusals
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = error.details() or ""
    assert field in details
    assert all(value in details for value in shown)
    await finished(gateway, 1)
    assert gateway.tokens[1, 0] == expected_tokens(PROMPT, 100)
    assert stack.parts.pool.num_ready == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"build": "torch-2"}, "worker w1 has build 'torch-2', worker w0 has 'torch-1': a sequence that moves"),
        (
            {"determinism": types_pb2.DETERMINISM_BEST_EFFORT, "numerics": "cuda/flash, sm_89"},
            "worker w1 has numerics 'cuda/flash, sm_89', worker w0 has 'cpu, avx2': a sequence that moves",
        ),
    ],
)
async def test_workers_with_other_numerics_are_logged(
    make_stack: MakeStack, caplog: pytest.LogCaptureFixture, changes: dict[str, object], says: str
) -> None:
    stack = await make_stack()
    await stack.worker(determinism=changes.get("determinism", types_pb2.DETERMINISM_EXACT))
    await ready(stack)
    await stack.worker("w1", epoch=12, **changes)
    await ready(stack, 2)
    assert says in caplog.text


async def test_a_scheduler_accepts_its_pinned_revision_only(make_stack: MakeStack) -> None:
    stack = await make_stack("--revision", "r1")
    other = await stack.worker("w1", epoch=12, revision="r2")
    await until(lambda: other.refusals)
    assert "accepts only 'r1' (--revision)" in (other.refusals[0].details() or "")
    await stack.worker()
    await ready(stack)


async def test_a_first_worker_is_refused_while_another_scheduler_serves_another_revision(make_stack: MakeStack) -> None:
    """The schedulers of a model agree in the index that they share. A worker may replace a revision on purpose."""
    stack = await make_stack()
    claims: list[tuple[str, str, bool]] = []

    async def claim_revision(model: str, revision: str, *, replaces: bool) -> str:
        claims.append((model, revision, replaces))
        return "r0" if revision != "r0" and not replaces else ""

    stack.parts.index.claim_revision = claim_revision  # type: ignore[method-assign]
    worker = await stack.worker()
    await until(lambda: worker.refusals)
    assert "has revision 'r1' of model 'toy', but another scheduler serves revision 'r0'" in (
        worker.refusals[0].details() or ""
    )
    assert stack.parts.pool.num_ready == 0
    await worker.stop()
    await stack.worker("w1", epoch=12, replaces_revision=True)
    await ready(stack)
    assert claims[-1] == ("toy", "r1", True)


async def test_a_bundle_that_does_not_match_its_digest_is_refused(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker = ToyWorker(stack.address)
    worker.bundle = b"something else"
    stack.cleanup.push_async_callback(worker.stop)
    await worker.start()
    await until(lambda: worker.refusals)
    assert "bundle" in (worker.refusals[0].details() or "")
    assert stack.parts.pool.num_ready == 0


async def test_serves_the_bundle_to_gateways(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker, gateway = await stack.worker(), await stack.gateway()
    await ready(stack)
    request = scheduler_pb2.GetBundleRequest(digest=worker.info.bundle_digest)
    assert b"".join([piece.data async for piece in gateway.stub.GetBundle(request)]) == BUNDLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.GetBundle(scheduler_pb2.GetBundleRequest(digest=b"?")).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_unexpected_error_in_a_lease_loses_the_worker(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack()
    worker, gateway = await stack.worker(), await stack.gateway()
    await ready(stack)
    await gateway.submit(1, PROMPT, max_tokens=40)
    await until(lambda: len(gateway.tokens.get((1, 0), ())) > 3)
    with monkeypatch.context() as patch:
        patch.delattr(worker_wire, "step_output_from_proto")
        await until(lambda: worker.refusals)
    assert worker.refusals[0].code() is grpc.StatusCode.UNAVAILABLE
    assert "AttributeError" in caplog.text
    await finished(gateway, 1)
    assert gateway.tokens[1, 0] == expected_tokens(PROMPT, 40)


async def test_a_stopped_scheduler_does_not_blame_its_workers(make_stack: MakeStack) -> None:
    stack = await make_stack("--heartbeat-timeout-s", "1")
    worker = await stack.worker()
    await ready(stack)
    for _ in range(2):
        acknowledged = worker.num_acknowledged
        await until(lambda acknowledged=acknowledged: worker.num_acknowledged > acknowledged)  # type: ignore[misc]
        time.sleep(2.0)  # noqa: ASYNC251 - as if the process had been suspended
    acknowledged = worker.num_acknowledged
    await until(lambda: worker.num_acknowledged > acknowledged + 1)
    assert worker.refusals == []
    assert len(worker.lease_epochs) == 1


async def test_another_model_may_follow_when_the_first_is_unused(make_stack: MakeStack) -> None:
    stack = await make_stack()
    first, gateway = await stack.worker("w0"), await stack.gateway()
    await ready(stack)
    await gateway.submit(1, PROMPT, max_tokens=100)
    await until(lambda: gateway.tokens)
    await first.stop()
    await ready(stack, 0)
    early = await stack.worker("w1", epoch=12, revision="r2")
    await until(lambda: early.refusals)
    assert "revision" in (early.refusals[0].details() or "")
    await gateway.cancel(1)
    await finished(gateway, 1)
    await stack.worker("w2", epoch=13, revision="r2", model="next", max_model_len=512, block_size=8)
    await until(lambda: gateway.welcomes[-1].info.model == "next")
    assert gateway.welcomes[-1].info.max_model_len == 512
    await gateway.submit(2, PROMPT, max_tokens=300)
    await finished(gateway, 2)
    assert gateway.tokens[2, 0] == expected_tokens(PROMPT, 300)


async def test_a_step_that_takes_too_long_loses_the_worker(make_stack: MakeStack) -> None:
    stack = await make_stack("--step-timeout-s", "0.3")
    worker, gateway = await stack.worker(), await stack.gateway()
    await ready(stack)
    worker.gate.clear()
    await gateway.submit(1, PROMPT, max_tokens=4)
    await until(lambda: worker.refusals)
    worker.gate.set()
    assert "step 1 was not answered" in (worker.refusals[0].details() or "")
    await finished(gateway, 1)
    assert gateway.tokens[1, 0] == expected_tokens(PROMPT, 4)


async def test_heartbeats_are_answered_with_the_number_of_workers(make_stack: MakeStack) -> None:
    stack = await make_stack()
    await stack.worker("w0")
    await ready(stack)
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Register()
        late = scheduler_pb2.RegisterRequest(worker_id="w1", address="127.0.0.1:1", worker_epoch=5)
        for state, num_workers in ((None, None), (types_pb2.WORKER_STATE_LOADING, 2), (DRAINING, 1)):
            late.state = state or types_pb2.WORKER_STATE_LOADING
            await call.write(late)
            answer = await call.read()
            if num_workers is None:
                assert answer.HasField("accepted")
                continue
            assert answer.heartbeat_ack.num_workers == num_workers
            assert answer.heartbeat_ack.num_earlier == num_workers - 1
            count = await stub.CountWorkers(scheduler_pb2.CountWorkersRequest())
            assert count.num_workers == num_workers
        call.cancel()


async def test_two_live_workers_cannot_share_an_id(make_stack: MakeStack) -> None:
    stack = await make_stack()
    first = await stack.worker("w0", epoch=1)
    await ready(stack)
    second = await stack.worker("w0", epoch=2)
    await until(lambda: second.refusals)
    assert second.refusals[0].code() is grpc.StatusCode.ALREADY_EXISTS
    assert first.address in (second.refusals[0].details() or "")
    await first.stop()
    await until(lambda: second.lease_epochs)


async def test_release_errors_name_the_cause(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker, gateway = await stack.worker("w0"), await stack.gateway()
    await ready(stack)
    worker.drains = False
    for request, code, text in (
        (scheduler_pb2.ReleaseWorkerRequest(worker_id="x"), grpc.StatusCode.NOT_FOUND, "w0"),
        (
            scheduler_pb2.ReleaseWorkerRequest(worker_id="w0", timeout_s=-1),
            grpc.StatusCode.INVALID_ARGUMENT,
            "timeout_s",
        ),
        (scheduler_pb2.ReleaseWorkerRequest(worker_id="w0"), grpc.StatusCode.UNAVAILABLE, "did not drain"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.ReleaseWorker(request)
        assert caught.value.code() is code
        assert text in (caught.value.details() or "")
    await until(lambda: len(worker.lease_epochs) == 2)  # a worker that does not leave is leased again
    await ready(stack)


async def test_a_stale_epoch_counter_in_redis_does_not_lock_out_a_worker(make_stack: MakeStack) -> None:
    stack = await make_stack()
    epochs = iter([3, 0])

    async def next_epoch() -> int:
        return next(epochs)

    stack.parts.index.next_scheduler_epoch = next_epoch  # type: ignore[method-assign]
    worker = ToyWorker(stack.address)
    worker.scheduler_epoch = 50
    stack.cleanup.push_async_callback(worker.stop)
    await worker.start()
    await ready(stack)
    assert worker.lease_epochs == [51]


async def test_a_registration_with_missing_fields_is_refused_with_their_names(make_stack: MakeStack) -> None:
    stack = await make_stack()
    gateway = await stack.gateway()
    for message, field in (
        (scheduler_pb2.RegisterRequest(address="a:1"), "worker_id"),
        (scheduler_pb2.RegisterRequest(worker_id="w"), "address"),
        (
            scheduler_pb2.RegisterRequest(
                worker_id="w", address="a:1", state=types_pb2.WORKER_STATE_READY, worker_epoch=1
            ),
            "capacity",
        ),
    ):
        call = gateway.stub.Register()
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("num_blocks", 2**32 - 1, "4194304"),
        ("num_blocks", 20_000_000, "4194304"),
        ("num_blocks", 0, "4194304"),
        ("block_size", 512, "256"),
        ("block_size", 12, "power of two"),
        ("max_num_seqs", 2**32 - 1, "65536"),
        ("max_num_batched_tokens", 2**32 - 1, "4194304"),
        ("pipeline_depth", 2**32 - 1, "64"),
        ("info.max_model_len", 2**32 - 1, "33554432"),
        ("info.vocab_size", 2**32 - 1, "16777216"),
    ],
)
async def test_an_absurd_capacity_is_refused_and_the_other_workers_serve(
    make_stack: MakeStack, field: str, value: int, limit: str
) -> None:
    stack = await make_stack()
    await stack.worker()
    gateway = await stack.gateway()
    await ready(stack)
    request = make_registration()
    *path, name = field.split(".")
    setattr(attrgetter(".".join(["capacity", *path]))(request), name, value)
    call = gateway.stub.Register()
    await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert f"capacity.{field} is {value}" in details
    assert limit in details
    await gateway.submit(1, PROMPT, max_tokens=3)
    await finished(gateway, 1)


def test_the_largest_capacity_passes_and_more_tokens_than_a_pool_may_hold_do_not() -> None:
    request = make_registration()
    request.capacity.num_blocks = 1 << 22
    assert worker_wire.capacity_from_proto(request).num_blocks == 1 << 22
    request.capacity.block_size = 32
    with pytest.raises(InvalidRequestError, match="the pool holds 134217728 tokens; must be at most 67108864"):
        worker_wire.capacity_from_proto(request)


def test_too_many_eos_token_ids_are_refused() -> None:
    request = make_registration()
    request.capacity.info.eos_token_ids.extend([1] * 1024)
    with pytest.raises(InvalidRequestError, match=r"eos_token_ids has 1025 ids; must have at most 1024"):
        worker_wire.capacity_from_proto(request)


def make_registration() -> scheduler_pb2.RegisterRequest:
    """A valid registration of a READY worker."""
    capacity = scheduler_pb2.WorkerCapacity(
        info=make_info(block_size=16), num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64,
        pipeline_depth=2,
    )  # fmt: skip
    return scheduler_pb2.RegisterRequest(
        worker_id="absurd", address="a:1", state=types_pb2.WORKER_STATE_READY, worker_epoch=1, capacity=capacity
    )


async def test_a_token_outside_the_vocabulary_fails_its_row_only(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack()
    await stack.worker()
    gateway = await stack.gateway()
    await ready(stack)
    with monkeypatch.context() as patch:
        patch.setattr(toy_worker, "next_token", lambda history, sample_index: 10**6)
        await gateway.submit(1, PROMPT, max_tokens=3)
        await finished(gateway, 1)
    assert gateway.finished[1, 0].reason == types_pb2.FINISH_REASON_ERROR
    assert (1, 0) not in gateway.tokens or gateway.tokens[1, 0] == []
    await gateway.submit(2, PROMPT, max_tokens=3)
    await finished(gateway, 2)
    assert gateway.tokens[2, 0] == expected_tokens(PROMPT, 3)


async def test_stopping_ends_streams_quickly(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker, gateway = await stack.worker(), await stack.gateway()
    await ready(stack)
    async with asyncio.timeout(20):
        stack.parts.gateways.close()
        await stack.parts.pool.close()
        await until(lambda: gateway.call.done() and worker.refusals)
    assert "stopping" in (worker.refusals[0].details() or "")


@pytest.mark.parametrize(("block_id", "count"), [(b"", 1), (b"\1\0\0\0", 10_000)])
async def test_a_list_of_blocks_without_end_is_refused(
    make_stack: MakeStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    block_id: bytes,
    count: int,
) -> None:
    async def list_blocks(worker: ToyWorker, request: Any, context: Any) -> Any:
        for _ in range(count):
            yield worker_pb2.ListBlocksResponse(block_ids=block_id, hashes=b"x" * 16)

    monkeypatch.setattr(ToyWorker, "ListBlocks", list_blocks)
    stack = await make_stack()
    await stack.worker()
    await until(lambda: "an empty or undecodable message, or more than the 64 blocks of the pool" in caplog.text)
    assert stack.parts.pool.num_ready == 0


async def test_an_adapter_whose_unload_failed_is_unloaded_when_the_worker_reports_it() -> None:
    loop, adapter = MagicMock(), worker_pb2.WorkerAdapter(name="a", digest=b"d")
    loop.core.adapters.num_requests_with.return_value = 0
    unload = AsyncMock(side_effect=[UnavailableError("the worker does not answer"), True])
    link: Any = SimpleNamespace(worker_id="w0", calls=SimpleNamespace(unload_adapter=unload))
    adapters = Adapters(loop, lambda: "m", lambda: None)
    adapters.join(link, [adapter])
    assert await adapters.remove("a")
    adapters.on_heartbeat(link, [adapter])
    await until(lambda: unload.await_count == 2)
    assert not adapters.known
