"""Chats over real gRPC with a fake scheduler: prompts with tools, and answers in parts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from tokenizers import AddedToken

from gateway_svc.text.chat_output import call_id
from gateway_svc.text.reasoning import GPT_OSS
from tests.chat_templates import CLOCK, TEMPLATES, WEATHER
from tests.unit.gateway.fakes import EOS, FakeScheduler, Result, TestGateway, make_bundle, make_info, refused
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

TOOLS = json.dumps([WEATHER, CLOCK])
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", *GPT_OSS.markers]
ANSWER = (
    "<think>\nWhich city?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
ITEMS = [("reasoning", "Which city?"), ("content", "I look."), ("weather", '{"city": "Zürich"}'), ("clock", "{}")]


def make_tokenizer() -> Any:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


TOKENIZER = make_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def chat_of(*messages: pb.ChatMessage, **options: Any) -> pb.Prompt:
    messages = messages or (pb.ChatMessage(role="user", content="Hello"),)
    return pb.Prompt(chat=pb.Chat(messages=messages, **options))


@asynccontextmanager
async def serving(
    template: str = TEMPLATES["hermes"], *, tool_parsers: Sequence[str] = (), max_model_len: int = 2048
) -> AsyncIterator[tuple[TestGateway, FakeScheduler]]:
    bundle = make_bundle(bundle_files(make_tokenizer(), {"chat_template": template}))
    scheduler = FakeScheduler(
        make_info(bundle, max_model_len=max_model_len, max_num_blocks=256, max_num_seqs=256), bundle
    )
    await scheduler.start()
    try:
        async with TestGateway([scheduler.address], tool_parsers=tool_parsers) as gateway:
            await gateway.ready()
            yield gateway, scheduler
    finally:
        await scheduler.stop()


def items(parts: Sequence[pb.AnswerPart]) -> list[tuple[str, str]]:
    """Kind or function name, and text, per item; checks the positions."""
    texts: list[bytes] = []
    kinds: list[str] = []
    for part in parts:
        call = part.tool_call
        text = call.arguments if part.HasField("tool_call") else part.reasoning or part.content
        if part.item == len(texts):
            texts.append(b"")
            kinds.append(call.name or part.WhichOneof("kind") or "")
        assert part.item == len(texts) - 1
        assert part.offset == len(texts[-1])
        texts[-1] += text.encode()
    return [(kind, text.decode()) for kind, text in zip(kinds, texts, strict=True)]


def parts_of(result: Result) -> list[pb.AnswerPart]:
    return [part for chunk in result.chunks for part in chunk.parts]


def parsed(**output: Any) -> pb.OutputParams:
    return pb.OutputParams(parse_chat=True, **output)


def expected_ids(result: Result) -> list[str]:
    """The ids of two calls, from what the client sees: the seed follows from the id of the request if it has none."""
    accepted = result.accepted
    key = f"r/{accepted.seed}/{accepted.prompt_digest.hex()}"
    return [call_id(key, 0, number) for number in range(2)]


async def first_parts(gateway: TestGateway, request: pb.GenerateRequest, count: int) -> list[pb.AnswerPart]:
    """The parts that a client has with the first `count` tokens, before it loses the stream."""
    call = gateway.generate(request)
    num_tokens, parts = 0, []
    while num_tokens < count:
        event = await call.read()
        num_tokens += len(event.chunk.token_ids)
        parts += event.chunk.parts
    call.cancel()
    return parts


async def test_a_resumed_answer_continues_after_any_token() -> None:
    """The parts of the tokens that the client has, and those of the resumed stream, are the parts of the answer."""
    ids = encode(ANSWER)
    async with serving() as (gateway, scheduler):
        request = pb.GenerateRequest(
            request_id="r", prompt=chat_of(tools_json=TOOLS), output=parsed(), sampling=types.SamplingParams(seed=1)
        )
        for count in range(1, len(ids), 2):
            scheduler.on_submit = lambda submit, count=count: scheduler.send(submit.handle, ids[:count])  # type: ignore[misc]
            before = await first_parts(gateway, request, count)
            scheduler.play([*ids, 1], EOS)
            sample = types.SampleState(index=0, output_token_ids=ids[:count])
            again = pb.GenerateRequest(continuation=types.Continuation(samples=[sample]))
            again.MergeFrom(request)
            rest = await gateway.collect(again)
            assert items([*before, *parts_of(rest)]) == ITEMS
            expected = expected_ids(rest)
            assert all(p.tool_call.id == expected[p.tool_call.index] for p in parts_of(rest) if p.HasField("tool_call"))
            assert rest.finished[0].usage.reasoning_tokens == len(encode(ANSWER[: ANSWER.index("\n\nI look")]))


async def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    text = 'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}'
    async with serving(TEMPLATES["mistral"]) as (gateway, scheduler):
        scheduler.play(encode(text))
        result = await gateway.collect(request_id="r", prompt=chat_of(tools_json=TOOLS), output=parsed())
        plain = await gateway.collect(prompt=chat_of(tools_json=TOOLS))
    assert items(parts_of(result)) == [("content", "Hm."), ("weather", '{"city": "Zürich"}')]
    assert parts_of(result)[-1].tool_call.id == expected_ids(result)[0]
    assert plain.text() == 'Hm.weather{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("reasoning", "Which city?"), ("content", ANSWER.partition("</think>\n\n")[2])]),
        (
            {"tools_json": TOOLS, "tool_choice": pb.TOOL_CHOICE_NONE},
            [("reasoning", "Which city?"), ("content", ANSWER.partition("</think>\n\n")[2])],
        ),
        ({"tools_json": TOOLS, "parallel_tool_calls": False}, ITEMS[:3]),
        ({"tools_json": TOOLS, "tool_choice": pb.TOOL_CHOICE_AUTO}, ITEMS),
    ],
)
async def test_what_is_parsed_depends_on_the_tools(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    async with serving() as (gateway, scheduler):
        scheduler.play(encode(ANSWER))
        result = await gateway.collect(prompt=chat_of(**options), output=parsed())
    assert items(parts_of(result)) == expected


async def test_the_prompt_may_open_the_reasoning() -> None:
    async with serving() as (gateway, scheduler):
        scheduler.play(encode("Hm.</think>Yes."))
        opened = chat_of(template_kwargs_json='{"open_thinking": true}')
        result = await gateway.collect(prompt=opened, output=parsed())
        assert items(parts_of(result)) == [("reasoning", "Hm."), ("content", "Yes.")]
        message = pb.ChatMessage(role="assistant", content="<think>First, ")
        prefill = chat_of(pb.ChatMessage(role="user", content="Hi"), message, continue_final_message=True)
        result = await gateway.collect(prompt=prefill, output=parsed())
        assert items(parts_of(result)) == [("reasoning", "Hm."), ("content", "Yes.")]
        result = await gateway.collect(prompt=chat_of(), output=parsed())
        assert items(parts_of(result)) == [("content", "Hm.</think>Yes.")]


USER = pb.ChatMessage(role="user", content="Hi")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (chat_of(pb.ChatMessage(role="bot")), "messages[0].role is 'bot'; must be one of system, developer"),
        (chat_of(pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])), "messages[0].tool_calls is set"),
        (chat_of(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()])), "tool_calls[0].name is empty"),
        (chat_of(pb.ChatMessage(role="user", reasoning="x")), "messages[0].reasoning is set"),
        (chat_of(pb.ChatMessage(role="user", tool_call_id="x")), "messages[0].tool_call_id is set"),
        (
            chat_of(pb.ChatMessage(role="user", parts=[pb.ContentPart()])),
            "messages[0].parts[0] has neither text nor image",
        ),
        (
            chat_of(pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart(text="b")])),
            "messages[0].parts is set, and content too",
        ),
        (chat_of(tool_choice=pb.TOOL_CHOICE_REQUIRED), "tool_choice requires a call, but the chat has no tools"),
        (chat_of(tool_choice=pb.TOOL_CHOICE_REQUIRED, tools_json="[]"), "tool_choice requires a call"),
        (chat_of(tool_name="weather"), "tool_name requires a call, but the chat has no tools"),
        (chat_of(tool_name="rain", tools_json=TOOLS), "tool_name is 'rain'; must be the name of a tool"),
        (chat_of(tool_name="clock", tool_choice=pb.TOOL_CHOICE_AUTO, tools_json=TOOLS), "must be REQUIRED or unset"),
        (chat_of(tool_choice=9), "tool_choice is 9"),
        (chat_of(continue_final_message=True, add_generation_prompt=True), "set only one of them"),
        (chat_of(tools_json="{"), "tools_json is not JSON"),
        (chat_of(tools_json="{}"), "tools_json is a JSON dict; it must be an array"),
        (chat_of(tools_json="[1]"), "tools_json[0] must be an object"),
        (chat_of(tools_json='[{"type": "web"}]'), "tools_json[0].type is 'web'"),
        (chat_of(tools_json='[{"type": "function"}]'), "tools_json[0].function must be an object"),
        (
            chat_of(tools_json='[{"type": "function", "function": {"name": "a b"}}]'),
            "tools_json[0].function.name is 'a b'",
        ),
        (
            chat_of(tools_json='[{"type": "function", "function": {"name": "f", "parameters": 1}}]'),
            "parameters must be a JSON schema",
        ),
        (
            chat_of(tools_json=json.dumps([CLOCK, CLOCK])),
            "tools_json[1].function.name is 'clock', the name of an earlier tool",
        ),
    ],
)
async def test_invalid_chats_are_refused(gateway: TestGateway, prompt: pb.Prompt, words: str) -> None:
    error = await refused(gateway.generate(prompt=prompt))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")


async def test_a_required_call_needs_a_known_format() -> None:
    async with serving("{{ tools }}") as (gateway, _):
        prompt = chat_of(tools_json=TOOLS, tool_choice=pb.TOOL_CHOICE_REQUIRED)
        error = await refused(gateway.generate(prompt=prompt, output=parsed()))
    assert "set --tool-parser of the gateway" in (error.details() or "")


async def test_a_required_call_needs_a_schema_that_its_format_can_enforce() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    async with serving("{{ tools }}<|tool_call><tool_call|>") as (gateway, _):
        prompt = chat_of(tools_json=json.dumps([tool]), tool_choice=pb.TOOL_CHOICE_REQUIRED)
        error = await refused(gateway.generate(prompt=prompt, output=parsed()))
    words = "tools_json cannot be used: tool 'f'.properties.x: the keyword 'not' cannot be enforced"
    assert words in (error.details() or "")


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("options", "words", "is_free"),
    [
        ({"tools_json": TOOLS, "tool_choice": pb.TOOL_CHOICE_REQUIRED}, ["weather", "clock", "city"], False),
        ({"tools_json": TOOLS, "tool_name": "clock"}, ["clock"], False),
        ({"tools_json": json.dumps([STRICT, CLOCK])}, ["weather", "clock", "city"], True),
    ],
)
async def test_calls_are_forced_by_a_grammar(options: dict[str, Any], words: list[str], is_free: bool) -> None:
    async with serving() as (gateway, scheduler):
        scheduler.play(encode("x"))
        await gateway.collect(prompt=chat_of(**options), output=parsed())
    grammar = scheduler.submits[-1].sampling.grammar
    assert [word for word in ("weather", "clock", "city") if word in grammar] == words
    assert grammar.splitlines()[0].endswith(")?") == is_free


@pytest.mark.parametrize(
    "options", [{"tools_json": TOOLS}, {"tools_json": json.dumps([STRICT]), "tool_choice": pb.TOOL_CHOICE_NONE}]
)
async def test_calls_that_are_not_forced_need_no_grammar(options: dict[str, Any]) -> None:
    async with serving() as (gateway, scheduler):
        scheduler.play(encode("x"))
        await gateway.collect(prompt=chat_of(**options), output=parsed())
    assert not scheduler.submits[-1].sampling.HasField("grammar")


SCHEMA = '{"type": "object", "properties": {"tall": {"type": "integer"}}, "required": ["tall"]}'
LARK = 'start: "a"'


@pytest.mark.parametrize(
    ("options", "sampling", "first", "has_content"),
    [
        ({"tools_json": TOOLS}, {"json_schema": SCHEMA}, "call", True),
        ({"tools_json": json.dumps([STRICT])}, {"json_schema": SCHEMA}, "call", True),
        ({"tools_json": TOOLS}, {"choice": ["tall", "b"]}, "call", True),
        ({"tools_json": TOOLS, "tool_choice": pb.TOOL_CHOICE_REQUIRED}, {"json_schema": SCHEMA}, "call", False),
        ({"tools_json": TOOLS, "tool_name": "clock"}, {"regex": "tall"}, "call", False),
        ({"tools_json": TOOLS}, {"grammar": LARK}, '"a"', False),
    ],
)
async def test_an_answer_is_a_call_or_matches_the_grammar_of_the_request(
    options: dict[str, Any], sampling: dict[str, Any], first: str, has_content: bool
) -> None:
    async with serving() as (gateway, scheduler):
        scheduler.play(encode("x"))
        await gateway.collect(
            prompt=chat_of(**options), output=parsed(), sampling=types.SamplingParams(seed=1, **sampling)
        )
    sent = scheduler.submits[-1].sampling
    assert first in sent.grammar.splitlines()[0]
    assert ("tall" in sent.grammar) == has_content
    assert [name for name in sampling if name != "grammar" and name in {d.name for d, _ in sent.ListFields()}] == []


HARMONY = "{{ tools }}functions<|channel|>analysis<|message|>"


async def test_hidden_special_tokens_are_the_messages_of_harmony() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    call = 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    async with serving(HARMONY) as (gateway, scheduler):
        scheduler.play(encode(thought + call))
        result = await gateway.collect(prompt=chat_of(tools_json=TOOLS), output=parsed())
        scheduler.play(encode(thought + "final<|message|>Yes.<|return|>"))
        plain = await gateway.collect(prompt=chat_of(), output=parsed())
    assert items(parts_of(result)) == [("reasoning", "Hm."), ("weather", '{"city": "Rome"}')]
    assert items(parts_of(plain)) == [("reasoning", "Hm."), ("content", "Yes.")]


@pytest.mark.parametrize(
    ("template", "parses", "first"),
    [
        (HARMONY, True, '"final"'),
        ("{{ messages }}</think>Now:<think>", True, "start: TEXT"),  # the prompt begins the reasoning
        ("{{ messages }}</think>Now:", True, ""),
        ("{{ messages }}</think>Now:<think>", False, ""),
    ],
)
async def test_a_schema_begins_after_reasoning_and_header(template: str, parses: bool, first: str) -> None:
    async with serving(template) as (gateway, scheduler):
        scheduler.play(encode("x"))
        sampling = types.SamplingParams(json_schema=SCHEMA)
        await gateway.collect(prompt=chat_of(), sampling=sampling, output=pb.OutputParams(parse_chat=parses))
    sent = scheduler.submits[-1].sampling
    assert bool(sent.grammar) == bool(first)
    assert first in sent.grammar
    assert "tall" in (sent.grammar or sent.json_schema)


async def test_without_a_format_of_calls_the_grammar_of_the_request_is_used_alone() -> None:
    async with serving("{{ tools }}") as (gateway, scheduler):
        scheduler.play(encode("x"))
        sampling = types.SamplingParams(seed=1, json_schema=SCHEMA)
        await gateway.collect(prompt=chat_of(tools_json=TOOLS), output=parsed(), sampling=sampling)
    assert scheduler.submits[-1].sampling.json_schema == SCHEMA


async def test_strict_tools_exclude_a_grammar_in_lark() -> None:
    async with serving() as (gateway, _):
        prompt = chat_of(tools_json=json.dumps([STRICT]))
        error = await refused(gateway.generate(prompt=prompt, sampling=types.SamplingParams(grammar=LARK)))
    assert "sampling.grammar is set, but strict tools" in (error.details() or "")


def tool_with(schema: Any) -> Any:
    return {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": schema}}}


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"ids": {"type": "array", "uniqueItems": True}}, ".properties.ids", "uniqueItems"),
        ({"a": {"anyOf": [{"type": "null"}, {"pattern": "(?=a)b"}]}}, ".properties.a.anyOf[1]", "look-around"),
        ({"a": {"type": "text"}}, ".properties.a", "Invalid type: text"),
    ],
)
async def test_a_schema_that_cannot_be_a_grammar_is_named(schema: Any, path: str, words: str) -> None:
    async with serving() as (gateway, _):
        prompt = chat_of(tools_json=json.dumps([CLOCK, tool_with(schema)]), tool_choice=pb.TOOL_CHOICE_REQUIRED)
        error = await refused(gateway.generate(prompt=prompt))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    field = f"prompt.chat.tools_json[1].function.parameters{path}"
    assert (error.details() or "").startswith(f"{field} of tool 'find' cannot be used: ")
    assert words in (error.details() or "")
    assert "start:" not in (error.details() or "")


async def test_unknown_formats_of_strings_are_annotations() -> None:
    schema = {"data": {"type": "string", "format": "byte"}, "format": {"type": "string", "format": "date"}}
    async with serving() as (gateway, scheduler):
        scheduler.play(encode("x"))
        await gateway.collect(prompt=chat_of(tools_json=json.dumps([tool_with(schema)]), tool_name="find"))
        assert '"format": {"type": "string", "format": "date"}' in scheduler.submits[-1].sampling.grammar
        assert "byte" not in scheduler.submits[-1].sampling.grammar
        whole = json.dumps({"type": "object", "properties": schema})
        await gateway.collect(sampling=types.SamplingParams(seed=1, json_schema=whole))
        assert "byte" not in scheduler.submits[-1].sampling.json_schema


async def test_a_tool_that_is_nested_too_deep_is_named() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    async with serving() as (gateway, _):
        prompt = chat_of(tools_json=json.dumps([tool_with({"a": deep})]), tool_name="find")
        error = await refused(gateway.generate(prompt=prompt))
    assert "of tool 'find' cannot be used: it is nested 72 levels deep; at most 64" in (error.details() or "")
