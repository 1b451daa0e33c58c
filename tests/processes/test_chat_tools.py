"""Tool calls with real services: forced by grammars, read by the SDK and OpenAI's client, and with killed processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field
from quire_client import AsyncClient, FinishReason, GenerateResult, InvalidRequest, Message
from quire_client.demo import demo_model_dir

from tests.chat_templates import HERMES
from tests.processes.ports import free_port
from tests.processes.stack import ROOT, Service, Stack, wait_idle

MODEL = "demo"
WORKER = ("--kv-cache-memory", "64M", "--dtype", "float32", "--model-name", MODEL, "--determinism", "exact")
QUESTION: Any = [{"role": "user", "content": "Do I need an umbrella?"}]
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "note": {"type": "string", "maxLength": 8}},
            "required": ["city", "note"],
            "additionalProperties": False,
        },
    },
}
NUM_CITIES = 60  # their output takes much longer than a kill
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ROUTE: Any = {
    "type": "function",
    "function": {
        "name": "route",
        "parameters": {
            "type": "object",
            "properties": {
                "cities": {"type": "array", "items": {"enum": CITIES}, "minItems": NUM_CITIES, "maxItems": NUM_CITIES}
            },
            "required": ["cities"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, CLOCK]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 300}


class Running:
    """A stack with HTTP whose chats use a template with tools."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        template = folder / "tools.jinja"
        template.write_text(HERMES)
        self.stack = stack
        self.scheduler = stack.start_scheduler()
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *WORKER) for _ in range(2)]
        address = f"127.0.0.1:{free_port()}"
        # With random sampling, the demo model may begin reasoning and never end it.
        flags = ("--chat-template", f"default={template}", "--reasoning-parser", f"{MODEL}=none")
        self.gateway = stack.start_gateway(self.scheduler, flags=(*flags, "--http-listen", address))
        self.url = f"http://{address}/v1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tools")
    with Stack(folder) as stack:
        yield Running(stack, folder)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    """A client over gRPC. After the test nothing runs and no block is in use."""
    async with await running.stack.connect(running.gateway, workers=2) as client:
        yield client
        await wait_idle(running.stack, client)


@pytest.fixture
async def http(running: Running, client: AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of the HTTP API."""
    async with openai.AsyncOpenAI(base_url=running.url, api_key="unused", max_retries=0) as http:
        yield http


def check_call(name: str, arguments: str) -> None:
    """The call is one of TOOLS, and its arguments match the tool's schema."""
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
        return
    assert name == "weather"
    assert set(value) == {"city", "note"}
    assert value["city"] in CITIES
    assert len(value["note"]) <= 8


async def test_required_calls_match_their_schemas(client: AsyncClient) -> None:
    for seed in range(6):
        options = {**SAMPLED, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
        one = await client.chat(QUESTION, parallel_tool_calls=False, **options)
        assert one.finish_reason is FinishReason.EOS
        several = await client.chat(QUESTION, **options)
        assert several.tool_calls[0].arguments == one.tool_calls[0].arguments
        whole = several.tool_calls if several.finish_reason is FinishReason.EOS else several.tool_calls[:-1]
        assert (one.text, one.reasoning) == ("", "")
        for call in (*one.tool_calls, *whole):
            check_call(call.name, call.arguments)


async def test_a_stream_and_a_whole_answer_are_equal(client: AsyncClient) -> None:
    options: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "tool_choice": "required", "request_id": "same"}
    whole = await client.chat(QUESTION, **options)
    arguments: dict[str, str] = {}
    async with client.stream_chat(QUESTION, **options) as stream:
        async for delta in stream:
            for call in delta.tool_calls:
                arguments[call.id] = arguments.get(call.id, "") + call.arguments
        result = await stream.result()
    assert result.tool_calls == whole.tool_calls
    assert arguments == {call.id: call.arguments for call in whole.tool_calls}
    assert result.token_ids == whole.token_ids


async def test_a_named_tool_is_called_once(client: AsyncClient) -> None:
    result = await client.chat(QUESTION, tools=TOOLS, tool_choice="weather", **SAMPLED)
    assert [call.name for call in result.tool_calls] == ["weather"]
    one = await client.chat(QUESTION, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLED)
    assert len(one.tool_calls) == 1


async def test_an_answer_is_plain_text_without_parsing(client: AsyncClient) -> None:
    options: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "tool_choice": "weather"}
    plain = await client.chat(QUESTION, parse_chat=False, **options)
    assert plain.text.startswith('<tool_call>\n{"name": "weather", "arguments": {')
    assert plain.text.endswith("}\n</tool_call>")
    assert plain.tool_calls == ()


async def test_a_conversation_goes_on_after_a_call(client: AsyncClient) -> None:
    first = await client.chat(QUESTION, tools=TOOLS, tool_choice="weather", **SAMPLED)
    messages = [*QUESTION, first.samples[0].as_message(), Message("tool", "sun", tool_call_id=first.tool_calls[0].id)]
    ids = (await client.tokenize(messages=messages, tools=TOOLS)).token_ids
    text = await client.detokenize(ids)
    assert f'"arguments": {json.dumps(json.loads(first.tool_calls[0].arguments), ensure_ascii=False)}' in text
    assert "<tool_response>sun</tool_response>" in text
    second = await client.chat(messages, tools=TOOLS, **{**SAMPLED, "max_tokens": 8})
    assert second.usage.prompt_tokens == len(ids)


async def test_tools_need_a_known_template(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="no chat template 'other'; templates of this model: default"):
        await client.chat(QUESTION, chat_template="other")


async def test_openai_required_named_and_streamed_calls(http: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": False}
    options |= SAMPLED
    whole = await http.chat.completions.create(**options, tool_choice="required")
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls
    async with http.chat.completions.stream(**options, tool_choice="required") as stream:
        final = await stream.get_final_completion()
    calls: list[Any] = list(final.choices[0].message.tool_calls or [])
    assert final.choices[0].finish_reason == "tool_calls"
    expected: list[Any] = list(message.tool_calls)
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        (c.function.name, c.function.arguments) for c in expected
    ]
    for call in calls:
        check_call(call.function.name, call.function.arguments)
    named = await http.chat.completions.create(
        **options, tool_choice={"type": "function", "function": {"name": "clock"}}
    )
    assert [call.function.name for call in named.choices[0].message.tool_calls or []] == ["clock"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in expected]
    rest = {**options, "messages": [*QUESTION, message.model_dump(), *results], "max_tokens": 4}
    assert (await http.chat.completions.create(**rest)).usage is not None


class Trip(BaseModel):
    """A trip."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


async def test_openai_parses_pydantic_models(http: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, **SAMPLED}
    tool = openai.pydantic_function_tool(Trip, name="trip")
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    called = await http.chat.completions.parse(**options, tools=[tool], **forced)
    calls = called.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [Trip]
    answer = await http.chat.completions.parse(**options, response_format=Trip)
    assert isinstance(answer.choices[0].message.parsed, Trip)


async def test_tools_together_with_a_schema(http: openai.AsyncOpenAI, client: AsyncClient) -> None:
    """The answer is a call or matches the schema, over both HTTP APIs and gRPC."""
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    tool = openai.pydantic_function_tool(Trip, name="trip")
    less = [(await client.tokenize(text)).token_ids[0] for text in ("<", "<t", "<tool_call>")]
    for biases in ({}, {"logit_bias": dict.fromkeys(map(str, less), -100)}):
        extra: dict[str, Any] = {"extra_body": biases}
        answer = await http.chat.completions.parse(
            **options, messages=QUESTION, tools=[tool], response_format=Trip, **extra
        )
        message = answer.choices[0].message
        assert bool(message.tool_calls) == (not biases)
        found = message.tool_calls[0].function.parsed_arguments if message.tool_calls else message.parsed
        assert isinstance(found, Trip)
        flat: Any = {"type": "function", "strict": True, **tool["function"]}
        response = await http.responses.parse(**options, input="Where?", tools=[flat], text_format=Trip, **extra)
        assert response.output[-1].type == ("message" if biases else "function_call")
        assert not biases or isinstance(response.output_parsed, Trip)
    schema = json.dumps(Trip.model_json_schema())
    bias = dict.fromkeys(less, -100.0)
    chat = await client.chat(QUESTION, tools=[tool], json_schema=schema, logit_bias=bias, temperature=0)
    assert Trip.model_validate_json(chat.text)


async def long_call(client: AsyncClient, begun: asyncio.Event | None = None) -> tuple[GenerateResult, str]:
    """A call with long arguments, and its arguments as streamed. `begun` is set in the middle of them."""
    streamed = ""
    options: dict[str, Any] = {"tools": [ROUTE], "tool_choice": "route", "seed": 3, "temperature": 1.0}
    async with client.stream_chat(QUESTION, request_id="long", max_tokens=2000, **options) as stream:
        async for delta in stream:
            streamed += "".join(call.arguments for call in delta.tool_calls)
            if begun is not None and len(streamed) > 100:
                begun.set()
        return await stream.result(), streamed


async def test_a_call_survives_kill_9_in_its_arguments(tmp_path: Path) -> None:
    """The parsed stream of a request whose process is killed equals that of an undisturbed one."""
    with Stack(tmp_path) as stack:
        running = Running(stack, tmp_path)
        async with await stack.connect(running.gateway, workers=2) as client:
            undisturbed, text = await long_call(client)
            assert len(json.loads(text)["cities"]) == NUM_CITIES
            for victim in ("worker", "scheduler", "gateway"):
                begun = asyncio.Event()
                task = asyncio.create_task(long_call(client, begun))
                await begun.wait()
                await kill_and_restart(running, victim, client)
                disturbed, streamed = await task
                assert streamed == text
                assert disturbed.tool_calls == undisturbed.tool_calls
                assert disturbed.token_ids == undisturbed.token_ids
                assert (disturbed.resumes > 0) == (victim == "gateway")


async def long_message(http: anthropic.AsyncAnthropic, begun: asyncio.Event | None = None) -> tuple[Any, str]:
    """A message with a long call, and the arguments as streamed. `begun` is set in the middle of them."""
    function, streamed = ROUTE["function"], ""
    options: dict[str, Any] = {
        "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        "tool_choice": {"type": "tool", "name": function["name"]},
        "extra_body": {"seed": 3, "temperature": 1.0},
    }
    async with http.messages.stream(model=MODEL, max_tokens=2000, messages=QUESTION, **options) as stream:
        async for event in stream:
            streamed += event.partial_json if event.type == "input_json" else ""
            if begun is not None and len(streamed) > 100:
                begun.set()
        return await stream.get_final_message(), streamed


async def test_a_message_survives_kill_9_of_its_worker(running: Running, client: AsyncClient) -> None:
    url = running.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as http:
        undisturbed, text = await long_message(http)
        assert undisturbed.content[0].input == json.loads(text)
        assert (len(json.loads(text)["cities"]), undisturbed.stop_reason) == (NUM_CITIES, "tool_use")
        begun = asyncio.Event()
        task = asyncio.create_task(long_message(http, begun))
        await begun.wait()
        await kill_and_restart(running, "worker", client)
        disturbed, streamed = await task
    assert streamed == text
    assert disturbed.content[0].input == undisturbed.content[0].input
    assert disturbed.usage.output_tokens == undisturbed.usage.output_tokens


async def kill_and_restart(running: Running, victim: str, client: AsyncClient) -> None:
    """Kill the process that serves the request."""
    service: Service
    if victim == "worker":
        schedulers = (await client.status()).schedulers
        busy = next(w.worker_id for s in schedulers for w in s.workers if w.rows_used)
        service = next(worker for worker in running.workers if worker.name == busy)
    else:
        service = getattr(running, victim)
    service.kill()
    service.start()


APPLY_PATCH = (ROOT / "tests/apply_patch.lark").read_text()  # Codex sends this one
PATCH_LINE = re.compile(
    r"\*\*\* (Add|Delete|Update) File: .+|\*\*\* Move to: .+|@@( .+)?|[-+ ].*|\*\*\* End of File|\*\*\* End Patch"
)


def check_patch(patch: str, *, is_complete: bool) -> None:
    """Every line is one of a patch; the last line of an incomplete patch may be the start of one."""
    first, *lines = patch.removesuffix("\n").split("\n")
    assert first == "*** Begin Patch" or not (is_complete or lines)
    for line in lines if is_complete else lines[:-1]:
        assert PATCH_LINE.fullmatch(line), patch
    assert not is_complete or lines[-1] == "*** End Patch"


async def test_a_hundred_sampled_patches_follow_their_grammar(http: openai.AsyncOpenAI) -> None:
    """Half of them with a grammar without repetitions, so that the demo model ends them."""
    short = APPLY_PATCH.replace("hunk+", "hunk").replace("add_line+", "add_line").replace("change?", "")
    short = short.replace("(.+)", "([a-z]{1,8})").replace("(.*)", "([a-z ]{0,9})")
    limit = asyncio.Semaphore(8)

    async def patch_of(seed: int) -> str:
        form = {"type": "grammar", "syntax": "lark", "definition": (APPLY_PATCH, short)[seed % 2]}
        async with limit:
            answer: Any = await http.responses.create(
                model=MODEL,
                input="Fix it.",
                tools=[{"type": "custom", "name": "apply_patch", "format": form}],  # type: ignore[list-item]
                tool_choice={"type": "custom", "name": "apply_patch"},
                max_output_tokens=150,
                temperature=1.0,
                extra_body={"seed": seed},
            )
        (call,) = answer.output
        assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
        check_patch(call.input, is_complete=answer.status == "completed")
        return str(answer.status)

    statuses = await asyncio.gather(*map(patch_of, range(100)))
    assert statuses.count("completed") >= 40
