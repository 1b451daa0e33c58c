"""The Responses API of real services with the stock OpenAI client: a killed gateway, other gateways, cancel."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire_client.demo import demo_model_dir

from tests.chat_templates import HERMES
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, wait_idle

MODEL = "demo"
LONG: dict[str, Any] = {
    "model": MODEL,
    "input": "What does os.path.join do?",
    "max_output_tokens": 800,
    "temperature": 0.9,
    "extra_body": {"ignore_eos": True, "seed": 7},
}


class Running:
    """One scheduler, one worker, Redis, and two gateways with HTTP."""

    def __init__(self, stack: Stack, redis: RedisServer) -> None:
        self.stack = stack
        self.redis = redis
        self.scheduler = stack.start_scheduler("--insecure", "--redis", redis.url)
        # An answer takes seconds, so that a kill comes before its end although the client reads late.
        flags = ("--executor", "sim", "--sim-step-ms", "8", "--num-blocks", "2048", "--model-name", MODEL)
        stack.start_worker(self.scheduler, demo_model_dir(), *flags)
        self.first, self.first_url = self.start_gateway()
        self.second, self.second_url = self.start_gateway()
        self.answer = ""  # the text of an undisturbed run, which is always the same

    def start_gateway(self, *more: str) -> tuple[Service, str]:
        address = f"127.0.0.1:{free_port()}"
        flags = ("--http-listen", address, "--redis", self.redis.url, *more)
        return self.stack.start_gateway(self.scheduler, flags=flags), f"http://{address}/v1"


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("responses")
    with RedisServer(folder) as redis, Stack(folder) as stack:
        yield Running(stack, redis)


@pytest.fixture
async def running(system: Running) -> AsyncIterator[Running]:
    """Both gateways serve. After the test nothing runs."""
    if not system.first.is_running:
        system.first.start()
    async with await system.stack.connect(system.first) as client, await system.stack.connect(system.second) as other:
        assert await client.models()
        yield system
        await wait_idle(system.stack, other)


class Received:
    """The parts of a response that a client has received."""

    def __init__(self) -> None:
        self.response_id = ""
        self.text = ""
        self.number = -1
        self.types: list[str] = []
        self.final: Any = None

    async def read(self, stream: Any, *, at: int, then: Callable[[], None]) -> None:
        """Read a stream to its end. Call `then` once, when more than `at` characters have arrived."""
        is_called = False
        async for event in stream:
            self.take(event)
            if len(self.text) > at and not is_called:
                is_called = True
                then()

    def take(self, event: Any) -> None:
        assert event.sequence_number > self.number
        self.number = event.sequence_number
        self.types.append(event.type)
        if event.type == "response.created":
            self.response_id = event.response.id
            assert (event.response.model, event.response.created_at > 0) == (MODEL, True)
        if event.type in ("response.output_text.delta", "response.custom_tool_call_input.delta"):
            self.text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            self.final = event.response


async def undisturbed(running: Running, client: openai.AsyncOpenAI) -> str:
    if not running.answer:
        answer = await client.responses.create(**LONG)
        assert answer.status == "incomplete"
        running.answer = answer.output_text
    return running.answer


async def test_log_probabilities_are_those_of_chats_after_a_kill_too(running: Running) -> None:
    scored: dict[str, Any] = {**LONG, "max_output_tokens": 300, "top_logprobs": 2, "background": True}
    scored["include"] = ["message.output_text.logprobs"]
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        chat = await second.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": LONG["input"]}],
            max_tokens=300,
            temperature=LONG["temperature"],
            logprobs=True,
            top_logprobs=2,
            extra_body=LONG["extra_body"],
        )
        assert chat.choices[0].logprobs is not None
        expected = [one.model_dump() for one in chat.choices[0].logprobs.content or ()]
        deltas, received = [], Received()
        async for event in await second.responses.create(**scored, stream=True):
            received.take(event)
            if event.type == "response.output_text.delta":
                deltas += [one.to_dict() for one in event.logprobs]
        found = [one.to_dict() for one in received.final.output[0].content[0].logprobs]
        assert found == deltas == expected
        stored: Any = await first.responses.retrieve(received.response_id)
        assert stored == received.final

        received = Received()
        stream = await first.responses.create(**scored, stream=True)
        with pytest.raises(openai.APIConnectionError):
            await received.read(stream, at=100, then=running.first.kill)
        rest = await second.responses.retrieve(received.response_id, stream=True, starting_after=received.number)
        async for event in rest:
            received.take(event)
        assert [one.to_dict() for one in received.final.output[0].content[0].logprobs] == expected


async def test_a_background_stream_continues_on_another_gateway_after_a_kill(running: Running) -> None:
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        expected = await undisturbed(running, second)
        received = Received()
        stream = await first.responses.create(**LONG, background=True, stream=True)
        with pytest.raises(openai.APIConnectionError):
            await received.read(stream, at=len(expected) // 3, then=running.first.kill)
        assert len(received.text) < len(expected)
        assert received.types[:3] == ["response.created", "response.queued", "response.in_progress"]

        number = received.number
        rest = await second.responses.retrieve(received.response_id, stream=True, starting_after=number)
        async for event in rest:
            received.take(event)
        assert received.text == expected
        assert received.final.status == "incomplete"
        assert received.final.output[0].content[0].text == expected

        # The same position again, now from the stored response: the same characters, in other pieces.
        async with second.responses.stream(response_id=received.response_id, starting_after=number) as again:
            texts = [event.delta async for event in again if event.type == "response.output_text.delta"]
        assert expected.endswith("".join(texts))
        assert len("".join(texts)) == len(expected) - len(received.text[: len(expected) - len("".join(texts))])

        stored = await second.responses.retrieve(received.response_id)
        assert stored == received.final


async def test_a_stream_of_a_gateway_that_shuts_down_continues_on_another(running: Running) -> None:
    leaving, url = running.start_gateway("--drain-timeout-s", "0")
    async with await running.stack.connect(leaving), client_of(url) as first, client_of(running.second_url) as second:
        expected = await undisturbed(running, second)
        received = Received()
        stream = await first.responses.create(**LONG, stream=True)
        with pytest.raises(openai.APIConnectionError):
            await received.read(stream, at=50, then=lambda: leaving.signal(signal.SIGTERM))
        assert 50 < len(received.text) < len(expected)
        async for event in await second.responses.retrieve(
            received.response_id, stream=True, starting_after=received.number
        ):
            received.take(event)
        assert received.text == expected


async def test_a_background_response_is_completed_for_a_poll_on_another_gateway(running: Running) -> None:
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        expected = await undisturbed(running, second)
        response = await first.responses.create(**LONG, background=True)
        assert response.status == "queued"
        running.first.kill()
        async with asyncio.timeout(60):
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(0.1)
                response = await second.responses.retrieve(response.id)
        assert response.output_text == expected
        assert response.usage is not None
        assert response.usage.output_tokens == LONG["max_output_tokens"]


async def test_two_gateways_give_the_events_of_one_run(running: Running) -> None:
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        expected = await undisturbed(running, second)
        begun = await first.responses.create(**LONG, background=True)

        async def read(client: openai.AsyncOpenAI) -> Received:
            received = Received()
            async for event in await client.responses.retrieve(begun.id, stream=True):
                received.take(event)
            return received

        one, other = await asyncio.gather(read(first), read(second))
        assert one.text == other.text == expected
        assert one.final == other.final


async def test_cancel_frees_the_blocks_from_any_gateway(running: Running) -> None:
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        for client in (first, second):
            endless = {**LONG, "max_output_tokens": 800}
            begun = await first.responses.create(**endless, background=True)
            cancelled = await client.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            assert (await second.responses.retrieve(begun.id)).status == "cancelled"
            await second.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                await first.responses.retrieve(begun.id)


async def test_a_conversation_continues_from_a_stored_response(running: Running) -> None:
    async with client_of(running.first_url) as first, client_of(running.second_url) as second:
        options: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 20}
        one = await first.responses.create(**options, input="What does len do?", instructions="Be brief.")
        two = await second.responses.create(**options, input="And max?", previous_response_id=one.id)
        whole = await second.responses.create(
            **options,
            input=[
                {"role": "user", "content": "What does len do?"},
                {"role": "assistant", "content": one.output_text},
                {"role": "user", "content": "And max?"},
            ],
            store=False,
        )
        assert two.output_text == whole.output_text
        assert two.usage is not None
        assert whole.usage is not None
        assert two.usage.input_tokens == whole.usage.input_tokens
        assert [item.content[0].text async for item in await first.responses.input_items.list(two.id)] == ["And max?"]
        with pytest.raises(openai.NotFoundError):
            await second.responses.retrieve(whole.id)


async def test_a_patch_continues_on_another_gateway_after_a_kill(tmp_path: Path) -> None:
    """A custom tool's call under its grammar, streamed: the same events from the second gateway."""
    template = tmp_path / "tools.jinja"
    template.write_text(HERMES)
    form = {"type": "grammar", "syntax": "regex", "definition": r"(\+[a-z \"]{8,20}\n){40}"}
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "Fix it.",
        "tools": [{"type": "custom", "name": "patch", "format": form}],
        "tool_choice": "required",
        "extra_body": {"seed": 5, "parallel_tool_calls": False},
    }
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--insecure", "--redis", redis.url)
        worker = ("--kv-cache-memory", "64M", "--dtype", "float32", "--model-name", MODEL)
        stack.start_worker(scheduler, demo_model_dir(), *worker)
        flags = ("--redis", redis.url, "--chat-template", f"default={template}", "--reasoning-parser", "none")
        urls = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        gateways = [stack.start_gateway(scheduler, flags=(*flags, "--http-listen", url)) for url in urls]
        async with (
            await stack.connect(gateways[0]),
            await stack.connect(gateways[1]),
            client_of(f"http://{urls[0]}/v1") as first,
            client_of(f"http://{urls[1]}/v1") as second,
        ):
            expected = (await second.responses.create(**body)).output[0].input  # type: ignore[union-attr]
            assert len(expected.splitlines()) == 40
            received = Received()
            stream = await first.responses.create(**body, background=True, stream=True)
            with pytest.raises(openai.APIConnectionError):
                await received.read(stream, at=100, then=gateways[0].kill)
            assert 100 < len(received.text) < len(expected)
            rest = await second.responses.retrieve(received.response_id, stream=True, starting_after=received.number)
            async for event in rest:
                received.take(event)
            assert (received.text, received.final.output[0].input) == (expected, expected)
