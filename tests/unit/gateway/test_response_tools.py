"""Tools of Codex and other agents in the Responses API: as the model gets them, and the items of their calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.internal.v1 import scheduler_pb2 as scheduler_pb

from gateway_svc.http.responses.bodies import items_of, messages_of
from gateway_svc.http.responses.tools import InputReader
from svc_common.errors import InvalidRequestError
from tests.unit.gateway.fakes import EOS
from tests.unit.gateway.test_chat_streams import TOKENIZER, encode, serving
from tests.unit.gateway.test_http import HttpGateway
from tests.unit.gateway.test_input_grammar import APPLY_PATCH, PATCH, call_of
from tests.unit.gateway.test_responses import PATH, events_of

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
PATCHES: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
FORECAST = {"type": "function", "name": "forecast", "parameters": {"type": "object", "properties": {}}}
WEATHER = {"type": "namespace", "name": "mcp__weather", "tools": [FORECAST, {"type": "custom", "name": "note"}]}
TOOLS = [PATCHES, SEARCH, {"type": "local_shell"}, {"type": "shell", "environment": {"type": "local"}}, WEATHER]


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALLS = (
    ("apply_patch", {"input": PATCH}),
    ("mcp__weather__note", {"input": "sunny\n"}),
    ("tool_search", {"query": "rain"}),
    ("local_shell", {"command": ["ls", "-l"], "working_directory": "/tmp"}),
    ("shell", {"commands": ["ls", ""], "timeout_ms": 5}),
    ("mcp__weather__forecast", {}),
)
ITEMS = [
    {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    {"type": "custom_tool_call", "namespace": "mcp__weather", "name": "note", "input": "sunny\n"},
    {"type": "tool_search_call", "execution": "client", "arguments": {"query": "rain"}},
    {
        "type": "local_shell_call",
        "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "/tmp"},
    },
    {"type": "shell_call", "action": {"commands": ["ls", ""], "timeout_ms": 5}},
    {"type": "function_call", "namespace": "mcp__weather", "name": "forecast", "arguments": "{}"},
]
OUTPUTS = [
    {"type": "custom_tool_call_output", "call_id": "c0", "output": "Done"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Noted"}]},
    {"type": "tool_search_output", "call_id": "c2", "execution": "client", "tools": [WEATHER]},
    {"type": "local_shell_call_output", "id": "c3", "output": "file"},
    {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "file", "stderr": "", "outcome": {}}]},
    {"type": "function_call_output", "call_id": "c5", "output": "rain"},
]


def prompt_of(submit: scheduler_pb.Submit) -> str:
    ids = memoryview(submit.prompt_token_ids).cast("I")
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


async def test_calls_of_each_kind_have_their_items_and_events() -> None:
    async with serving(max_model_len=4000) as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*encode("\n".join(call(*one) for one in CALLS)), 1], EOS)
        status, headers, answer = await http.post(PATH, {"input": "x", "tools": TOOLS})
        assert (status, "x-ignored-fields" in headers) == (200, False), answer
        own = [{k: v for k, v in item.items() if k not in ("id", "call_id", "status")} for item in answer["output"]]
        assert own == ITEMS
        assert answer["tools"] == TOOLS
        assert scheduler.submits[0].sampling.grammar.count("*** Begin Patch") == 1

        async with http.session.post(PATH, json={"input": "x", "tools": TOOLS, "stream": True}) as reply:
            events = events_of(await reply.text())
        assert events[-1]["response"]["output"] == [e["item"] for e in events if e["type"].endswith("item.done")]
        inputs = [e for e in events if "custom_tool_call_input" in e["type"]]
        (patch, note) = (e["input"] for e in inputs if e["type"] == "response.custom_tool_call_input.done")
        assert (patch, note) == (PATCH, "sunny\n")
        assert "".join(e["delta"] for e in inputs if "delta" in e) == patch + note
        commands = [(e["type"].rpartition(".")[2], e["command_index"]) for e in events if "shell_call" in e["type"]]
        assert commands == [("added", 0), ("delta", 0), ("done", 0), ("added", 1), ("done", 1)]


async def test_the_model_reads_tools_calls_and_results() -> None:
    async with serving(max_model_len=4000) as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*encode(call("mcp__weather__forecast", {})), 1], EOS)
        calls = [{**item, "call_id": f"c{i}"} for i, item in enumerate(ITEMS)]
        extra = {"type": "additional_tools", "role": "developer", "tools": [{**FORECAST, "name": "extra"}]}
        body = {"input": [{"role": "user", "content": "x"}, extra, *calls, *OUTPUTS], "tools": TOOLS[:4]}
        status, _, answer = await http.post(PATH, body)
        assert status == 200, answer
        (item,) = answer["output"]
        assert (item["namespace"], item["name"]) == ("mcp__weather", "forecast")  # a tool of a result
        assert answer["tools"] == [*TOOLS[:4], *extra["tools"], WEATHER]
        prompt = prompt_of(scheduler.submits[0])
        names = ("apply_patch", "tool_search", "local_shell", "shell", "mcp__weather__note", "extra")
        assert all(f'"name": "{name}"' in prompt for name in names)
        assert prompt.count("*** Begin Patch") == 2  # the description and the call
        for words in ("Noted", '{"tools": ["mcp__weather__forecast", "mcp__weather__note"]}', '"stdout": "file"'):
            assert words in prompt
        again = messages_of(items_of(calls))
        arguments = [json.loads(one.arguments) for one in again[0].tool_calls]
        assert [one.name for one in again[0].tool_calls] == [name for name, _ in CALLS]
        assert arguments == [arguments for _, arguments in CALLS[:4]] + [{**CALLS[4][1]}, {}]


@pytest.mark.parametrize(
    ("tool", "param", "words"),
    [
        ({"type": "file_search"}, "tools[0].type", "which this server does not run; use function, custom"),
        ({"type": "mcp", "server_url": "http://x"}, "tools[0].type", "or leave the tool out"),
        ({"type": "computer"}, "tools[0].type", "'computer'"),
        ({"type": None}, "tools[0].type", "None"),
        ({"type": "tool_search"}, "tools[0].execution", 'set it to "client"'),
        ({"type": "shell", "environment": {"type": "container_auto"}}, "tools[0].environment", "client's machine"),
        ({**WEATHER, "tools": [{"type": "shell"}]}, "tools[0].tools[0].type", "'shell'"),
        ({"type": "custom", "name": 5}, "tools[0].name", "must be the name of a custom tool"),
        ({**PATCHES, "description": 5}, "tools[0].description", "must be a string"),
        ({**PATCHES, "format": {**GRAMMAR, "definition": ""}}, "tools[0].format.definition", "text of a grammar"),
        ({**FORECAST, "parameters": {"x-grammar": 5}}, "tools[0].parameters.x-grammar", "must be a text"),
        ({**PATCHES, "format": {"type": "xml"}}, "tools[0].format.type", "must be text or grammar"),
        ({**PATCHES, "format": {**GRAMMAR, "syntax": "ebnf"}}, "tools[0].format.syntax", "must be lark or regex"),
        ({**PATCHES, "format": {**GRAMMAR, "definition": "x" * 200_000}}, "tools[0].format.definition", "131072"),
        ({**PATCHES, "format": {**GRAMMAR, "definition": "start: b"}}, "tools[0].format.definition", "'apply_patch'"),
        ({**PATCHES, "format": {**GRAMMAR, "definition": "start: start"}}, "tools[0].format.definition", "no text"),
        (
            {**PATCHES, "format": {**GRAMMAR, "definition": "start: ~/a/"}},
            "tools",
            "the grammar of 'apply_patch': '~/a/' is not known",
        ),
    ],
)
async def test_what_is_not_served_is_refused_by_name(tool: Any, param: str, words: str) -> None:
    async with serving() as (gateway, _), HttpGateway(gateway) as http:
        status, _, answer = await http.post(PATH, {"input": "x", "tools": [tool]})
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert words in answer["error"]["message"]


async def test_more_tools_than_allowed_and_custom_tools_of_chats_are_refused() -> None:
    async with serving() as (gateway, _), HttpGateway(gateway) as http:
        many = {"type": "namespace", "name": "n", "tools": [{**FORECAST, "name": f"f{i}"} for i in range(1025)]}
        status, _, answer = await http.post(PATH, {"input": "x", "tools": [many]})
        assert (status, answer["error"]["param"]) == (400, "tools[0].tools[1024]")
        messages = [{"role": "user", "content": "x"}]
        status, _, answer = await http.post("/v1/chat/completions", {"messages": messages, "tools": [PATCHES]})
        assert (status, answer["error"]["param"]) == (400, "tools[0].type")


async def test_a_tool_can_be_forced_by_its_type() -> None:
    async with serving(max_model_len=4000) as (gateway, scheduler), HttpGateway(gateway) as http:
        scheduler.play([*encode(call_of("hermes", PATCH, has_tokens=False)), 1], EOS)
        regex = {**PATCHES, "format": {"type": "grammar", "syntax": "regex", "definition": "a/b"}}
        for tools, choice, words in (
            (TOOLS, {"type": "custom", "name": "apply_patch"}, "*** Begin Patch"),
            (TOOLS, {"type": "shell"}, "commands"),
            (TOOLS, {"type": "local_shell"}, "working_directory"),
            ([regex], "required", r"a\/b"),
        ):
            status, _, answer = await http.post(PATH, {"input": "x", "tools": tools, "tool_choice": choice})
            assert status == 200, answer
            assert words in scheduler.submits[-1].sampling.grammar


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 5}, "input[0].input"),
        ({"type": "tool_search_call", "call_id": "c", "arguments": 5}, "input[0].arguments"),
        ({"type": "local_shell_call", "call_id": "c", "action": 5}, "input[0].action"),
        ({"type": "shell_call", "call_id": "c"}, "input[0].action"),
        ({"type": "shell_call", "call_id": "c", "action": {}}, "input[0].action"),
        ({"type": "shell_call", "call_id": "c", "action": {"commands": "ls"}}, "input[0].action"),
        ({"type": "shell_call", "call_id": "c", "action": [["commands", ["ls"]]]}, "input[0].action"),
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls", 5]}}, "input[0].action"),
        ({"type": "shell_call_output", "call_id": "c", "output": 5}, "input[0].output"),
        ({"type": "local_shell_call_output", "output": "x"}, "input[0].id"),
        ({"type": "apply_patch_call", "call_id": "c"}, "input[0].type"),
    ],
)
def test_an_item_without_its_fields_is_refused(item: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages_of(items_of([item]))
    assert caught.value.field == field


@pytest.mark.parametrize("tools", [5, [5], [{"type": "namespace", "name": "n", "tools": 5}]])
async def test_results_with_wrong_tools_are_refused(tools: Any) -> None:
    async with serving() as (gateway, _), HttpGateway(gateway) as http:
        item = {"type": "tool_search_output", "call_id": "c", "tools": tools}
        status, _, answer = await http.post(PATH, {"input": [item]})
        assert (status, answer["error"]["param"][:14]) == (400, "input[0].tools"), answer


def test_an_input_is_read_in_any_pieces() -> None:
    for text in (
        '{ "input" : "a\\n\\ud83d\\ude00 \\ud83d x\\"}"}',
        '{"patch": "a"}',
        '{"input": "cut \\',
        '{"inp',
        "[1]",
    ):
        whole = InputReader().read(text, is_last=True)
        for size in (1, 2, 3):
            reader = InputReader()
            pieces = [reader.read(text[at : at + size]) for at in range(0, len(text), size)]
            assert "".join([*pieces, reader.read("", is_last=True)]) == whole
    assert InputReader().read('{"input": "\\ud83d\\ude00\\ud83d"}', is_last=True) == "😀\ufffd"
