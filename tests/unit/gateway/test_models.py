"""Several models behind one gateway, bundles, tokenizing, model properties, and the process itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from quire.v1 import inference_pb2 as pb

from tests.unit.gateway.fakes import FakeScheduler, TestGateway, make_bundle, make_info, refused, until
from tests.unit.gateway.tokenizer_kinds import byte_level

ROOT = Path(__file__).parents[3]
TOKENIZER = byte_level()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
async def second(bundle: bytes) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(make_info(bundle, model="other"), bundle)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def both(scheduler: FakeScheduler, second: FakeScheduler) -> AsyncIterator[TestGateway]:
    async with TestGateway([scheduler.address, second.address]) as running:
        yield await running.ready()


async def test_the_model_must_be_named_if_there_are_several(both: TestGateway) -> None:
    error = await refused(both.generate())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'demo', 'other'" in error.details()


async def test_the_error_for_an_unknown_model_lists_the_served_models(both: TestGateway) -> None:
    error = await refused(both.generate(model="gpt"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'gpt'" in error.details()
    assert "'demo', 'other'" in error.details()


async def test_equal_bundles_are_fetched_once(
    both: TestGateway, scheduler: FakeScheduler, second: FakeScheduler
) -> None:
    assert scheduler.num_bundle_calls + second.num_bundle_calls == 1


async def test_the_connected_replica_of_a_model_serves_it(scheduler: FakeScheduler, second: FakeScheduler) -> None:
    second.info = scheduler.info
    second.play([2])
    async with TestGateway([scheduler.address, second.address]) as gateway:
        await gateway.ready()
        await scheduler.stop()
        await until(lambda: not gateway.clients[0].is_ready)
        assert (await gateway.collect()).ids() == [2]
        models = (await gateway.stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.info.model, m.ready_workers) for m in models] == [("demo", 2)]


async def test_no_model_yet_is_unavailable_with_a_retry_delay(bundle: bytes) -> None:
    fake = FakeScheduler(None)
    await fake.start()
    async with TestGateway([fake.address]) as gateway:
        await until(lambda: gateway.clients[0].is_connected)
        error = await refused(gateway.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no worker has registered" in error.details()
        assert error.trailing_metadata()["grpc-retry-pushback-ms"] == "1000"
    await fake.stop()


async def test_a_damaged_bundle_keeps_the_model_unavailable_and_is_reported(scheduler: FakeScheduler) -> None:
    scheduler.bundle += b"x"
    async with TestGateway([scheduler.address]) as gateway:
        await until(lambda: "damaged" in gateway.clients[0].problem)
        error = await refused(gateway.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "damaged" in error.details()


async def test_a_replica_gets_the_bundle_when_the_scheduler_that_loads_it_is_lost(
    scheduler: FakeScheduler, second: FakeScheduler
) -> None:
    scheduler.gives_bundle.clear()
    second.info = None
    async with TestGateway([scheduler.address, second.address]) as gateway:
        await until(lambda: scheduler.num_bundle_calls)
        second.info, scheduler.info = scheduler.info, None
        second.welcome()
        await until(lambda: gateway.clients[1].info is not None)
        assert second.num_bundle_calls == 0
        scheduler.hang_up()
        await until(lambda: gateway.clients[1].is_ready)
        assert (scheduler.num_bundle_calls, second.num_bundle_calls) == (1, 1)


async def test_other_streams_continue_while_a_long_text_is_tokenized(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.play([9])
    text = "the quick brown fox " * 100_000
    slow = asyncio.create_task(_tokenize(gateway, text))
    await until(lambda: gateway.threads.calls._large._work_queue.qsize() == 0 and gateway.threads.calls._large._threads)
    assert (await gateway.collect()).ids() == [9]
    assert not slow.done()
    await slow


async def _tokenize(gateway: TestGateway, text: str) -> None:
    await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text)))


async def test_a_checkpoint_without_tokenizer_serves_token_ids() -> None:
    data = make_bundle({})
    fake = FakeScheduler(make_info(data), data)
    await fake.start()
    fake.play([9, 10])
    async with TestGateway([fake.address]) as gateway:
        await gateway.ready()
        result = await gateway.collect()
        assert (result.ids(), result.text()) == ([9, 10], "")
    await fake.stop()


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_gateway_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, gateway_svc.service;sys.exit(' '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
