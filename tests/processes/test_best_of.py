"""best_of with real services: equal to its definition, also after any process was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_client import AsyncClient, GenerateResult, InvalidRequest, Sample
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, wait_idle

FLAGS = ("--dtype", "float32", "--num-blocks", "600", "--block-size", "16", "--max-num-seqs", "8")
REQUEST: dict[str, Any] = {"prompt": "What does", "seed": 7, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
LONG: dict[str, Any] = REQUEST | {"max_tokens": 500, "n": 2, "best_of": 4}
VARIANTS: Sequence[dict[str, Any]] = (
    {"n": 1, "best_of": 4},
    {"n": 3, "best_of": 8},
    {"n": 2, "best_of": 5, "logprobs": 3, "prompt_logprobs": 1},
    {"n": 2, "best_of": 5, "stop": ["e", "a"], "min_tokens": 3},
    {"n": 2, "best_of": 5, "ignore_eos": False, "regex": "[a-z]{2,9} [0-9]{1,4}"},
    {"n": 2, "best_of": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.9, "logit_bias": {9: 3.0}},
    {"n": 2, "best_of": 4, "prompt": None, "messages": [("user", "Who are you?")], "ignore_eos": False},
    {"n": 2, "best_of": 3, "temperature": 0.0},  # all samples are equal
)


async def by_hand(client: AsyncClient, options: dict[str, Any]) -> tuple[list[Sample], int]:
    """The best samples of a request for all of them, and the number of tokens of all."""
    all_ = {"logprobs": 0} | options | {"n": options["best_of"]}
    del all_["best_of"]
    result = await client.generate(**all_)
    ranked = sorted(result.samples, key=lambda sample: (-float(sample.cumulative_logprob or 0.0), sample.index))
    return ranked[: options["n"]], result.usage.output_tokens


def facts(samples: Sequence[Sample], *, with_logprobs: bool) -> list[Any]:
    return [
        (s.token_ids, s.text, s.finish_reason, s.matched, s.cumulative_logprob, s.logprobs if with_logprobs else ())
        for s in samples
    ]


def outputs(result: GenerateResult) -> list[Any]:
    return facts(result.samples, with_logprobs=True)


async def test_equal_to_its_definition(stack: Stack) -> None:
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        orders = set()
        for variant in VARIANTS:
            options = REQUEST | variant
            expected, num_tokens = await by_hand(client, options)
            result = await client.generate(**options)
            has_logprobs = "logprobs" in variant
            assert outputs(result) == facts(expected, with_logprobs=has_logprobs), variant
            assert [sample.index for sample in result.samples] == list(range(variant["n"]))
            assert result.usage.output_tokens + result.usage.discarded_tokens == num_tokens
            assert result.usage.total_tokens == result.usage.prompt_tokens + num_tokens
            assert bool(result.prompt_logprobs) == ("prompt_logprobs" in variant)
            orders.add(tuple(sample.index for sample in expected))
        assert any(order != tuple(range(len(order))) for order in orders)
        await wait_idle(stack, client)


async def test_unchanged_when_any_process_is_killed(stack: Stack) -> None:
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, demo_model_dir(), *FLAGS) for _ in range(2)]
    gateways = [stack.start_gateway(scheduler) for _ in range(2)]
    async with (
        await stack.connect(gateways[1], workers=2) as observer,
        await AsyncClient.connect([gateway.address for gateway in gateways]) as client,
    ):
        expected = outputs(await observer.generate(**LONG))
        assert all(len(sample[0]) == 500 for sample in expected)

        async with client.stream(**LONG, cache_salt="gateway") as stream:
            await busy_worker(stack, observer)
            gateways[0].kill()
            result = await stream.result()
        assert result.resumes == 1
        assert outputs(result) == expected

        request = asyncio.create_task(observer.generate(**LONG, cache_salt="worker"))
        name = await busy_worker(stack, observer)
        next(worker for worker in workers if worker.name == name).kill()
        assert outputs(await request) == expected

        request = asyncio.create_task(observer.generate(**LONG, cache_salt="scheduler"))
        await busy_worker(stack, observer)
        scheduler.kill()
        scheduler.start()
        assert outputs(await request) == expected


async def busy_worker(stack: Stack, client: AsyncClient) -> str:
    """The worker that runs the samples, some steps after it began."""
    before = {w.worker_id: w.steps for s in (await client.status()).schedulers for w in s.workers}
    found = await stack.until(
        client,
        lambda all_: any(
            w.rows_used == 4 and w.steps > before.get(w.worker_id, 0) + 30 for s in all_ for w in s.workers
        ),
    )
    return next(w.worker_id for s in found for w in s.workers if w.rows_used == 4)


async def test_a_client_that_has_a_part_gets_the_rest(stack: Stack) -> None:
    """The gateway was killed while it sent the samples."""
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
    options = REQUEST | {"n": 2, "best_of": 4}
    async with await stack.connect(stack.start_gateway(scheduler)) as client:
        whole = (await client.generate(**options)).samples
        state = types.SampleState(index=0, output_token_ids=whole[0].token_ids[:10])
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text="What does"),
            sampling=types.SamplingParams(seed=7, temperature=1.0, n=2, best_of=4),
            stop=types.StopParams(max_tokens=24, ignore_eos=True),
            continuation=types.Continuation(samples=[state]),
        )
        chunks = [event.chunk async for event in client.raw.Generate(request) if event.HasField("chunk")]
        rest = [[id_ for chunk in chunks if chunk.index == i for id_ in chunk.token_ids] for i in range(2)]
        assert rest == [list(whole[0].token_ids[10:]), list(whole[1].token_ids)]
        text = "".join(chunk.text for chunk in chunks if chunk.index == 0)
        assert text
        assert whole[0].text.endswith(text)


async def test_a_client_with_only_the_id_continues(stack: Stack, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        scheduler = stack.start_scheduler("--redis", redis.url)
        stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
        gateways = [stack.start_gateway(scheduler, flags=("--redis", redis.url)) for _ in range(2)]
        async with await stack.connect(gateways[0]) as client, await stack.connect(gateways[1]) as other:
            expected = (await other.generate(**LONG)).samples
            async with client.stream(**LONG, resumable=True, request_id="r", resume=False):
                await busy_worker(stack, other)
                gateways[0].kill()
            async with other.resume("r", after={1: 100}) as stream:
                result = await stream.result()
            assert [s.token_ids for s in result.samples] == [expected[0].token_ids, expected[1].token_ids[100:]]
            with pytest.raises(InvalidRequest, match="must be from 0 to 1"):
                async with other.resume("r", after={2: 1}) as stream:
                    await stream.result()


def start_http(stack: Stack, scheduler: Service) -> tuple[Service, str]:
    port = free_port()
    gateway = stack.start_gateway(scheduler, flags=("--http-listen", f"127.0.0.1:{port}"))
    return gateway, f"http://127.0.0.1:{port}"


async def test_http_returns_the_best_choices(stack: Stack) -> None:
    scheduler = stack.start_scheduler()
    stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
    gateway, url = start_http(stack, scheduler)
    body = REQUEST | {"n": 2, "best_of": 4}
    async with await stack.connect(gateway) as client, aiohttp.ClientSession(url) as session:

        async def post(**fields: Any) -> tuple[int, Any]:
            async with session.post("/v1/completions", json=body | fields) as reply:
                is_json = reply.content_type == "application/json"
                return reply.status, await (reply.json() if is_json else reply.text())

        expected = await client.generate(**REQUEST, n=2, best_of=4)
        status, answer = await post()
        assert (status, [choice["text"] for choice in answer["choices"]]) == (200, [s.text for s in expected.samples])
        usage = answer["usage"]
        assert usage["completion_tokens"] == 4 * 24  # usage counts all samples, like OpenAI's API
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4 * 24
        _, two = await post(prompt=["What does", "What does"])
        assert [choice["text"] for choice in two["choices"]] == 2 * [sample.text for sample in expected.samples]
        assert two["usage"]["completion_tokens"] == 8 * 24
        assert (await post(best_of=2, stream=True))[0] == 200
        refused = (
            ({"stream": True}, "best_of is 4, more than n, which is 2"),
            ({"best_of": 1}, "best_of is 1; must be at least n, 2"),
            ({"best_of": 0}, "best_of is 0; must be from 1 to 20"),
            ({"best_of": 21}, "best_of is 21; must be from 1 to 20"),
            ({"best_of": 9}, "best_of is 9; a worker of this model runs at most 8 samples at once"),
            ({"best_of": "four"}, "best_of is 'four'"),
        )
        for fields, words in refused:
            status, answer = await post(**fields)
            assert (status, answer["error"]["param"]) == (400, "best_of"), fields
            assert words in answer["error"]["message"]
        assert (await post())[0] == 200
