"""Anthropic's Messages API, read by Anthropic's client; the model's output is set by the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.http.messages.bodies import messages_request
from svc_common.errors import InvalidRequestError
from tests.chat_templates import TEMPLATES
from tests.unit.gateway.fakes import EOS, LENGTH, STOP, FakeScheduler, TestGateway
from tests.unit.gateway.test_chat_streams import ANSWER, encode, serving
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.test_http_chat import prompt_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "The weather", "input_schema": PARAMETERS},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
USER: Any = [{"role": "user", "content": "Rain?"}]
ASKED: Any = {"model": "demo", "max_tokens": 200, "messages": USER}


@asynccontextmanager
async def client_of(
    authenticator: Authenticator | None = None, api_key: str = "unused"
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, TestGateway, FakeScheduler]]:
    async with serving(TEMPLATES["hermes"]) as (gateway, scheduler), HttpGateway(gateway, authenticator) as http:
        host, port = http.server.address
        url = f"http://{host}:{port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0) as client:
            yield client, gateway, scheduler


async def test_a_message_has_thinking_text_and_calls() -> None:
    async with client_of() as (client, _, scheduler):
        scheduler.play([*encode(ANSWER), 1], EOS)
        message = await client.messages.create(**ASKED, tools=TOOLS)
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert message.id == scheduler.submits[-1].request_id
    thinking, text, weather, clock = message.content
    assert (thinking.type, thinking.type == "thinking" and thinking.thinking) == ("thinking", "Which city?")
    assert (text.type, text.type == "text" and text.text) == ("text", "I look.")
    assert weather.type == clock.type == "tool_use"
    assert (weather.name, weather.input, clock.name, clock.input) == ("weather", {"city": "Zürich"}, "clock", {})
    assert weather.id != clock.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    used = message.usage
    assert used.cache_read_input_tokens == 3
    assert used.input_tokens + 3 == len(scheduler.submits[-1].prompt_token_ids) // 4
    assert used.output_tokens == len(encode(ANSWER)) + 1
    assert used.output_tokens_details is not None


async def test_a_stream_adds_up_to_the_message() -> None:
    """One token per chunk: Anthropic's accumulator gives the content of the whole answer."""
    ids = encode(ANSWER)

    def one_by_one(submit: Any) -> None:
        for i, token in enumerate(ids):
            scheduler.send(submit.handle, [token], offset=i)
        scheduler.finish(submit.handle, EOS, ids=[1], offset=len(ids))

    async with client_of() as (client, _, scheduler):
        scheduler.on_submit = one_by_one
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        scheduler.play([*ids, 1], EOS)
        whole = await client.messages.create(**ASKED, tools=TOOLS)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    shown = [
        [{**block.model_dump(), "id": None, "signature": None} for block in message.content]
        for message in (final, whole)
    ]
    assert shown[0] == shown[1]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert all(block.signature for block in final.content if block.type == "thinking")


@pytest.mark.parametrize(
    ("reason", "options", "expected"),
    [
        (EOS, {}, ("end_turn", None, "Hello you")),
        (LENGTH, {}, ("max_tokens", None, "Hello you")),
        (STOP, {"stop_sequences": ["o y"]}, ("stop_sequence", "o y", "Hell")),
    ],
)
async def test_how_a_message_ends(reason: Any, options: Any, expected: Any) -> None:
    async with client_of() as (client, _, scheduler):
        scheduler.play([*encode("Hello you"), *([1] if reason == EOS else [])], reason)
        message = await client.messages.create(**ASKED, **options)
    (block,) = message.content
    assert (message.stop_reason, message.stop_sequence, block.type == "text" and block.text) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "a\tb\nc"}', {"city": "a\tb\nc"}),
        ('{"city": "Ulm",}', {"city": "Ulm"}),
        ('{"city": Ulm}', {"arguments": '{"city": Ulm}}'}),  # up to the marker
    ],
)
async def test_arguments_that_are_no_json_are_mended_or_shown(arguments: str, expected: Any) -> None:
    async with client_of() as (client, _, scheduler):
        call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
        scheduler.play([*encode(call), 1], EOS)
        message = await client.messages.create(**ASKED, tools=TOOLS)
    assert [block.input for block in message.content if block.type == "tool_use"] == [expected]


async def test_a_conversation_reaches_the_template() -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "or sun?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "d"},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    options: Any = {**ASKED, "messages": messages, "system": system}
    async with client_of() as (client, gateway, scheduler):
        scheduler.play(encode("x"), EOS)
        await client.messages.create(**options, thinking={"type": "disabled"})
        text = await prompt_of(scheduler, gateway)
        counted = await client.messages.count_tokens(model="demo", messages=messages, system=system)
        await client.messages.create(**options)
        assert counted.input_tokens == len(scheduler.submits[-1].prompt_token_ids) // 4
        prefilled = [*USER, {"role": "assistant", "content": "It is"}]
        await client.messages.create(**{**ASKED, "messages": prefilled})
        assert (await prompt_of(scheduler, gateway)).endswith("<|im_start|>assistant\nIt is")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain\nor sun?<|im_end|>")
    assert '<think>Hm.</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in text
    assert "<tool_response>sun</tool_response>" in text
    assert "<tool_response></tool_response>" in text
    assert text.endswith("a page\nAnd now?<|im_end|>\n<|im_start|>assistant\n<think></think>")


async def test_tools_are_chosen_and_formats_are_grammars() -> None:
    schema: Any = {"type": "json_schema", "schema": PARAMETERS}
    cases: list[tuple[Any, list[str], list[str]]] = [
        ({"tool_choice": {"type": "any"}}, ["weather", "clock", "any_call_4 ("], []),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ["clock"], ["any_call_4 ("]),
        ({"tool_choice": {"type": "tool", "name": "clock"}}, ["clock"], ["weather"]),
        ({"output_config": {"format": schema}}, ["weather", "city"], ["until"]),
    ]
    async with client_of() as (client, _, scheduler):
        scheduler.play(encode("x"), EOS)
        for options, inside, outside in cases:
            await client.messages.create(**ASKED, tools=TOOLS, **options)
            grammar = scheduler.submits[-1].sampling.grammar
            assert all(word in grammar for word in inside), (options, grammar)
            assert not any(word in grammar for word in outside), (options, grammar)
        await client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"})
        assert not scheduler.submits[-1].sampling.grammar
        for name in ("output_config", "output_format"):
            value = {"format": schema} if name == "output_config" else schema
            await client.messages.create(**ASKED, extra_body={name: value})
            assert json.loads(scheduler.submits[-1].sampling.json_schema) == PARAMETERS


async def test_errors_have_the_form_of_anthropic() -> None:
    async with client_of() as (client, _, _scheduler):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**ASKED, "model": "other"})
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await client.messages.create(**ASKED, extra_body={"temperature": 9})
        bad: Any = {"name": "find", "input_schema": {"type": "object", "uniqueItems": True}}
        with pytest.raises(anthropic.BadRequestError) as tool:
            await client.messages.create(**ASKED, tools=[{"type": "other"}, bad], tool_choice={"type": "any"})
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert isinstance(wrong.value.body, dict)
    assert wrong.value.body["error"] == {
        "type": "invalid_request_error",
        "message": "temperature is 9; must be a number from 0 to 2",
        "param": "temperature",
        "code": None,
    }
    assert tool.value.body["error"]["message"].startswith("tools[1].input_schema of tool 'find' cannot be used: Unimpl")
    assert tool.value.body["error"]["param"] == "tools[1].input_schema"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens is not set"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].role is 'tool'"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content is 5"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"messages\[0\].content\[0\] is 'a'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, r"content\[0\].type is 'audio'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, r"content\[0\].type is 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is None"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}
                ]
            },
            "images are not fetched",
        ),
        ({"system": 5}, "system is 5"),
        ({"tools": {}}, "tools is an object"),
        ({"tools": ["a"]}, r"tools\[0\] is 'a'"),
        ({"tool_choice": "any"}, "tool_choice must have a type"),
        ({"tool_choice": {"type": []}}, "tool_choice must have a type"),
        ({"thinking": {"type": []}}, "thinking.type is a list"),
        ({"thinking": True}, "thinking is true"),
        *(
            (
                {"thinking": {"type": "enabled", "budget_tokens": value}},
                "thinking.budget_tokens is .*; must be a number",
            )
            for value in (-1, 1.5, True, "many", 2**32, [])
        ),
        ({"output_config": {"effort": "some"}}, "output_config.effort is 'some'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_an_invalid_body_is_refused_by_name(change: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        messages_request(json.dumps({**ASKED, **change}).encode())


def test_what_has_no_effect_is_listed() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    body = {**ASKED, "thinking": thinking, "tools": [server_tool], "container": "c"}
    found = messages_request(json.dumps(body).encode())
    assert found.ignored == ("container", "tools.web_search_20250305")
    variables = json.loads(found.request.prompt.chat.template_kwargs_json)
    assert variables == {"enable_thinking": True, "thinking_budget": 1024}
