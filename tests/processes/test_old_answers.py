"""Old answers as drafts through real services: no token changes, also when everything is killed; owners are apart."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, InvalidRequest, NotConfigured, RequestNotFound
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, is_ready, read_page, wait_idle

METRICS = free_port()
FLAGS = ("--dtype", "float32", "--num-blocks", "512", "--max-num-seqs", "8", "--metrics-listen", f"127.0.0.1:{METRICS}")
SIM = ("--executor", "sim", "--sim-step-ms", "15")  # a message has one step
PROMPT = "Return the number of items in a list. What does len do?"
REGEX = "([a-z]{2,6} ){30}end"
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"seed": 1, "temperature": 1.0}, {"seed": 2, "n": 3, "top_p": 0.9},
    {"seed": 3, "frequency_penalty": 0.5}, {"seed": 4, "regex": REGEX}, {"seed": 5, "min_tokens": 60, "stop": ["q"]},
    {"seed": 6, "thinking_token_budget": 61, "thinking_end_ids": [9], "thinking_last_ids": [5, 8]},
)  # fmt: skip
OPTIONS: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}


def num_accepted() -> float:
    found = re.findall(r"^quire_worker_accepted_draft_tokens_total\{.*\} (\S+)$", read_page(METRICS), re.MULTILINE)
    return sum(map(float, found))


async def answer(client: AsyncClient, fields: dict[str, Any], **more: Any) -> list[Any]:
    result = await client.generate(PROMPT, **OPTIONS, **fields, **more)
    return [(sample.token_ids, sample.text, sample.finish_reason) for sample in result.samples]


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def start(stack: Stack, redis: RedisServer, *flags: str) -> tuple[Service, Service, list[Service], list[int]]:
    """A scheduler, its worker, and two gateways with their HTTP ports."""
    scheduler, ports = stack.start_scheduler("--redis", redis.url), [free_port(), free_port()]
    worker = stack.start_worker(scheduler, demo_model_dir(), *flags)
    http = [("--redis", redis.url, "--http-listen", f"127.0.0.1:{port}") for port in ports]
    return scheduler, worker, [stack.start_gateway(scheduler, flags=one) for one in http], ports


@pytest.mark.parametrize("speculate", [(), ("--speculate", "suffix")])
async def test_each_kind_of_draft_changes_no_token(tmp_path: Path, speculate: tuple[str, ...]) -> None:
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        _, worker, gateways, ports = start(stack, redis, *FLAGS, *speculate)
        async with await stack.connect(gateways[0]) as client, await stack.connect(gateways[1]) as other:
            ids = [f"old-{nth}" for nth in range(len(REQUESTS))]
            plain = [await answer(client, fields, speculative=False) for fields in REQUESTS]
            for fields, record_id in zip(REQUESTS, ids, strict=True):
                await answer(client, fields, request_id=record_id, resumable=True, speculative=False)
            assert await asyncio.to_thread(num_accepted) == 0
            foreign = [*plain[1:], plain[0]]
            drafts: list[dict[str, Any]] = [{"draft_of": record_id} for record_id in ids]
            drafts += [{"draft_token_ids": [*old[0][0][:30], 5, *old[0][0][31:]]} for old in plain]
            drafts += [{"draft_text": old[0][1] or "?"} for old in plain]
            drafts += [{"draft_token_ids": [10**6, *old[0][0]]} for old in foreign]
            assert [
                await answer(other, fields, **draft) for fields, draft in zip(REQUESTS, drafts, strict=False)
            ] == plain
            assert await asyncio.to_thread(num_accepted) > 50  # depends on the times of steps
            running = [
                asyncio.create_task(answer(other, fields, **draft))
                for fields, draft in zip(REQUESTS * 4, drafts, strict=True)
            ]
            is_killed = False
            async with other.stream(PROMPT, **OPTIONS, **REQUESTS[1], draft_of=ids[1]) as stream:
                async for delta in stream:
                    if delta.offset + len(delta.token_ids) >= 60 and not is_killed:
                        is_killed = True
                        worker.kill()
                        worker.start()
                        await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            assert await asyncio.wait_for(asyncio.gather(*running), 120) == plain * 4
            body = {"input": PROMPT, "max_output_tokens": 300, "temperature": 1, "seed": 7, "ignore_eos": True}
            first = await asyncio.to_thread(post, ports[0], "/v1/responses", body)
            again = await asyncio.to_thread(post, ports[1], "/v1/responses", {**body, "draft_of": first["id"]})
            assert first["output"][0]["content"] == again["output"][0]["content"]
            chat = {"messages": [{"role": "user", "content": PROMPT}], "seed": 7, "temperature": 1, "max_tokens": 80}
            old = (await asyncio.to_thread(post, ports[0], "/v1/chat/completions", chat))["choices"][0]
            chat["prediction"] = {"type": "content", "content": [{"type": "text", "text": old["message"]["content"]}]}
            new = await asyncio.to_thread(post, ports[0], "/v1/chat/completions", chat)
            assert new["choices"][0]["message"] == old["message"]
            await wait_idle(stack, client)


async def test_a_killed_gateway_and_an_expired_record_change_no_token(tmp_path: Path) -> None:
    """The client continues on the next gateway when the old answer is deleted."""
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        _, _, gateways, _ = start(stack, redis, *FLAGS)
        fields = REQUESTS[1] | {"draft_of": "old"}
        async with await stack.connect(gateways[0]) as client:
            (whole,) = await answer(client, REQUESTS[1], request_id="old", resumable=True)
            tokens, is_killed = list[int](), False
            async with client.stream(PROMPT, **OPTIONS, **fields) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
                    if len(tokens) >= 20 and not is_killed:
                        is_killed = True
                        await client.session("old").delete()
                        gateways[0].kill()
                        gateways[0].start()
            assert tuple(tokens) == whole[0]
            assert is_killed


async def test_records_of_others_do_not_exist(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for owner in "ab":
        (keys / owner).write_text(f"key-of-{owner}")
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *SIM)
        flags = ("--api-keys", str(keys))
        gateway = stack.start_gateway(scheduler, flags=(*flags, "--record-memory", "4M"))
        without = stack.start_gateway(scheduler, flags=flags)
        for one in (gateway, without):
            one.wait_ready()

        async def ask(owner: str, address: str, **options: Any) -> Any:
            async with await AsyncClient.connect(address, api_key=f"key-of-{owner}") as client:
                return await client.generate("Hello", max_tokens=4, **options)

        await ask("a", gateway.address, request_id="mine", resumable=True)
        await ask("a", gateway.address, draft_of="mine")
        refusals = []
        for owner, name in (("b", "mine"), ("a", "none")):
            with pytest.raises(RequestNotFound, match="there is no record") as error:
                await ask(owner, gateway.address, draft_of=name)
            refusals.append(str(error.value).replace(name, "ID"))
        assert refusals[0] == refusals[1]
        for options, words in (
            ({"draft_of": "no id"}, "draft_of"),
            ({"draft_of": "mine", "draft_text": "a"}, "draft_text is set together with draft_of"),
            ({"draft_token_ids": [1] * 65537}, "draft_token_ids has 65537 ids; at most 65536"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await ask("a", gateway.address, **options)
        with pytest.raises(NotConfigured, match="draft_of is set"):
            await ask("a", without.address, draft_of="mine")


@pytest.mark.parametrize("has_redis", [False, True])
async def test_a_regenerated_turn_has_the_former_answer(tmp_path: Path, has_redis: bool) -> None:
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *SIM, "--metrics-listen", f"127.0.0.1:{METRICS}")
        records = ("--redis", redis.url) if has_redis else ("--record-memory", "4M")
        gateway = stack.start_gateway(scheduler, flags=records)
        async with await stack.connect(gateway) as client:
            session = client.session(max_tokens=300, ignore_eos=True, seed=1)
            await session.chat("Hello")
            before, first = session.id, await session.chat("And then?")
            accepted = await asyncio.to_thread(num_accepted)
            again = await client.session(before, max_tokens=300, ignore_eos=True, seed=1).chat("And then?")
            assert again.token_ids == first.token_ids
            assert await asyncio.to_thread(num_accepted) > accepted
