"""Two gateways with routes in Redis, in front of three simulated models: shares, flips under load, kills, shadows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack
from tests.unit.gateway.fakes import until

MODELS = {"v1": 90, "v2": 9, "v3": 1}
SIM = ("--executor", "sim", "--sim-step-ms", "2", "--sim-eos-probability", "0", "--max-num-seqs", "64")
PARALLEL = 32
LONG = 60  # tokens of requests that run during a flip


class Deployment:
    def __init__(self, stack: Stack, gateways: list[Service], clients: list[AsyncClient], redis: RedisServer) -> None:
        self.stack, self.gateways, self.clients, self.redis = stack, gateways, clients, redis

    async def route(self, *models: str, shadow: str = "") -> None:
        """Set the route on one gateway, and wait until both have it."""
        weights = {model: MODELS[model] for model in models}
        await self.clients[0].set_route("prod", weights, shadow=shadow)
        async with asyncio.timeout(30):
            while True:
                if await self.clients[0].routes() == await self.clients[1].routes():
                    return
                await asyncio.sleep(0.05)

    async def targets(self, turns: list[tuple[str, int]]) -> list[str]:
        """The target of each request, a turn of a conversation at a gateway."""
        gate = asyncio.Semaphore(PARALLEL)
        async with AsyncExitStack() as closing:
            channels = [await closing.enter_async_context(grpc.aio.insecure_channel(g.address)) for g in self.gateways]
            stubs = [InferenceServiceStub(channel) for channel in channels]

            async def ask(conversation: str, gateway: int) -> str:
                chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=conversation)])
                request = pb.GenerateRequest(model="prod", prompt=pb.Prompt(chat=chat))
                request.stop.max_tokens = 1
                async with gate:
                    events = [event async for event in stubs[gateway].Generate(request, timeout=120)]
                assert events[-1].HasField("finished")
                return events[0].accepted.target

            return await asyncio.gather(*(ask(*turn) for turn in turns))


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    with Stack(tmp_path) as stack, RedisServer(tmp_path) as redis:
        schedulers = [stack.start_scheduler() for _ in MODELS]
        for scheduler, name in zip(schedulers, MODELS, strict=True):
            stack.start_worker(scheduler, demo_model_dir(), *SIM, "--model-name", name)
        gateways = [stack.start_gateway(*schedulers, flags=("--redis", redis.url)) for _ in range(2)]
        clients = [await stack.connect(gateway) for gateway in gateways]
        try:
            yield Deployment(stack, gateways, clients, redis)
        finally:
            for client in clients:
                await client.close()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.deep)])
async def test_shares_follow_the_weights_and_no_conversation_switches(deployment: Deployment, count: int) -> None:
    await deployment.route(*MODELS)
    names = [f"conversation {i}" for i in range(count)]
    found = await deployment.targets([(name, i % 2) for i, name in enumerate(names)])
    again = await deployment.targets([(name, (i + 1) % 2) for i, name in enumerate(names[: count // 10])])
    assert again == found[: len(again)], "both gateways choose the same target"
    numbers = Counter(found)
    shares = {model: numbers[model] / count for model in MODELS}
    most = 0.005 if count == 10_000 else 0.05  # the standard deviation of 10,000 draws of 90 % is 0.003
    assert all(abs(shares[model] - weight / 100) <= most for model, weight in MODELS.items()), shares
    await deployment.clients[0].set_route("prod", {"v2": 1})
    assert set(await deployment.targets([(name, 0) for name in names[:50]])) == {"v2"}


@pytest.mark.deep
async def test_flips_kills_and_lost_shadows_lose_no_request(deployment: Deployment) -> None:
    await deployment.route("v1", shadow="v3")
    target = ",".join(gateway.address for gateway in deployment.gateways)
    num_done, is_over = 0, False

    async def load(client: AsyncClient, number: int) -> None:
        nonlocal num_done
        turn = 0
        while not is_over:
            turn += 1
            answer = await client.generate(f"{number} {turn}", model="prod", max_tokens=LONG, temperature=0.0)
            assert (len(answer.token_ids), answer.model) == (LONG, "prod")
            num_done += 1

    async def progress() -> None:
        wanted = num_done + 2 * PARALLEL
        await until(lambda: num_done >= wanted)

    async with await AsyncClient.connect(target) as client, asyncio.timeout(150), asyncio.TaskGroup() as tasks:
        for number in range(PARALLEL):
            tasks.create_task(load(client, number))
        await progress()
        await deployment.route("v2", shadow="v3")
        deployment.gateways[1].kill()
        await progress()
        deployment.gateways[1].start()
        deployment.stack.services[2].kill()  # the scheduler of the shadow
        await progress()
        deployment.redis.stop()
        await progress()
        deployment.redis.start()  # without the table
        deployment.gateways[1].wait_ready()
        await deployment.route("v1")
        await progress()
        is_over = True
    assert set(await deployment.targets([(str(i), i % 2) for i in range(20)])) == {"v1"}
