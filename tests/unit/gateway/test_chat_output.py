"""The parser of chat answers: what it finds, and that it does not depend on how the text was cut into pieces."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.request.prompts.text import _set_call_ids
from gateway_svc.text.answer import AnswerPiece, Item, ItemKind, items_of
from gateway_svc.text.calls.xml import XmlCalls
from gateway_svc.text.chat_output import ChatFormat, ChatParser, call_id, call_key, parse, short_call_id
from gateway_svc.text.reasoning import GEMMA4, GPT_OSS, MAGISTRAL, THINK
from gateway_svc.text.tool_formats import TOOL_FORMATS
from tests.unit.gateway.chat_samples import SAMPLES

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f": {"type": "object", "properties": {"code": {"type": "string"}, "x": {}}},
}
REASONING = {"mistral": MAGISTRAL, "openai": GPT_OSS}
FORMATS = {name: ChatFormat(REASONING.get(name, THINK), tools) for name, tools in TOOL_FORMATS.items()}
CASES = [(name, text) for name, texts in SAMPLES.items() for text in texts]


def content(text: str) -> Item:
    return Item(ItemKind.CONTENT, text)


def reasoning(text: str) -> Item:
    return Item(ItemKind.REASONING, text)


def call(name: str, arguments: str) -> Item:
    return Item(ItemKind.TOOL_CALL, arguments, name)


def read(name: str, text: str, **options: bool) -> tuple[Item, ...]:
    return parse(FORMATS[name], text, tools=TOOLS, **options)


def streamed(name: str, pieces: Sequence[str], **options: bool) -> tuple[Item, ...]:
    """The items of a text that arrives in pieces; checks the positions of the parts."""
    parser = ChatParser(FORMATS[name], tools=TOOLS, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    check_positions(parts)
    return items_of(parts)


def check_positions(parts: Sequence[AnswerPiece]) -> None:
    """Items and calls are numbered without gaps, and each part continues its item."""
    sizes: list[int] = []
    calls: list[int] = []
    for part in parts:
        assert part.text
        if part.item == len(sizes):
            sizes.append(0)
            if part.kind is ItemKind.TOOL_CALL:
                calls.append(part.item)
        assert part.item == len(sizes) - 1
        assert part.offset == sizes[-1]
        assert part.kind is not ItemKind.TOOL_CALL or part.call == len(calls) - 1
        sizes[-1] += len(part.text.encode())


@pytest.mark.parametrize(
    ("name", "text", "items"),
    [
        ("hermes", "Hello, world.\n", [content("Hello, world.\n")]),
        (
            "hermes",
            'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n',
            [content("Wait."), call("weather", '{"city": "Zürich"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>',
            [call("a", "{}"), call("b", '{"x": 1}')],
        ),
        ("hermes", '<tool_call>{"arguments": {"x": [1]}, "name": "late"}</tool_call>', [call("late", '{"x": [1]}')]),
        ("hermes", '<tool_call>{"name": "s", "arguments": "{\\"x\\": 1}"}</tool_call>', [call("s", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": "none"}</tool_call>', [call("none", "{}")]),
        # Malformed before the arguments: content, with all markers and space.
        ("hermes", 'a <tool_call> {"nam": 1}</tool_call> b', [content('a <tool_call> {"nam": 1}</tool_call> b')]),
        ("hermes", '<tool_call>{"name": "cut", "arg', [content('<tool_call>{"name": "cut", "arg')]),
        # Malformed or cut off in the arguments: a call with the text as it is.
        (
            "hermes",
            '<tool_call>{"name": "q", "arguments": {"x": "a "b" c"}}</tool_call>z',
            [call("q", '{"x": "a "b" c"}}'), content("z")],
        ),
        ("hermes", '<tool_call>{"name": "cut", "arguments": {"x": "ab', [call("cut", '{"x": "ab')]),
        ("hermes", '<tool_call>{"name": "c", "arguments": {}}\n</tool_c', [call("c", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "o", "arguments": {"x": 1}\n</tool_call>z',
            [call("o", '{"x": 1}'), content("z")],
        ),
        ("hermes", "<think>\nHm.\n</think>\n\nYes.", [reasoning("Hm."), content("Yes.")]),
        ("hermes", "Yes <think>no</think>", [content("Yes <think>no</think>")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\nDone.",
            [call("weather", '{"city": "12", "days": 3}'), content("Done.")],
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\ncut", [call("f", '{"x": ')]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=code>\ncut\n", [call("f", '{"code": "cut\\n')]),
        (
            "glm45",
            "Hm.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock</tool_call>",
            [content("Hm."), call("weather", '{"city": "12", "days": 3}'), call("clock", "{}")],
        ),
        (
            "minimax_m2",
            'Hm. <minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
            '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
            [content("Hm."), call("weather", '{"city": "Rome"}'), call("clock", "{}")],
        ),
        (
            "deepseek_v31",
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [content("Hm."), call("weather", "{}"), call("f", '{"x": 1}')],
        ),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"x": oops}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>z",
            [call("f", "{}"), call("g", '{"x": oops}'), content("z")],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            [call("f", "{}"), call("g", "{}")],
        ),
        (
            "kimi_k2",
            "<think>Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
            [reasoning("Hm."), call("f", "{}")],
        ),
        (
            "openai",
            "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
            [reasoning("A.\nB."), content("I look."), call("f", '{"x": 1}')],
        ),
        (
            "openai",
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
            "<|channel|>final<|message|>Hi",
            [call("f", "{}"), content("Hi")],
        ),
        (
            "openai",
            "<|channel|>commentary to=functions.f<|message|>no object<|call|>",
            [content("<|channel|>commentary to=functions.f<|message|>no object")],
        ),
        ("openai", "plain <|channel|>x", [content("plain <|channel|>x")]),
        (  # text between markers is no header
            "openai",
            "<|channel|>lost? <|channel|>final<|message|>Hi",
            [content("<|channel|>lost?Hi")],
        ),
        (
            "openai",
            "<|start|>assistant is lost?<|channel|>final<|message|>Hi",
            [content("<|start|>assistant is lost?Hi")],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{code:<|"|>a "b"\n<|"|>,x:[1,{y:true,z:[]},<|"|>s<|"|>],n:New York}<tool_call|>',
            [call("f", '{"code": "a \\"b\\"\\n", "x": [1, {"y": true, "z": []}, "s"], "n": "New York"}')],
        ),
        ("gemma4", "<|tool_call>call:f{x:[1}<tool_call|>z", [call("f", '{"x": [1}'), content("z")]),
        ("gemma4", '<|tool_call>call:f{x:<|"|>cu', [call("f", '{"x": "cu')]),
        (
            "functiongemma",
            "<start_function_call>call:f{x:<escape>a<escape>}<end_function_call>",
            [call("f", '{"x": "a"}')],
        ),
        ("glm45", "<tool_call>two words</tool_call>", [content("<tool_call>two words</tool_call>")]),
        ("glm45", "<tool_call>f<arg_key>code</arg_key><arg_value>cu", [call("f", '{"code": "cu')]),
        (
            "llama3",
            '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {}}',
            [call("weather", '{"city": "Paris"}'), call("f", "{}")],
        ),
        ("llama3", '{"name": "other", "parameters": {}}', [content('{"name": "other", "parameters": {}}')]),
        ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}', [call("other", "{}")]),
        ("llama3", "<|python_tag|>print(1)", [content("<|python_tag|>print(1)")]),
        (
            "mistral",
            'Hm. [TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]',
            [content("Hm."), call("a", "{}"), call("b", '{"x": 1}')],
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]b{"x": 1}',
            [call("weather", '{"city": "Paris"}'), call("b", '{"x": 1}')],
        ),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", [reasoning("Hm."), content("Yes.")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": "a\tb\nc\x01"}}</tool_call>',
            [call("f", '{"s": "a\\tb\\nc\\u0001"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": [True, None, NaN, -Infinity,], }}</tool_call>',
            [call("f", '{"x": [true, null, "NaN", "-Infinity"] }')],
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"s": "a\tb"}, "name": "late"}</tool_call>',
            [call("late", '{"s": "a\\tb"}')],
        ),
        (  # a call without its block, of a tool of the request; the lone end is dropped
            "qwen3_coder",
            "Sure.\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            [content("Sure."), call("f", '{"x": 1}')],
        ),
        ("qwen3_coder", "Write <function=name>\n<parameter=x>.", [content("Write <function=name>\n<parameter=x>.")]),
        (  # a closing tag in a value
            "qwen3_coder",
            "<tool_call><function=f><parameter=code>\nx </parameter> y\n</parameter>\n</function></tool_call>z",
            [call("f", '{"code": "x </parameter> y"}'), content("z")],
        ),
        (
            "glm47",
            "<tool_call>f<arg_key>code</arg_key>\n<arg_value>\nx</arg_value>y\n</arg_value></tool_call>",
            [call("f", '{"code": "\\nx</arg_value>y\\n"}')],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f"><parameter name="code">hello\n</parameter></invoke>'
            "</minimax:tool_call>",
            [call("f", '{"code": "hello\\n"}')],
        ),
        (
            "step3",
            'Hm.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
            '<steptml:parameter name="city">1</steptml:parameter>\n'
            '<steptml:parameter name="days">3</steptml:parameter>\n'
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>z",
            [content("Hm."), call("weather", '{"city": "1", "days": 3}'), content("z")],
        ),
        (
            "cohere",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n'
            '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
            [call("f", '{"x": 1}'), call("g", "{}")],
        ),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', [call("f", "{}")]),
        ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', [call("f", "{}")]),
        ("phi4_mini", 'functools[{"name": "f", "arguments": {"x": 1}}]', [call("f", '{"x": 1}')]),
        ("xlam", '[{"name": "f", "arguments": {}}]', [call("f", "{}")]),
        ("xlam", '[{"name": "other", "arguments": {}}]', [content('[{"name": "other", "arguments": {}}]')]),
        (
            "lfm2",
            "Hm. <|tool_call_start|>[weather(city='it\\'s \"x\"', days=3), clock()]<|tool_call_end|>z",
            [
                content("Hm."),
                call("weather", '{"city": "it\'s \\"x\\"", "days": 3}'),
                call("clock", "{}"),
                content("z"),
            ],
        ),
        (
            "olmo3",
            '<function_calls>\nf(code="a\nb", x={"y": [True, None, (1, 2)]})\nclock()\n</function_calls>',
            [call("f", '{"code": "a\\nb", "x": {"y": [true, null, [1, 2]]}}'), call("clock", "{}")],
        ),
        ("pythonic", "[f(x=oops, code='1')]", [call("f", '{"x": "oops", "code": "1"}')]),
        ("pythonic", "[weather(city=5)]", [call("weather", '{"city": "5"}')]),
        ("pythonic", "[f(code='cut", [call("f", '{"code": ')]),
        ("pythonic", "[other(x=1)]", [content("[other(x=1)]")]),
    ],
)
def test_items(name: str, text: str, items: list[Item]) -> None:
    assert list(read(name, text)) == items


def test_the_prompt_may_begin_the_reasoning() -> None:
    text = "Hm.\n</think>\n\nYes."
    assert read("hermes", text, is_reasoning_begun=True) == (reasoning("Hm."), content("Yes."))
    assert read("hermes", text) == (content(text),)
    assert read("hermes", "<think>" + text, is_reasoning_begun=True) == (reasoning("Hm."), content("Yes."))


def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    second = '<tool_call>{"name": "d", "arguments": {}}</tool_call>'
    text = f'a <tool_call>{{"name": "b", "arguments": {{}}}}</tool_call> c {second}'
    assert read("hermes", text, is_parallel=False) == (content("a"), call("b", "{}"))


def test_without_formats_everything_is_content() -> None:
    text = '<think>a</think> <tool_call>{"name": "b", "arguments": {}}</tool_call>'
    assert parse(ChatFormat(), text) == (content(text),)


@pytest.mark.parametrize(("name", "text"), CASES)
@pytest.mark.parametrize("is_reasoning_begun", [False, True])
def test_every_split_gives_the_whole_answer(name: str, text: str, is_reasoning_begun: bool) -> None:
    """All splits into one, two and three pieces, single characters, and random pieces."""
    options = {"is_reasoning_begun": is_reasoning_begun}
    whole = read(name, text, **options)
    assert streamed(name, list(text), **options) == whole
    cuts = range(len(text) + 1)
    for i in cuts:
        assert streamed(name, [text[:i], text[i:]], **options) == whole
    for i in cuts[:: max(1, len(text) // 24)]:
        for j in range(i, len(text) + 1, max(1, len(text) // 24)):
            assert streamed(name, [text[:i], text[i:j], text[j:]], **options) == whole


@pytest.mark.parametrize(("name", "text"), CASES)
def test_parts_after_any_text_depend_on_this_text_only(name: str, text: str) -> None:
    """After each character, all parts so far equal the parse of the text so far."""
    parser = ChatParser(FORMATS[name], tools=TOOLS)
    parts: list[AnswerPiece] = []
    for i in range(len(text)):
        parts += parser.push(text[i])
        assert items_of(parts) == read(name, text[: i + 1], is_finished=False)


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "<think>",
    ],
    "glm45": ["<tool_call>", "</tool_call>", "f", "<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "</think>"],
    "minimax_m2": [
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="x">',
        "</parameter>",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "f<｜tool▁sep｜>{",
        "<｜tool▁sep｜>",
    ],
    "openai": [
        "<|channel|>",
        "analysis",
        "final",
        "commentary to=functions.f ",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|call|>",
        "<|channel|>analysis<|message|>",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:f{", "x:", '<|"|>', "[", "]", "}", "<think>"],
    "llama3": ["<|python_tag|>", ";", "<think>", "</think>"],
    "cohere": [
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "[",
        "]",
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {',
    ],
    "xlam": ["[", "]", "True", "None", "NaN", "   "],
    "pythonic": ["[", "]", "weather(", "f(", ")", "x=", "code=", "'", "True", ", "],
    "olmo3": ["<function_calls>", "</function_calls>", "f(", ")", "x=", "'", '"', "[", "]"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "weather", "[THINK]", "[/THINK]"],
}
COMMON = [
    '{"name": "weather", "arguments": {',
    '{"name": "f", "parameters": {"x": "',
    '"arguments": {"x": 1}',
    '{"arguments": [], "name": "f"}',
    '"', "{", "}", "}}", ",", ":", "\\", " ", "\n", "é", "1", "null", "x",
]  # fmt: skip


@given(st.data())
def test_random_text_in_random_pieces(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FRAGMENTS)))
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name] + COMMON), max_size=14)))
    is_begun = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    pieces, parser = [], ChatParser(FORMATS[name], tools=TOOLS, is_reasoning_begun=is_begun)
    parts: list[AnswerPiece] = []
    position = 0
    while position < len(text):
        size = rng.choice((1, 2, 5, 20))
        pieces.append(text[position : position + size])
        position += size
        parts += parser.push(pieces[-1])
        before = read(name, text[:position], is_finished=False, is_reasoning_begun=is_begun)
        assert items_of(parts) == before
    parts += parser.finish()
    check_positions(parts)
    assert items_of(parts) == read(name, text, is_reasoning_begun=is_begun)


@pytest.mark.parametrize(
    ("name", "start", "body"),
    [
        ("hermes", "", "some words "),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "', "some words "),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": oops', "some words "),
        ("hermes", "<think>", "some words "),
        ("qwen3_coder", "<tool_call><function=f><parameter=code>", "some words "),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>", "some words "),
        ("glm45", "<tool_call>f<arg_key>code</arg_key><arg_value>", "some words "),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{", '"a": 1, '),
        ("openai", "<|channel|>analysis<|message|>", "some words "),
        ("gemma4", '<|tool_call>call:f{x:<|"|>', "some words "),
        ("gemma4", "<|tool_call>call:f{x:[", "1, "),
        ("openai", "<|channel|>final<|message|>", "some words "),
        ("llama3", '{"name": "f", "parameters": {"x": [', '{"y": 1}, '),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "', "some words "),
        ("lfm2", "<|tool_call_start|>[f(x='", "some words "),
        ("lfm2", "<|tool_call_start|>[f(x=[", "1, "),
    ],
)
def test_long_text_is_not_read_again(name: str, start: str, body: str) -> None:
    """The text that a parser reads again with the next piece stays short."""
    parser = ChatParser(FORMATS[name], tools=TOOLS)
    parser.push(start)
    for _ in range(5000):
        parser.push(body)
        assert parser._reader.num_pending < 64


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    (OPTIONAL, "5", "5"),
    (OPTIONAL, "10001", "10001"),
    (OPTIONAL, "null", None),
    (OPTIONAL, "nullable", "nullable"),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"oneOf": [{"type": "string"}]}, "5", "5"),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
    ({"$ref": "#/$defs/text"}, "5", "5"),
    ({"$ref": "#/$defs/loop"}, "5", 5),
    ({"$ref": "http://else"}, "5", 5),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "2"]}, "1", 1),
    ({"const": "7"}, "7", "7"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "integer"}, "3", 3),
    ({"type": "object"}, "{'a': True, \"b\": None}", {"a": True, "b": None}),
    ({"type": "array"}, "[1, 2,]", [1, 2]),
    ({"type": "array"}, '["a\tb"]', ["a\tb"]),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "-Infinity", "-Infinity"),
    ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({"type": "object"}, "{1, 2}", "{1, 2}"),
    ({"type": "object"}, "[" * 5000, "[" * 5000),
    ({}, "True", "True"),
    ({}, '{"a": 1}', {"a": 1}),
    (None, "NaN", "NaN"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "step3", "gemma4"])
def test_values_have_the_types_of_their_schemas(name: str, schema: Any, text: str, value: Any) -> None:
    defs = {"text": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}}
    tools = {"f": {"type": "object", "properties": {"x": schema}, "$defs": defs}}
    layout = TOOL_FORMATS[name].layout
    if isinstance(layout, XmlCalls):
        before = (layout.block[0] + layout.function[0] + layout.parameter[0]).replace("{name}", "f")
        answer = f"{before.replace('{key}', 'x')}{text}{layout.parameter[1]}{layout.function[1]}{layout.block[1]}"
    elif "{" in text or "[" in text:
        pytest.skip("containers have a notation of their own")
    else:
        answer = f"<|tool_call>call:f{{x:{text}}}<tool_call|>"
    (item,) = parse(FORMATS[name], answer, tools=tools)
    assert json.loads(item.text, parse_constant=pytest.fail) == {"x": value}


def test_call_ids_are_a_function_of_request_sample_and_call() -> None:
    ids = {call_id(request, sample, call) for request in ("a", "b") for sample in (0, 1) for call in (0, 1)}
    assert len(ids) == 8
    assert call_id("a", 0, 0) == call_id("a", 0, 0)
    assert call_id("a", 0, 0).startswith("call_")
    keys = {call_key(*parts) for parts in product(("a", "b"), (1, 2), (array("I", [7]), array("I", [7, 7])))}
    assert len(keys) == 8
    short = {short_call_id(number) for number in range(1000)}
    assert len(short) == 1000
    assert all(len(one) == 9 and one.isalnum() for one in short)


def test_parsers_of_one_half_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    called = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    assert parse(ChatFormat(GPT_OSS), text) == (reasoning("A."), content(called))
    assert parse(ChatFormat(None, TOOL_FORMATS["openai"]), text) == (content("A."), call("f", "{}"))


def test_reasoning_of_gemma() -> None:
    text = "<|channel>thought\nHm.<channel|>Yes."
    assert parse(ChatFormat(GEMMA4), text) == (reasoning("Hm."), content("Yes."))
    assert GEMMA4.markers == ("<|channel>", "<channel|>")


def test_numbered_call_ids_count_through_the_chat() -> None:
    """The ids of the clients stay unique; the template gets those that it requires, also for an id that comes twice."""
    for name, shown in (("hermes", ["x", "y", "x"]), ("mistral", [short_call_id(i) for i in range(3)])):
        assert shown_ids(name) == [shown, [shown[1], shown[0], shown[2], "unknown"]]
    assert shown_ids("kimi_k2")[0] == ["functions.f:0", "functions.g:1", "functions.f:2"]


def shown_ids(name: str) -> list[list[str]]:
    """The ids of calls and of results that a template gets."""
    messages: list[Any] = []
    for calls, results in (([("x", "f"), ("y", "g")], ["y", "x"]), ([("x", "f")], ["x", "unknown"])):
        messages.append({"tool_calls": [{"id": call_id, "function": {"name": tool}} for call_id, tool in calls]})
        messages += [{"role": "tool", "tool_call_id": call_id} for call_id in results]
    _set_call_ids(messages, FORMATS[name].tools)
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return [calls, [message["tool_call_id"] for message in messages if "tool_call_id" in message]]


def test_streamed_arguments_are_valid_json() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Z\\u00fcrich\\n", "days": 2}}</tool_call>'
    (item,) = streamed("hermes", list(text))
    assert json.loads(item.text) == {"city": "Zürich\n", "days": 2}
