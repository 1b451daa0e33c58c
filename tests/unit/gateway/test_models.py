"""Several models behind one gateway, bundles, tokenizing, model properties, and the process itself."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire.v1.inference_pb2_grpc import InferenceServiceStub

from svc_common.serve import open_channel
from tests.processes.ports import free_port
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


async def test_each_model_has_its_scheduler(both: TestGateway, scheduler: FakeScheduler, second: FakeScheduler) -> None:
    scheduler.play([9])
    second.play([8])
    assert (await both.collect(model="demo")).ids() == [9]
    assert (await both.collect(model="other")).ids() == [8]


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


async def test_new_model_info_replaces_the_old_one(
    gateway: TestGateway, scheduler: FakeScheduler, bundle: bytes
) -> None:
    scheduler.info = make_info(bundle, max_model_len=64)
    scheduler.welcome()
    await until(lambda: gateway.clients[0].model.info.max_model_len == 64)
    assert gateway.clients[0].is_ready
    assert scheduler.num_bundle_calls == 1


async def test_list_and_get_model(both: TestGateway) -> None:
    models = (await both.stub.ListModels(pb.ListModelsRequest())).models
    assert [(m.info.model, m.ready_workers) for m in models] == [("demo", 2), ("other", 2)]
    model = (await both.stub.GetModel(pb.GetModelRequest(model="other"))).model
    assert (model.info.model, model.info.max_model_len) == ("other", 256)


async def test_status_asks_every_scheduler(both: TestGateway, second: FakeScheduler) -> None:
    await second.stop()
    await until(lambda: not both.clients[1].is_connected)
    status = await both.stub.GetStatus(pb.GetStatusRequest())
    first, gone = status.schedulers
    assert (first.address, first.model, first.connected, first.num_waiting) == (
        both.clients[0].address,
        "demo",
        True,
        4,
    )
    assert (gone.address, gone.connected) == (second.address, False)


async def test_tokenize(gateway: TestGateway) -> None:
    response = await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="Hello world")))
    assert (list(response.ids), response.max_model_len) == (encode("Hello world"), 256)
    long = "word " * 20_000
    response = await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=long)))
    assert list(response.ids) == encode(long)


async def test_detokenize(gateway: TestGateway) -> None:
    ids = encode("<|im_start|>Hi")
    shown = await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=ids))
    hidden = await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=ids, skip_special_tokens=True))
    assert (shown.text, hidden.text) == ("<|im_start|>Hi", "Hi")
    with pytest.raises(grpc.aio.AioRpcError, match="vocab_size is 500"):
        await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[500]))


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


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    response = await stub.Check(request, wait_for_ready=True, timeout=20)
    return int(response.status)


async def wait_for_health(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(30):
        while await health(channel) != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_process_serves_drains_and_exits_zero(bundle: bytes) -> None:
    fake = FakeScheduler(None, bundle)
    await fake.start()
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gateway_svc.service", "--listen", address, "--scheduler", fake.address]
    process = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220  (waited for in a thread)
    try:
        async with open_channel(address) as channel:
            await wait_for_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
            fake.info = make_info(bundle)
            await until(lambda: fake.num_attached)
            fake.welcome()
            await wait_for_health(channel, health_pb2.HealthCheckResponse.SERVING)
            assert await health(channel, "quire.v1.InferenceService") == health_pb2.HealthCheckResponse.SERVING
            stub = InferenceServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(tokens=types.TokenIds(ids=[5]))))
            await call.read()
            process.send_signal(signal.SIGTERM)
            await wait_for_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
            fake.finish(fake.submits[0].handle, ids=[9])
            assert list((await call.read()).chunk.token_ids) == [9]
            assert (await call.read()).HasField("finished")
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        await fake.stop()


def test_help_names_every_flag() -> None:
    command = [sys.executable, "-m", "gateway_svc.service", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for flag in ("--listen", "--scheduler", "--max-streams", "--scheduler-patience-s", "--drain-timeout-s", "example:"):
        assert flag in text


def test_the_gateway_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, gateway_svc.service;sys.exit(' '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


async def test_a_loaded_adapter_can_be_used_when_the_call_returns(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.play([7])
    scheduler.gives_bundle.clear()  # the tokenizer is loaded already
    await gateway.admin.LoadAdapter(pb.LoadAdapterRequest(name="poems", path="poems"))
    assert (await gateway.collect(adapter="poems")).ids() == [7]
