"""Grammars for tool calls, compiled by llguidance: they accept calls that the parser reads, and nothing else."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from gateway_svc.text.answer import Item, ItemKind
from gateway_svc.text.calls.gemma import GemmaCalls
from gateway_svc.text.chat_output import ChatFormat, parse
from gateway_svc.text.reasoning import GPT_OSS, THINK
from gateway_svc.text.tool_formats import TOOL_FORMATS
from gateway_svc.text.tool_grammar import MAX_CALLS, CallRules, tool_grammar
from grammars.compiler import GrammarCompiler
from grammars.schemas import GrammarError
from request_fields.parameters import GrammarKind
from tests.chat_templates import CLOCK, WEATHER
from tests.unit.gateway.tokenizer_kinds import byte_level

NESTED = {
    "type": "object",
    "properties": {
        "to": {"$ref": "#/$defs/place"},
        "note": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["to"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "weather": WEATHER["function"]["parameters"],  # type: ignore[index]
    "clock": CLOCK["function"]["parameters"],  # type: ignore[index]
    "go": NESTED,
}


@functools.cache
def tokenizer_with(*markers: str) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("</s>", *markers)])
    eos = tokenizer.token_to_id("</s>") or 0
    return tokenizer, GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [eos])


class Case:
    """A grammar and its tokenizer."""

    def __init__(
        self, name: str, *, has_tokens: bool, reasoning: bool = False, begun: bool = False, **rules: Any
    ) -> None:
        markers = [*TOOL_FORMATS[name].markers, *(THINK.markers if reasoning else ())] if has_tokens else []
        self._tokenizer, compiler = tokenizer_with(*markers)
        harmony = GPT_OSS if name == "openai" else None
        self.format = ChatFormat(THINK if reasoning and not harmony else harmony, TOOL_FORMATS[name])
        options = {"schemas": SCHEMAS, "needs_call": True, "is_parallel": True, **rules}
        text = tool_grammar(self.format, CallRules(**options), self._tokenizer.token_to_id, is_reasoning_begun=begun)
        self._matcher = compiler.compile(GrammarKind.LARK, text)

    def accepts(self, text: str) -> bool:
        """The whole text is an output that may end."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = '{"city": "Paris"}'
CALLS = f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "clock", "arguments": {{}}}}]'
VALID = {
    "hermes": [
        hermes("weather", PARIS),
        hermes("clock", "{}"),
        hermes("go", '{"to": {"x": 1}, "note": "a"}'),
        hermes("weather", PARIS) + "\n" + hermes("clock", "{}"),
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\na < b\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        '<tool_call>\n<function=go>\n<parameter=to>\n{"x": 1}\n</parameter>\n<parameter=unit>\nc\n</parameter>\n'
        "</function>\n</tool_call>",
    ],
    "glm45": [
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a < b</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    ],
    "glm47": [
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "<tool_call>clock</tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
    ],
    "gemma4": [
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
        '<|tool_call>call:weather{city:<|"|>a < b<|"|>,days:3}<tool_call|><|tool_call>call:clock{}<tool_call|>',
        '<|tool_call>call:go{to:{x:1},note:<|"|><|"|>,unit:<|"|>f<|"|>}<tool_call|>',
        '<|tool_call>call:go{to:{},unit:<|"|>c<|"|>}<tool_call|>'.replace("{}", "{x:-2}"),
    ],
    "functiongemma": [
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        "<start_function_call>call:go{to:{x:1}}<end_function_call><start_function_call>call:clock{}<end_function_call>",
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ],
    "llama3": [
        f'{{"name": "weather", "parameters": {PARIS}}}',
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "clock", "parameters": {{}}}}',
    ],
    "step3": [
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>"
    ],
    "cohere": [
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {PARIS}}}, '
        '{"tool_call_id": "0", "tool_name": "clock", "parameters": {}}]<|END_ACTION|>'
    ],
    "granite": [f"<|tool_call|>{CALLS}"],
    "hunyuan": [f"<tool_calls>{CALLS}</tool_calls>"],
    "phi4_mini": [f"functools{CALLS}"],
    "xlam": [CALLS],
    "lfm2": [
        '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>',
        '<|tool_call_start|>[weather(city="Paris", days=3), clock()]<|tool_call_end|>',
    ],
    "olmo3": ['<function_calls>go(to={"x": 1}, note="a")\nclock()</function_calls>'],
    "pythonic": ['[weather(city="Paris", days=3), clock()]', "[clock()]"],
    "mistral": [f"[TOOL_CALLS]weather[ARGS]{PARIS}", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]clock[ARGS]{{}}"],
}
MISTRAL_LISTS = [
    f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "clock", "arguments": {{}}}}]',
]


def valid(name: str, *, has_tokens: bool) -> list[str]:
    return MISTRAL_LISTS if name == "mistral" and not has_tokens else VALID[name]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", VALID)
def test_valid_calls_are_accepted_and_parsed(name: str, has_tokens: bool) -> None:
    case = Case(name, has_tokens=has_tokens)
    for text in valid(name, has_tokens=has_tokens):
        assert case.accepts(text), text
        items = parse(case.format, text, tools=SCHEMAS)
        assert {item.kind for item in items} == {ItemKind.TOOL_CALL}
        assert [item.name for item in items] == names_in(text)


def names_in(text: str) -> list[str]:
    """Names of tools in a text, in order."""
    return re.findall("|".join(SCHEMAS), text)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", VALID)
def test_other_text_is_refused(name: str, has_tokens: bool) -> None:
    case = Case(name, has_tokens=has_tokens)
    for text in valid(name, has_tokens=has_tokens):
        for wrong in (
            "Hello",
            text[:-1],
            text + " and more",
            text.replace("weather", "rain").replace("clock", "rain").replace("go", "rain"),
            text.replace("Paris", "").replace('"city"', '"town"') if '"city"' in text else "{}",
        ):
            assert not case.accepts(wrong), wrong


CONTENT = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
NAMED = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False})


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", VALID)
def test_an_answer_is_calls_or_content_with_a_grammar(name: str, has_tokens: bool) -> None:
    for content, good in (
        ((GrammarKind.JSON_SCHEMA, CONTENT), '{"x": 1}'),
        ((GrammarKind.JSON_SCHEMA, NAMED), '{"name": "weathers"}'),
        ((GrammarKind.JSON_SCHEMA, NAMED), '{"name":"other"}'),
        ((GrammarKind.REGEX, "a/b\\/c|d\ne"), "a/b/c"),
        ((GrammarKind.REGEX, "a/b\\/c|d\ne"), "d\ne"),
    ):
        case = Case(name, has_tokens=has_tokens, reasoning=True, needs_call=False, content=content)
        for thought in ("", "<think>Hm.</think>\n"):
            assert case.accepts(thought + good)
            assert parse(case.format, good, tools=SCHEMAS)[-1] == Item(ItemKind.CONTENT, good)
            assert not case.accepts(thought + "Hello")
            assert all(case.accepts(thought + text) for text in valid(name, has_tokens=has_tokens))
            assert not any(case.accepts(thought + text + good) for text in valid(name, has_tokens=has_tokens))


@pytest.mark.parametrize("name", VALID)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    case = Case(name, has_tokens=True, is_parallel=False)
    for text in valid(name, has_tokens=True):
        assert case.accepts(text) == (len(parse(case.format, text, tools=SCHEMAS)) == 1)


@pytest.mark.parametrize("needs_call", [True, False])
@pytest.mark.parametrize(
    ("name", "has_tokens", "start", "call", "separator", "end"),
    [
        ("hermes", True, "", hermes("clock", "{}"), "\n", ""),
        ("minimax_m2", True, "<minimax:tool_call>\n", '<invoke name="clock">\n</invoke>\n', "", "</minimax:tool_call>"),
        ("gemma4", True, "", "<|tool_call>call:clock{}<tool_call|>", "", ""),
        ("xlam", True, "[", '{"name": "clock", "arguments": {}}', ", ", "]"),
        ("pythonic", True, "[", "clock()", ", ", "]"),
        ("mistral", True, "", "[TOOL_CALLS]clock[ARGS]{}", "", ""),
        ("mistral", False, "[TOOL_CALLS][", '{"name": "clock", "arguments": {}}', ", ", "]"),
        (
            "deepseek_v31",
            True,
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
    ],
)
def test_calls_are_bounded(
    needs_call: bool, name: str, has_tokens: bool, start: str, call: str, separator: str, end: str
) -> None:
    case = Case(name, has_tokens=has_tokens, needs_call=needs_call)
    assert case.accepts(start + separator.join([call] * MAX_CALLS) + end)
    assert not case.accepts(start + separator.join([call] * (MAX_CALLS + 1)) + end)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", VALID)
def test_auto_accepts_text_before_valid_calls(name: str, has_tokens: bool) -> None:
    case = Case(name, has_tokens=has_tokens, needs_call=False)
    assert case.accepts("Hello, world.\n")
    for text in valid(name, has_tokens=has_tokens):
        assert case.accepts(text)
        assert not case.accepts(text.replace("weather", "rain").replace("clock", "rain").replace("go", "rain"))
        if name != "llama3":
            assert case.accepts("I look it up.\n" + text)


# Formats whose calls are read without the text at the start of their block: that text, and what is written instead.
BARE = {
    "qwen3_coder": ("<tool_call>\n", ""),
    "minimax_m2": ("<minimax:tool_call>\n", ""),
    "step3": ("<｜tool_calls_begin｜>\n", ""),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", ""),
    "kimi_k2": ("<|tool_calls_section_begin|>", ""),
    "llama3": ("", "<|python_tag|>"),
}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", BARE)
def test_auto_constrains_calls_without_their_block(name: str, has_tokens: bool) -> None:
    case = Case(name, has_tokens=has_tokens, needs_call=False)
    block, begin = BARE[name]
    for text in VALID[name]:
        bare = f"Sure.\n{begin}{text.removeprefix(block)}"
        assert case.accepts(bare)
        items = parse(case.format, bare, tools=SCHEMAS)
        assert [item.name for item in items] == ["", *names_in(text)]
        for wrong in (bare.replace("city", "town"), bare.replace("=to>", "=at>"), bare.replace("clock", "weather")):
            for cut in {wrong, wrong.removesuffix("\n</tool_call>")} - {bare, bare.removesuffix("\n</tool_call>")}:
                assert not case.accepts(cut), cut


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_is_free(begun: bool, has_tokens: bool) -> None:
    case = Case("hermes", has_tokens=has_tokens, reasoning=True, begun=begun)
    call = hermes("weather", PARIS)
    thought = "\nHm { < \n</think>\n\n"
    assert case.accepts(thought + call) == begun
    assert case.accepts("<think>" + thought + call) == (not begun or not has_tokens)
    assert case.accepts(call) == (not begun)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_messages_of_harmony(has_tokens: bool) -> None:
    thought = "<|channel|>analysis<|message|>Hm { <|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}"
    forced = Case("openai", has_tokens=has_tokens)
    assert forced.accepts(thought + call)
    assert forced.accepts(call)
    assert not forced.accepts(call.replace("weather", "rain"))
    assert not forced.accepts("<|channel|>final<|message|>Hello")
    auto = Case("openai", has_tokens=has_tokens, needs_call=False)
    assert auto.accepts(thought + "<|channel|>final<|message|>Hello")
    assert auto.accepts("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call)
    assert not auto.accepts(thought + call.replace("weather", "rain"))
    content = (GrammarKind.JSON_SCHEMA, CONTENT)
    for rules in ({}, {"schemas": {}}):
        schema = Case("openai", has_tokens=has_tokens, needs_call=False, content=content, **rules)
        assert schema.accepts(thought + '<|channel|>final<|message|>{"x": 1}')
        assert not schema.accepts('{"x": 1}')
        assert schema.accepts(call) == (not rules)


PLACE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["city", 3, None, [1, "b"]]},
        "near": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        "size": {"type": ["integer", "null"], "minimum": 10},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "tags": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "odd key:": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 3}]},
        "free": {},
    },
}
FIT = (
    "{}",
    "{kind:<q>city<q>}", "{kind:3,size:12}", "{kind:null}", "{kind:[1,<q>b<q>]}",
    "{size:null,free:{a:[1,{b:<q>c<q>}]}}",
    "{near:[]}", "{near:[{near:[{}]},{size:10}],code:<q>AB<q>}", "{tags:{}}", "{tags:{a:true,b_2:false}}",
    "{<q>odd key:<q>:1.5}", "{<q>odd key:<q>:<q>abc<q>}", "{<q>odd key:<q>:<q><q>}", "{free:<q>any {text}, [here]<q>}",
)  # fmt: skip
DO_NOT_FIT = (
    "{kind:city}", "{kind:4}", "{size:9}", "{size:12,kind:3}", "{near:[{},{},{}]}", "{near:{}}", "{code:<q>ABC<q>}",
    "{code:<q><q>}", "{tags:{a:1}}", "{odd key::1}", "{<q>odd key:<q>:<q>abcd<q>}", "{free:word}", "{other:1}", "{,}",
)  # fmt: skip


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_values_of_gemma_match_their_schema(name: str, has_tokens: bool) -> None:
    case = Case(name, has_tokens=has_tokens, schemas={"f": PLACE})
    calls = TOOL_FORMATS[name].layout
    assert isinstance(calls, GemmaCalls)

    def call(arguments: str) -> str:
        return f"{calls.start}call:f{arguments.replace('<q>', calls.quote)}{calls.end}"

    for arguments in FIT:
        assert case.accepts(call(arguments)), arguments
        (item,) = parse(case.format, call(arguments), tools={"f": PLACE})
        jsonschema.validate(json.loads(item.text), PLACE)
    for arguments in DO_NOT_FIT:
        assert not case.accepts(call(arguments)), arguments


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, "tool 'f'.properties.a: the keyword 'not' cannot be"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "the keyword 'uniqueItems' cannot be enforced"),
        ({"properties": {"a": {"type": "text"}}}, "tool 'f'.properties.a.type: \"text\" is no type"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "'#/$defs/b' is not in this schema"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "tool 'f'.properties.a.pattern: "),
        ({"properties": {"a": {"type": "string", "minLength": "1"}}}, "minLength: is a JSON str; it must be a int"),
        ({"properties": {"a": {"enum": ['<|"|>']}}}, 'a value contains <|"|>, which ends a string'),
        ({"properties": {"a": False}}, "tool 'f'.properties.a: false is no schema that a value can match"),
        ({"properties": [], "required": ["a"]}, "properties: is a JSON list; it must be a dict"),
        ({"properties": {}, "required": ["a"]}, "required: \"a\" is not in properties"),
        ({"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}}, "maxItems: 2 is below minItems, 3"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/0"}},
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)},
            },
            "tool 'f': a chain of references is too long",
        ),
    ],
)  # fmt: skip
def test_a_schema_without_a_grammar_for_gemma_is_refused_by_its_part(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        Case("gemma4", has_tokens=True, schemas={"f": schema})
