"""Structured output with real services: each kind over gRPC and HTTP, random schemas, lost workers, hostile schemas."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from quire_client import AsyncClient, FinishReason, GenerateResult, InvalidRequest
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from tests.processes.ports import free_port
from tests.processes.schemas import is_valid, make_schema
from tests.processes.stack import Service, Stack, is_ready, wait_idle

PROMPT = "What does os.path.join do?"
MODEL = "demo"
WORKER = ("--kv-cache-memory", "64M", "--dtype", "float32", "--model-name", MODEL)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 20, None]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "not at all"]
LARK = 'start: "<" item ("," item){2} ">"\nitem: /[a-z]{1,5}/'
GBNF = 'root ::= "<" item "," item "," item ">"\nitem ::= [a-z] [a-z]?'
BOMB = {"type": "integer", "multipleOf": 999983}  # compiles to an automaton with a state per residue
MAX_ANSWER_S = 5.0
NUM_SCHEMAS = 24
NUM_DEEP_SCHEMAS = 1000
AT_ONCE = 16


class Running:
    """A stack with HTTP."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.scheduler = stack.start_scheduler()
        self.worker = stack.start_worker(self.scheduler, demo_model_dir(), *WORKER)
        address = f"127.0.0.1:{free_port()}"
        self.gateway = stack.start_gateway(self.scheduler, flags=("--http-listen", address))
        self.url = f"http://{address}/v1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Stack(tmp_path_factory.mktemp("structured")) as stack:
        yield Running(stack)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    """A client over gRPC. After the test nothing runs and no block is in use."""
    async with await running.stack.connect(running.gateway) as client:
        yield client
        await wait_idle(running.stack, client)


@pytest.fixture
async def http(running: Running, client: AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of the HTTP API."""
    async with openai.AsyncOpenAI(base_url=running.url, api_key="unused", max_retries=0) as http:
        yield http


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


TAG: Any = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": SCHEMA}, lambda text: is_valid(text, SCHEMA)),
    "regex": ({"regex": "[a-c]{3,9}-x"}, lambda text: re.fullmatch("[a-c]{3,9}-x", text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": ({"grammar": LARK}, lambda text: re.fullmatch(r"<([a-z]{1,5},){2}[a-z]{1,5}>", text)),
    "structural_tag": ({"structural_tag": json.dumps(TAG)}, lambda text: is_valid(text[3:-4], SCHEMA)),
    "gbnf": ({"grammar": GBNF}, lambda text: re.fullmatch(r"<([a-z]{1,2},){2}[a-z]{1,2}>", text)),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_over_grpc(client: AsyncClient, kind: str) -> None:
    options, holds = KINDS[kind]
    result = await client.generate(PROMPT, temperature=1.5, seed=4, n=3, max_tokens=200, **options)
    for sample in result.samples:
        assert sample.finish_reason is FinishReason.EOS
        assert holds(sample.text), sample.text
    free = await client.generate(PROMPT, temperature=1.5, seed=4, max_tokens=20)
    assert not any(sample.text.startswith(free.text[:5]) for sample in result.samples)


async def test_a_json_object(client: AsyncClient) -> None:
    """Some objects exceed max_tokens, so only complete objects are parsed."""
    result = await client.generate(PROMPT, temperature=1.0, seed=1, n=8, max_tokens=600, json_object=True)
    ended = [sample for sample in result.samples if sample.finish_reason is FinishReason.EOS]
    assert all(sample.text.startswith("{") for sample in result.samples)
    assert ended
    assert all(is_object(sample.text) for sample in ended)


FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "response_format": ({"response_format": FORMAT}, "json_schema"),
    "guided_json": ({"guided_json": SCHEMA}, "json_schema"),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, "json_schema"),
    "guided_regex": ({"guided_regex": "[a-c]{3,9}-x"}, "regex"),
    "guided_choice": ({"guided_choice": CHOICES}, "choice"),
    "guided_grammar": ({"guided_grammar": LARK}, "grammar"),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema"),
    "structured_outputs regex": ({"structured_outputs": {"regex": "[a-c]{3,9}-x"}}, "regex"),
    "structured_outputs choice": ({"structured_outputs": {"choice": CHOICES}}, "choice"),
    "response_format structural_tag": ({"response_format": TAG}, "structural_tag"),
    "structured_outputs structural_tag": ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag"),
    "structured_outputs grammar": ({"structured_outputs": {"grammar": LARK}}, "grammar"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_each_kind_over_http(http: openai.AsyncOpenAI, name: str) -> None:
    body, kind = BODIES[name]
    messages: Any = [{"role": "user", "content": PROMPT}]
    answer = await http.chat.completions.create(
        model=MODEL, messages=messages, temperature=1.5, seed=4, max_tokens=200, extra_body=body
    )
    assert answer.choices[0].finish_reason == "stop"
    assert KINDS[kind][1](answer.choices[0].message.content)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_a_json_object_over_http(http: openai.AsyncOpenAI, body: dict[str, Any]) -> None:
    answer = await http.completions.create(
        model=MODEL, prompt=PROMPT, temperature=1.0, seed=1, n=8, max_tokens=600, extra_body=body
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(is_object(choice.text) for choice in ended)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is not set"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "text"}}, "guided_json", "Invalid type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
            "response_format.json_schema.schema", "Invalid type",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "structures is None"),
        ({"structured_outputs": {"other": {}}}, "structured_outputs.other", "is not served"),
        ({"response_format": {"type": "structural_tag", "format": 1}}, "response_format", "format is 1; must be an"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "must be a string"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format.type", "is set together with guided_regex",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "is set together with guided_regex"),
    ],
)  # fmt: skip
async def test_errors_over_http_have_the_name_in_the_body(
    http: openai.AsyncOpenAI, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await http.completions.create(model=MODEL, prompt=PROMPT, extra_body=body)
    assert caught.value.body["param"] == param  # type: ignore[index]


async def test_a_grammar_that_fails_while_it_runs_is_a_bad_request_and_one_line_of_log(
    http: openai.AsyncOpenAI, running: Running
) -> None:
    token_id = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json")).encode("a").ids[-1]
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "logit_bias": {str(token_id): 100}}
    body = {"structured_outputs": {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"}, "ignore_eos": True}
    with pytest.raises(openai.BadRequestError, match="simplify the grammar"):
        await http.completions.create(**asked, extra_body=body)
    for service in (running.worker, running.scheduler):
        failed = [line for line in service.log().splitlines() if re.search(r"row \d+ failed", line)]
        assert len(failed) == 1, failed


async def test_a_text_format_has_no_effect(http: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0.0, "max_tokens": 12}
    plain = await http.completions.create(**options)
    none = {"response_format": {"type": "text"}, "structured_outputs": {}}
    assert (await http.completions.create(**options, extra_body=none)).choices[0].text == plain.choices[0].text


async def test_with_samples_stop_strings_and_stop_conditions(client: AsyncClient) -> None:
    """Stop strings end an output early; min_tokens and ignore_eos do not extend a complete one."""
    options: dict[str, Any] = {"temperature": 1.5, "seed": 9, "n": 2, "max_tokens": 100, "frequency_penalty": 0.5}
    options |= {"repetition_penalty": 1.2, "logit_bias": {300: 5.0}}
    cut = await client.generate(PROMPT, **options, regex="[a-f]{4}-stop-[a-f]{4}", stop=["-stop"])
    for sample in cut.samples:
        assert sample.finish_reason is FinishReason.STOP
        assert re.fullmatch("[a-f]{4}", sample.text)
    for extra in ({"min_tokens": 50}, {"ignore_eos": True}):
        whole = await client.generate(PROMPT, **options, regex="[a-f]{4}!", **extra)
        for sample in whole.samples:
            assert sample.finish_reason is FinishReason.EOS
            assert re.fullmatch("[a-f]{4}!", sample.text)
    long = await client.generate(PROMPT, **options, regex="[a-f]*", min_tokens=40)
    assert all(len(sample.token_ids) > 40 for sample in long.samples)
    ended = await client.generate(PROMPT, **{**options, "max_tokens": 3}, regex="[a-f]{40,}")
    assert all(sample.finish_reason is FinishReason.LENGTH for sample in ended.samples)


async def test_an_exploding_schema_is_refused_while_other_streams_go_on(client: AsyncClient) -> None:
    num_chunks = [0] * 8
    has_begun = [asyncio.Event() for _ in num_chunks]

    async def stream(index: int) -> GenerateResult:
        options: dict[str, Any] = {"regex": "[a-z]{2000}"} if index % 2 else {"ignore_eos": True}
        async with client.stream(PROMPT, max_tokens=2000, seed=index, temperature=1.0, **options) as running:
            async for _ in running:
                num_chunks[index] += 1
                has_begun[index].set()
            return await running.result()

    streams = [asyncio.create_task(stream(i)) for i in range(8)]
    await asyncio.gather(*(event.wait() for event in has_begun))
    before, started = list(num_chunks), time.monotonic()
    with pytest.raises(InvalidRequest, match="simplify it"):
        await client.generate(PROMPT, json_schema=BOMB, max_tokens=5)
    assert time.monotonic() - started < MAX_ANSWER_S
    assert all(now > then or task.done() for now, then, task in zip(num_chunks, before, streams, strict=True))
    results = await asyncio.gather(*streams)
    assert all(len(result.samples[0].token_ids) > 100 for result in results)


async def test_a_killed_compile_process_is_replaced(client: AsyncClient, running: Running) -> None:
    await client.generate(PROMPT, regex="before", max_tokens=20)
    assert running.gateway.process is not None
    children = psutil.Process(running.gateway.process.pid).children()
    assert children
    for child in children:
        child.kill()
    assert (await client.generate(PROMPT, regex="after", max_tokens=20)).text == "after"


async def generate(client: AsyncClient, seed: int, schema: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The schema and an output that it constrains."""
    result = await client.generate(PROMPT, json_schema=schema, temperature=1.0, seed=seed, max_tokens=400)
    return schema, result.samples[0]


async def kill_worker(stack: Stack, client: AsyncClient, scheduler: Service, workers: list[Service]) -> None:
    """Kill the first worker and wait until another one has joined."""
    workers.pop(0).kill()
    workers.append(stack.start_worker(scheduler, demo_model_dir(), *WORKER))
    await stack.until(client, lambda schedulers: is_ready(schedulers, workers[-1]))


async def check_schemas(stack: Stack, count: int, kill_every: int) -> None:
    """Each output that ends satisfies its schema. A worker is killed after every `kill_every` schemas."""
    rng = random.Random(20261122)
    schemas = [make_schema(rng) for _ in range(count)]
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, demo_model_dir(), *WORKER) for _ in range(2)]
    async with await stack.connect(stack.start_gateway(scheduler), workers=2) as client:
        running = asyncio.Semaphore(AT_ONCE)
        killers: list[asyncio.Task[None]] = []
        num_done = 0

        async def one(seed: int, schema: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            nonlocal num_done
            async with running:
                answer = await generate(client, seed, schema)
            num_done += 1
            if num_done % kill_every == 0 and (not killers or killers[-1].done()):
                killers.append(asyncio.create_task(kill_worker(stack, client, scheduler, workers)))
            return answer

        answers = await asyncio.gather(*(one(i, schema) for i, schema in enumerate(schemas)))
        await asyncio.gather(*killers)
        assert killers
        # The same requests without a fault give the same tokens.
        repeated = range(0, count, max(1, count // 12))
        again = await asyncio.gather(*(generate(client, i, schemas[i]) for i in repeated))
        assert [sample.token_ids for _, sample in again] == [answers[i][1].token_ids for i in repeated]
    ended = [(schema, sample) for schema, sample in answers if sample.finish_reason is FinishReason.EOS]
    assert all(sample.finish_reason in (FinishReason.EOS, FinishReason.LENGTH) for _, sample in answers)
    assert len(ended) > 0.8 * count
    wrong = [(schema, sample.text) for schema, sample in ended if not is_valid(sample.text, schema)]
    assert not wrong, wrong[:3]


@pytest.mark.slow
async def test_outputs_of_random_schemas_are_valid_also_if_a_worker_is_killed(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        await check_schemas(stack, NUM_SCHEMAS, kill_every=8)


@pytest.mark.deep
async def test_outputs_of_a_thousand_random_schemas_are_valid(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        await check_schemas(stack, NUM_DEEP_SCHEMAS, kill_every=100)
