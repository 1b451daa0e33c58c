"""Sessions with real services: turns, forks and rewinds equal undisturbed runs, also after kills."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire_cli import main
from quire_client import AsyncSession, GenerateResult, Image, Message, NotConfigured, RequestNotFound
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, is_ready, wait_idle
from tests.processes.vision_model import make_folder
from tests.unit.engine.vision_models import IMAGE, VISION_END, VISION_START
from tests.unit.gateway.images import encoded, picture

PICTURE = encoded(picture(70, 50))
SIZES = ("--block-size", "8", "--num-blocks", "96", "--max-num-seqs", "8", "--dtype", "float32")
SIM = ("--executor", "sim", "--sim-step-ms", "1", "--num-blocks", "2048")
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
NUM_TOKENS = 14


def outputs(result: GenerateResult) -> list[list[int]]:
    return [list(sample.token_ids) for sample in result.samples]


@asynccontextmanager
async def resumed(session: AsyncSession, after: int = 0) -> AsyncIterator[GenerateResult]:
    async with session.resume(after=after) as stream:
        yield await stream.result()


async def test_turns_forks_and_rewinds_equal_undisturbed_runs(tmp_path: Path) -> None:
    """With an image, two samples, a seed, a grammar of its own for one turn, two gateways, and a worker that is killed:
    the KV is lost, and the tokens stay.
    """
    rng, folder = random.Random(3), make_folder(tmp_path / "model", "qwen2_5_vl")
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        worker = stack.start_worker(scheduler, folder, *SIZES)
        gateways = [stack.start_gateway(scheduler, flags=("--redis", redis.url)) for _ in range(2)]
        async with await stack.connect(gateways[0]) as client, await stack.connect(gateways[1]) as other:
            question = Message("user", parts=("w20 w21", Image(PICTURE), "w22"))
            options = SAMPLING | {"max_tokens": NUM_TOKENS}
            whole = outputs(await client.chat([question], n=2, **options))
            session = client.session(**options)
            assert outputs(await session.chat([question], n=2)) == whole
            before = session.id
            for _ in range(3):
                offset = rng.randint(0, NUM_TOKENS)
                rewound = await other.session(before).rewind(offset)
                (fork,) = await rewound.fork()
                async with resumed(fork) as result:
                    assert outputs(result) == whole
            worker.kill()
            worker.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            turn = await session.generate(token_ids=[22, 23], session_sample=1)
            assert session.id != before
            ids = [10, 20, 21, VISION_START, IMAGE, VISION_END, 22, 11, 12, *whole[1], 22, 23]
            assert outputs(turn) == outputs(await client.generate(token_ids=ids, images=[PICTURE], **options))
            checkpoint = await other.session(session.id).checkpoint()
            async with resumed(checkpoint, 4) as result:
                assert outputs(result) == [outputs(turn)[0][4:]]
            text = "".join(client_text(whole[0]))
            branch = other.session(before, **options)
            answer = await branch.chat("w30", session_sample=0)
            messages = [question, Message("assistant", text), Message("user", "w30")]
            assert outputs(answer) == outputs(await client.chat(messages, **options))
            assert answer.usage.cached_tokens > 0, "the turns before are cached"
            await wait_idle(stack, client)


def client_text(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" if i not in (IMAGE, VISION_START, VISION_END) else "" for i in ids)


async def test_the_command_lists_shows_and_deletes_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def quire(*words: str) -> str:
        code = await asyncio.to_thread(main, [*words, "--target", gateway.address])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *SIM)
        gateway = stack.start_gateway(scheduler, flags=("--record-memory", "16M"))
        async with await stack.connect(gateway) as client:
            assert "there are no sessions" in await quire("session", "list")
            session = client.session(max_tokens=5, temperature=0)
            await session.chat("Hello")
            whole = await session.chat("And then?")
            for start in range(6):
                async with resumed(session, start) as rest:
                    assert rest.token_ids == whole.token_ids[start:]
                    assert whole.text.endswith(rest.text)
            (fork,) = await session.fork()
            await fork.pin(5000)
            assert (await client.status()).pinned_sessions == 1
            shown = json.loads(await quire("session", "list", "--json"))["sessions"]
            assert [one["session_id"] for one in shown] == [fork.id, session.id]
            assert shown[0]["pinned_for_s"] > 4000
            assert fork.id in await quire("session", "list")
            text = await quire("session", "show", fork.id)
            assert session.id in text
            assert "5 tokens" in text
            await quire("session", "rm", session.id)
            with pytest.raises(RequestNotFound):
                await session.info()
            assert (await fork.info()).samples[0].num_tokens == 5
            (status,) = (await client.status()).schedulers
            assert status.num_running == 0
        plain = stack.start_gateway(scheduler)
        async with await stack.connect(plain) as client:
            with pytest.raises(NotConfigured, match="keeps no request records"):
                await client.session().chat("Hello")


@pytest.mark.parametrize("num_sessions", [40, pytest.param(1000, marks=pytest.mark.deep)])
async def test_paused_sessions_continue_over_three_workers_of_which_two_are_killed(
    tmp_path: Path, num_sessions: int
) -> None:
    """Each session is cut at a random offset of its first turn, resumed after the kills, and continued by a turn."""
    rng = random.Random(num_sessions)
    options = SAMPLING | {"max_tokens": 24}
    prompts = [[3 + (i * 7 + number) % 90 for i in range(20 + number % 50)] for number in range(num_sessions)]
    tail, moves = [4, 5, 6], ("--kv-transfer", "--kv-disk-size", "64M", "--kv-disk")
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        workers = [stack.start_worker(scheduler, demo_model_dir(), *SIM, *moves, str(tmp_path / f"{i}")) for i in "abc"]
        gateways = [stack.start_gateway(scheduler, flags=("--redis", redis.url)) for _ in range(2)]
        async with await stack.connect(gateways[0], workers=3) as client, await stack.connect(gateways[1]) as other:
            limit = asyncio.Semaphore(32)

            async def first(number: int) -> tuple[list[int], str]:
                async with limit:
                    session = client.session(**options)
                    result = await session.generate(token_ids=prompts[number])
                    return list(result.token_ids), (await session.rewind(rng.randint(0, 24))).id

            begun = await asyncio.gather(*map(first, range(num_sessions)))
            sizes = [memory_of(service) for service in (scheduler, *gateways)]
            for worker in workers[:2]:
                worker.kill()
            workers[0].start()

            async def second(number: int) -> None:
                async with limit:
                    whole, session_id = begun[number]
                    session = other.session(session_id, **options)
                    async with resumed(session) as result:
                        assert list(result.token_ids) == whole
                    turn = await session.generate(token_ids=tail)
                    again = await client.generate(token_ids=[*prompts[number], *whole, *tail], **options)
                    assert turn.token_ids == again.token_ids

            await asyncio.gather(*map(second, range(num_sessions)))
            await wait_idle(stack, client)
            if num_sessions >= 1000:
                growth = [
                    memory_of(service) - size for service, size in zip((scheduler, *gateways), sizes, strict=True)
                ]
                assert max(growth) < 40 << 20, growth


def memory_of(service: Service) -> int:
    """Bytes of resident memory."""
    assert service.process is not None
    text = Path(f"/proc/{service.process.pid}/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


async def test_grammars_penalties_and_adapters_of_a_session_stay(tmp_path: Path) -> None:
    """A rewound output goes on in the state of its grammar, with its penalties and its adapter."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    given = [word for name in ("one", "two") for word in ("--adapter", f"{name}={tmp_path / name}")]
    rng, options = random.Random(1), SAMPLING | {"max_tokens": 30, "n": 2, "adapter": "two", "request_id": "r"}
    cases: list[dict[str, Any]] = [
        {"regex": "[a-z]{3,40}( [a-z]+)*"},
        {"json_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
        {
            "repetition_penalty": 1.5,
            "frequency_penalty": 1.0,
            "logit_bias": {40: 5.0},
            "min_tokens": 20,
            "stop": ["zq"],
        },
    ]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *SIM, "--max-adapters", "2", *given)
        gateway = stack.start_gateway(scheduler, flags=("--record-memory", "16M"))
        async with await stack.connect(gateway) as client:
            for case in cases:
                kept = options | case
                result = await client.generate("What does", resumable=True, **kept)
                whole = outputs(result)
                for _ in range(3):
                    offset = rng.randint(0, max(map(len, whole)))
                    rewound = await client.session("r").rewind(offset)
                    info = await rewound.info()
                    assert (info.adapter, [s.num_tokens for s in info.samples]) == (
                        "two", [min(offset, len(ids)) for ids in whole],
                    )  # fmt: skip
                    async with resumed(rewound) as again:
                        assert outputs(again) == whole
                        assert [s.text for s in again.samples] == [s.text for s in result.samples]
                turn = await client.session("r").generate(" and", max_tokens=5, request_id="")
                ids = list((await client.tokenize("What does")).token_ids) + whole[0]
                ids += (await client.tokenize(" and", add_special_tokens=False)).token_ids
                same = kept | {"max_tokens": 5, "n": 1, "request_id": "", "min_tokens": 0}
                assert outputs(turn) == outputs(await client.generate(token_ids=ids, **same))
                other = await client.session("r").generate(" and", max_tokens=5, adapter="one", request_id="")
                assert other.token_ids != turn.token_ids or "json_schema" in case


async def test_blocks_of_conversations_outlive_those_of_single_prompts(tmp_path: Path) -> None:
    """Single prompts fill the pool between two turns. The next turn is cached with `conversation`, a session header or
    a prompt_cache_key only.
    """
    address = f"127.0.0.1:{free_port()}"
    prompts = [[3 + (i * 7 + number) % 90 for i in range(160)] for number in range(40)]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim", "--sim-step-ms", "1", "--num-blocks", "64")
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", address))
        async with await stack.connect(gateway) as client:

            async def post(path: str, body: dict[str, Any], **headers: str) -> Any:
                data, headers = json.dumps(body).encode(), {"content-type": "application/json", **headers}
                request = urllib.request.Request(f"http://{address}{path}", data, headers)
                return json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).read()))

            async def num_cached(kept: int) -> int:
                for prompt in prompts[1:9]:
                    await client.generate(token_ids=prompt, max_tokens=1)
                return (await client.generate(token_ids=prompts[kept], max_tokens=1)).usage.cached_tokens

            for kept, name in (0, ""), (20, "mine"):
                await client.generate(token_ids=prompts[kept], max_tokens=1, conversation=name)
                assert (await num_cached(kept) > 100) == bool(name)
            await post("/v1/completions", {"prompt": prompts[30], "max_tokens": 1}, **{"x-session-id": "s"})
            assert await num_cached(30) > 100
            text = " ".join(["word"] * 60)
            for key, is_kept in ("", False), ("k", True):
                body = {"input": f"{key} {text}", "max_output_tokens": 1, "prompt_cache_key": key}
                await post("/v1/responses", body)
                await num_cached(0)
                again = await post("/v1/responses", body)
                assert (again["usage"]["input_tokens_details"]["cached_tokens"] > 30) == is_kept
