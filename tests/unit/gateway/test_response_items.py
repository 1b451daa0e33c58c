"""Items of a conversation as chat messages, and parsed answers as items."""

from __future__ import annotations

from typing import Any

import pytest

from gateway_svc.http.responses.bodies import items_of, messages_of
from svc_common.errors import InvalidRequestError
from tests.unit.gateway.fakes import EOS
from tests.unit.gateway.test_chat_streams import ANSWER, encode, serving
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.test_responses import PATH, events_of

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "web_search"},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "now?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Which city?"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
    {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "12:00"}]},
    {"role": "user", "content": "And tomorrow?"},
]


def test_the_items_of_one_turn_are_one_message() -> None:
    messages = messages_of(items_of(CONVERSATION))
    assert [message.role for message in messages] == ["developer", "user", "assistant", "tool", "tool", "user"]
    turn = messages[2]
    assert (turn.reasoning, turn.content) == ("Which city?", "I look.")
    assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [
        ("c1", "weather", '{"city": "Ulm"}'),
        ("c2", "clock", "{}"),
    ]
    assert messages[1].content == "Weather\nnow?"
    assert [(message.tool_call_id, message.content) for message in messages[3:5]] == [("c1", "sunny"), ("c2", "12:00")]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call_output", "call_id": "c", "output": 5}, "input[0].output"),
        ({"type": ["x"]}, "input[0].type"),
    ],
)
def test_an_item_without_its_fields_is_refused(item: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages_of(items_of([item]))
    assert caught.value.field == field


async def test_an_answer_with_reasoning_and_calls_has_an_item_each() -> None:
    async with serving() as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*encode(ANSWER), 1], EOS)
        body = {"input": CONVERSATION, "tools": TOOLS, "reasoning": {"effort": "low"}}
        status, headers, answer = await http.post(PATH, body)
        assert status == 200, answer
        assert headers["x-ignored-fields"] == "tools.web_search"
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
        reasoning, message, weather, clock = answer["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Which city?"}]
        assert message["content"][0]["text"] == "I look."
        assert (weather["name"], weather["arguments"]) == ("weather", '{"city": "Zürich"}')
        assert (clock["name"], clock["arguments"]) == ("clock", "{}")
        assert weather["call_id"] != clock["call_id"]
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0

        async with http.session.post(PATH, json={**body, "stream": True}) as reply:
            events = events_of(await reply.text())
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [{**item, "id": "", "call_id": ""} for item in done] == [
            {**item, "id": "", "call_id": ""} for item in answer["output"]
        ]
        kinds = {event["type"] for event in events}
        assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds


NOTES: dict[str, Any] = {"type": "namespace", "name": "mcp__notes", "tools": [TOOLS[1], TOOLS[2]]}


async def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    """Agents send the tools of an MCP server in this form."""
    async with serving() as (gateway, scheduler), HttpGateway(gateway) as http:
        names = ("mcp__notes__clock", "clock")
        calls = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in names)
        scheduler.play([*encode(calls), 1], EOS)
        body: dict[str, Any] = {"input": "x", "tools": [TOOLS[1], NOTES], "tool_choice": "auto"}
        status, headers, answer = await http.post(PATH, body)
        assert status == 200, answer
        assert headers["x-ignored-fields"] == "tools.web_search"
        assert answer["tools"] == body["tools"]
        called = [(item.get("namespace"), item["name"], item["arguments"]) for item in answer["output"]]
        assert called == [("mcp__notes", "clock", "{}"), (None, "clock", "{}")]
        async with http.session.post(PATH, json={**body, "stream": True}) as reply:
            events = events_of(await reply.text())
        items = [event["item"] for event in events if "item" in event]
        assert [(item.get("namespace"), item["name"]) for item in items] == [
            (space, "clock") for space in ("mcp__notes", "mcp__notes", None, None)
        ]
        assert events[-1]["response"]["output"] == [items[1], items[3]]
        (turn,) = messages_of(items_of(answer["output"]))
        assert [call.name for call in turn.tool_calls] == list(names)
        forced = {"type": "function", "namespace": "mcp__notes", "name": "clock"}
        assert (await http.post(PATH, {**body, "tool_choice": forced}))[0] == 200
        for tools, field in (
            ([{**NOTES, "name": 5}], "tools[0].name"),
            ([{**NOTES, "tools": 5}], "tools[0].tools"),
            ([{**NOTES, "tools": [{**TOOLS[1], "name": None}]}], "tools[0].tools[0].name"),
            ([{**NOTES, "tools": [{**TOOLS[1], "parameters": 5}]}], "tools[0].tools[0].parameters"),
        ):
            status, _, answer = await http.post(PATH, {"input": "x", "tools": tools})
            assert (status, answer["error"]["param"]) == (400, field)
        _, _, answer = await http.post(PATH, {"input": "x", "tools": [TOOLS[2]], "tool_choice": "required"})
        assert "is required, but tools.web_search is not served" in answer["error"]["message"]
