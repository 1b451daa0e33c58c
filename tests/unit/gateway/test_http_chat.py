"""Tools and reasoning in chat completions, read by OpenAI's client; the model's output is set by the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from gateway_svc.text.chat_output import ChatFormat, parse
from gateway_svc.text.tool_formats import TOOL_FORMATS
from tests.chat_templates import CLOCK, TEMPLATES, WEATHER
from tests.unit.gateway.fakes import EOS, LENGTH, STOP, FakeScheduler, TestGateway
from tests.unit.gateway.test_chat_streams import ANSWER, encode, serving
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.test_tool_grammar import SCHEMAS, VALID, names_in

USER: Any = [{"role": "user", "content": "Rain?"}]
TOOLS: Any = [WEATHER, CLOCK]


@asynccontextmanager
async def client_of(
    template: str = TEMPLATES["hermes"],
) -> AsyncIterator[tuple[openai.AsyncOpenAI, TestGateway, FakeScheduler]]:
    async with serving(template) as (gateway, scheduler), HttpGateway(gateway) as http, http.openai() as client:
        yield client, gateway, scheduler


async def prompt_of(scheduler: FakeScheduler, gateway: TestGateway) -> str:
    """The text of the last prompt."""
    data = scheduler.submits[-1].prompt_token_ids
    ids = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    tokenizer = gateway.directory.find_text("demo").text.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_the_text_of_a_special_token_in_a_message_is_that_token() -> None:
    """docs/threat-model.md tells operators so, because a user can write the marker at the end of a turn."""
    async with client_of() as (client, gateway, scheduler):
        tokenizer = gateway.directory.find_text("demo").text.tokenizer
        assert tokenizer is not None
        counts = []
        for text in ("hi", f"hi{tokenizer.decode([1], skip_special_tokens=False)}"):
            scheduler.play([1], EOS)
            await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": text}])
            data = scheduler.submits[-1].prompt_token_ids
            counts.append([data[i : i + 4] for i in range(0, len(data), 4)].count(b"\x01\0\0\0"))
        assert counts[1] == counts[0] + 1


async def test_a_call_that_a_stop_string_cuts_ends_as_stop() -> None:
    async with client_of() as (client, _, scheduler):
        scheduler.play(encode('<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'), STOP)
        asked: Any = {"model": "demo", "messages": USER, "tools": TOOLS, "stop": "Ulm"}
        (whole,) = (await client.chat.completions.create(**asked)).choices
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "Ulm")
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert whole.message.tool_calls[0].function.arguments == '{"city": "'


@pytest.mark.parametrize("cut", ["<tool_c", '<tool_call>\n{"name": "wea'])
async def test_the_start_of_a_forced_call_that_is_cut_off_is_no_content(cut: str) -> None:
    async with client_of() as (client, _, scheduler):
        call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        scheduler.play(encode(call + cut), LENGTH)
        asked: Any = {"model": "demo", "messages": USER, "tools": TOOLS}
        forced = (await client.chat.completions.create(**asked, tool_choice="required")).choices[0]
        async with client.chat.completions.stream(**asked, tool_choice="required") as stream:
            streamed = [event.chunk.choices[0] async for event in stream if event.type == "chunk"]
        free = (await client.chat.completions.create(**asked)).choices[0]
    assert (forced.finish_reason, forced.message.content, free.message.content) == ("length", None, cut)
    assert [forced.message.tool_calls[0].function.name] == ["clock"]  # type: ignore[union-attr,index]
    assert not any(choice.delta.content for choice in streamed)


FORMATS = {name: texts[-1] for name, texts in VALID.items()} | {
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
}


@pytest.mark.parametrize("name", FORMATS)
async def test_stock_clients_read_the_calls_of_a_format_at_every_split(name: str) -> None:
    text, flat = FORMATS[name], [{"name": tool, "parameters": schema} for tool, schema in SCHEMAS.items()]
    ids = encode(text)
    expected = [(item.name, item.text) for item in parse(ChatFormat(None, TOOL_FORMATS[name]), text, tools=SCHEMAS)]
    assert [name for name, _ in expected] == names_in(text)

    def split(submit: Any) -> None:
        """Cut each of several samples after another token, and a single one after every token."""
        many = submit.sampling.n > 1
        for i, token in enumerate(ids):
            scheduler.send(submit.handle, ids[: i + 1] if many else [token], sample=many * i, offset=0 if many else i)
        for i in range(len(ids)) if many else [len(ids) - 1]:
            scheduler.finish(submit.handle, EOS, ids=[*ids[i + 1 :], 1], offset=i + 1, sample=many * i)

    def calls_of(choice: Any) -> list[tuple[str, str]]:
        assert choice.finish_reason == "tool_calls"
        return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]

    def of_message(message: anthropic.types.Message) -> list[tuple[str, str]]:
        assert message.stop_reason == "tool_use"
        return [(one.name, json.dumps(one.input)) for one in message.content if one.type == "tool_use"]

    def of_response(response: Any) -> list[tuple[str, str]]:
        return [(item.name, item.arguments) for item in response.output]

    async with (
        serving(tool_parsers=[name]) as (gateway, scheduler),
        HttpGateway(gateway) as http,
        http.openai() as client,
        anthropic.AsyncAnthropic(base_url="http://{}:{}".format(*http.server.address), api_key="unused") as other,
    ):
        chat: Any = {"messages": USER, "tools": [{"type": "function", "function": tool} for tool in flat]}
        message: Any = {"messages": USER, "max_tokens": 999}
        message["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in flat]
        response: Any = {"input": "Rain?", "store": False, "tools": [{"type": "function", **tool} for tool in flat]}
        response["tools"] = [{**tool, "strict": False} for tool in response["tools"]]
        scheduler.play([*ids, 1], EOS)
        found = [
            calls_of((await client.chat.completions.create(model="demo", **chat)).choices[0]),
            of_message(await other.messages.create(model="demo", **message)),
            of_response(await client.responses.create(model="demo", **response)),
        ]
        scheduler.on_submit = split
        async with client.chat.completions.stream(model="demo", n=len(ids), **chat) as chunks:
            found += map(calls_of, (await chunks.get_final_completion()).choices)
        async with other.messages.stream(model="demo", **message) as events:
            found.append(of_message(await events.get_final_message()))
        async with client.responses.stream(model="demo", **response) as events:
            found.append(of_response(await events.get_final_response()))
    assert len(found) == len(ids) + 5
    for one in found:
        assert [(tool, json.loads(text)) for tool, text in one] == [(tool, json.loads(text)) for tool, text in expected]


async def test_events_have_no_character_at_which_clients_split_lines() -> None:
    text = "a\u2028b\u2029c\u0085d"
    async with serving(TEMPLATES["hermes"]) as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*encode(text), 1], EOS)
        for path, body in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/responses", {"input": "x", "store": False}),
            ("/v1/messages", {"messages": USER, "max_tokens": 99}),
        ):
            async with http.session.post(path, json={"model": "demo", "stream": True, **body}) as answer:
                data = await answer.read()
            assert not any(char.encode() in data for char in "\u2028\u2029\u0085"), path
            assert rb"\u2028" in data, path


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    """One token per chunk: OpenAI's accumulator gives the message of the whole answer."""
    ids = encode(ANSWER)

    def one_by_one(submit: Any) -> None:
        for i, token in enumerate(ids):
            scheduler.send(submit.handle, [token], offset=i)
        scheduler.finish(submit.handle, EOS, ids=[1], offset=len(ids))

    async with client_of() as (client, _, scheduler):
        scheduler.on_submit = one_by_one
        options: Any = {"model": "demo", "messages": USER, "tools": TOOLS}
        async with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    chunks = [event.chunk for event in events if event.type == "chunk"]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "weather"), (1, "clock")]
    assert all(call.function.name is None and call.type is None for call in calls if not call.id)
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Which city?"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Which city?"
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look."
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"city": "Zürich"}', "{}"]
    assert final.usage is not None
    assert final.usage.completion_tokens_details is not None
    assert final.usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": "required"}, "tool_choice", "requires a call, but the chat has no tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}},
            "tool_choice",
            "must be the name of a tool",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is 'web_search'; must be 'function'"),
        ({"tools": "x"}, "tools", "must be a list"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "not a template itself"),
        ({"chat_template": "other"}, "messages", "there is no chat template 'other'"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
        ({"functions": [{"name": "f"}]}, "functions", "is not served"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "must be one of system, developer"),
    ],
)
async def test_wrong_options_are_refused(body: dict[str, Any], param: str, words: str) -> None:
    async with client_of() as (client, _, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body={"messages": USER, **body}, cast_to=object)
    assert caught.value.param == param
    assert words in caught.value.message
    json.dumps(caught.value.body)
