"""Penalties, a grammar, two samples, logprobs and stop strings in one request: no kill changes its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.chaos.reference import Answers, answers_of
from tests.processes.ports import free_port
from tests.processes.stack import Stack, is_ready

PROMPT = "The module provides"
REGEX = r"([a-z]{2,9} ){30,40}QX( [a-z]{2,9}){9}"
SAMPLING: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 260}
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.4, "presence_penalty": 0.2}
MORE: dict[str, Any] = {"repetition_penalty": 1.15, "regex": REGEX, "bad_words": ["the", "is"], "min_tokens": 40}
STOP = ["QX"]  # matches near the end of the expression only
KINDS = ("worker", "scheduler", "gateway")
REACHED = 25  # tokens of a sample after which the process is killed


MAX_KILLS = 6  # all streams of the killed gateway may have ended, or all streams may be on the other one


class System:
    """Two gateways with HTTP, a scheduler and two slow workers."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.scheduler = stack.start_scheduler()
        flags = ("--dtype", "float32", "--num-blocks", "512", "--model-name", "demo")
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *flags) for _ in range(2)]
        self.http = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.gateways = [stack.start_gateway(self.scheduler, flags=("--http-listen", address)) for address in self.http]

    def kill(self, kind: str) -> None:
        """Kill a worker, the scheduler or, in turn, one of the gateways."""
        self.gateways.reverse()
        victim = {"worker": self.workers[0], "scheduler": self.scheduler, "gateway": self.gateways[0]}[kind]
        victim.kill()
        victim.start()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory):
    with Stack(tmp_path_factory.mktemp("everything")) as stack:
        yield System(stack)


@pytest.fixture
async def client(system: System) -> AsyncIterator[AsyncClient]:
    addresses = ",".join(gateway.address for gateway in system.gateways)
    for gateway in system.gateways:
        gateway.wait_ready()
    async with await AsyncClient.connect(addresses, timeout_s=120.0) as client:
        await system.stack.until(client, lambda all_: all(is_ready(all_, worker) for worker in system.workers))
        yield client


async def over_grpc(client: AsyncClient, on_tokens: Callable[[int], Awaitable[None]]) -> tuple[Answers, int]:
    """The answer, and how often the client resumed it. `on_tokens` gets the number of tokens of a sample so far."""
    options = SAMPLING | PENALTIES | MORE | {"logprobs": 3, "stop": STOP}
    async with client.stream(PROMPT, **options) as stream:
        async for delta in stream:
            await on_tokens(delta.offset + len(delta.token_ids))
        result = await stream.result()
    return answers_of(result), result.resumes


async def over_http(address: str, on_tokens: Callable[[int], Awaitable[None]]) -> list[Any]:
    """Text, finish reason and logprobs of each sample, from the stock client."""
    samples: list[Any] = [["", None, []] for _ in range(2)]
    extra = MORE | {"structured_outputs": {"regex": REGEX}}
    extra.pop("regex")
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, stream=True, logprobs=3, stop=STOP, extra_body=extra, **SAMPLING, **PENALTIES
        )
        async for chunk in stream:
            for choice in chunk.choices:
                sample = samples[choice.index]
                sample[0] += choice.text
                sample[1] = choice.finish_reason or sample[1]
                if choice.logprobs is not None:
                    sample[2] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
                await on_tokens(len(sample[2]))
    return samples


async def no_kill(num_tokens: int) -> None:
    """For a stream without a kill."""


class Killer:
    """Kills a process once, when a stream has REACHED tokens."""

    def __init__(self, system: System, kind: str) -> None:
        self._system = system
        self._kind = kind
        self.has_killed = False

    async def on_tokens(self, num_tokens: int) -> None:
        if not self.has_killed and num_tokens >= REACHED:
            self.has_killed = True
            self._system.kill(self._kind)


def check_that_everything_has_an_effect(answers: Answers) -> None:
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert answers[0].text != answers[1].text
    for answer in answers:
        assert len(answer.token_ids) > 2 * REACHED
        assert "the " not in answer.text
        logprobs, total, _ = answer.logprobs
        assert len(logprobs) == len(answer.token_ids)
        assert total == pytest.approx(sum(item.logprob for item in logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_kill_changes_nothing_over_grpc(system: System, client: AsyncClient, kind: str) -> None:
    expected, _ = await over_grpc(client, no_kill)
    check_that_everything_has_an_effect(expected)
    for _ in range(MAX_KILLS):
        killer = Killer(system, kind)
        results = await asyncio.gather(*(over_grpc(client, killer.on_tokens) for _ in range(4)))
        assert killer.has_killed
        assert [answers for answers, _ in results] == [expected] * 4
        if kind != "gateway" or any(resumes for _, resumes in results):
            break
    if kind == "gateway":
        assert any(resumes for _, resumes in results), "no stream was open on the gateway"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["worker", "scheduler"])
async def test_a_kill_changes_nothing_over_http(system: System, client: AsyncClient, kind: str) -> None:
    expected = await over_http(system.http[1], no_kill)
    answers, _ = await over_grpc(client, no_kill)
    assert [(text, end) for text, end, _ in expected] == [(answer.text, answer.finish_reason) for answer in answers]
    assert [[value for _, value in pairs] for _, _, pairs in expected] == [
        [item.logprob for item in answer.logprobs[0]] for answer in answers
    ]
    killer = Killer(system, kind)
    results = await asyncio.gather(*(over_http(system.http[1], killer.on_tokens) for _ in range(4)))
    assert killer.has_killed
    assert results == [expected] * 4
