"""A client that cancels, a deadline and Abort free rows and blocks at once, in any state of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from quire_client import AsyncClient, AsyncGenerateStream, DeadlineExceeded, FinishReason

from tests.processes.models import SHAPES, make_checkpoint
from tests.processes.stack import Service, Stack, wait_idle

MAX_MODEL_LEN = 32768
FLAGS = ("--dtype", "float32", "--num-blocks", "5000", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
# Without a cancel, one of these requests takes 30,000 steps: tens of seconds. With a deadline it could be refused.
LONG: dict[str, Any] = {"max_tokens": 30000, "temperature": 0.0, "ignore_eos": True, "timeout_s": None}
FEW_STEPS = 10000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Service]]:
    folder = tmp_path_factory.mktemp("cancel")
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, make_checkpoint(folder / "model", SHAPES[1], max_model_len=MAX_MODEL_LEN), *FLAGS)
        yield stack, stack.start_gateway(scheduler)


@pytest.fixture
async def client(running: tuple[Stack, Service]) -> AsyncIterator[AsyncClient]:
    """A client. After the test it checks that no block is in use and that a request is served, long before the
    requests of the test could end by themselves.
    """
    stack, gateway = running
    async with await stack.connect(gateway) as client:
        steps_before = (await client.status()).schedulers[0].steps
        yield client
        (status,) = await wait_idle(stack, client)
        assert status.steps - steps_before < FEW_STEPS
        assert len((await client.generate(token_ids=[7], max_tokens=3, ignore_eos=True)).token_ids) == 3


async def first_tokens(stream: AsyncGenerateStream) -> None:
    async for delta in stream:
        if delta.token_ids:
            return


async def test_cancelling_a_stream_that_decodes(client: AsyncClient) -> None:
    async with client.stream(token_ids=[1, 2, 3], **LONG) as stream:
        await first_tokens(stream)


async def test_cancelling_a_stream_during_its_prefill(client: AsyncClient) -> None:
    async with client.stream(token_ids=[3] * 100, **LONG):
        pass  # accepted; its prefill takes seven steps


async def test_cancelling_streams_that_wait(client: AsyncClient, running: tuple[Stack, Service]) -> None:
    streams = [client.stream(token_ids=[i], **LONG) for i in range(6)]
    await asyncio.gather(*(stream.__aenter__() for stream in streams))
    await running[0].until(client, lambda schedulers: schedulers[0].num_waiting >= 4)
    for stream in reversed(streams):
        stream.cancel()


async def test_a_task_that_is_cancelled_cancels_its_request(client: AsyncClient) -> None:
    is_answering = asyncio.Event()

    async def read() -> None:
        async with client.stream(token_ids=[1], **LONG) as stream:
            async for _ in stream:
                is_answering.set()

    task = asyncio.create_task(read())
    await is_answering.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_ends_a_request(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate(token_ids=[1], **LONG | {"timeout_s": 0.3})  # the speed of an idle worker is not known


async def test_abort_ends_streams_with_their_tokens_so_far(client: AsyncClient) -> None:
    ids = [f"abort-{i}" for i in range(4)]
    streams = [client.stream(token_ids=[i], request_id=ids[i], **LONG) for i in range(4)]
    await asyncio.gather(*(stream.__aenter__() for stream in streams))
    await first_tokens(streams[0])
    answer = await client.abort(*ids, "unknown")
    assert sorted(answer.aborted_ids) == ids
    assert answer.unknown_ids == ("unknown",)
    results = await asyncio.gather(*(stream.result() for stream in streams))
    assert all(result.finish_reason is FinishReason.ABORTED for result in results)
    assert all(len(result.token_ids) < LONG["max_tokens"] for result in results)


async def test_abort_reaches_a_stream_of_another_gateway(client: AsyncClient, running: tuple[Stack, Service]) -> None:
    stack, _ = running
    other = stack.start_gateway(stack.services[0])
    try:
        async with await stack.connect(other) as there, client.stream(token_ids=[5], request_id="mine", **LONG) as mine:
            await first_tokens(mine)
            answer = await there.abort("mine", "unknown")
            assert (answer.aborted_ids, answer.unknown_ids) == (("mine",), ("unknown",))
            assert (await mine.result()).finish_reason is FinishReason.ABORTED
    finally:
        other.kill()


async def test_a_client_that_closes_its_connection(client: AsyncClient, running: tuple[Stack, Service]) -> None:
    """The client sends no cancel."""
    other = await AsyncClient.connect(running[1].address)
    streams = [other.stream(token_ids=[i], **LONG) for i in range(3)]
    await asyncio.gather(*(stream.__aenter__() for stream in streams))
    await first_tokens(streams[0])
    await other.close()
