"""Structural tags as grammars, compiled by llguidance."""

from __future__ import annotations

import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request import plan
from gateway_svc.request.plan import Planner
from gateway_svc.request.prompts.reader import PromptInput
from gateway_svc.request.threads import Lane
from gateway_svc.text.chat_output import ChatFormat
from gateway_svc.text.reasoning import THINK
from gateway_svc.text.tool_grammar import CallRules, tool_grammar
from grammars.schemas import GrammarError
from request_fields.parameters import GrammarKind
from tests.unit.gateway.test_thinking import model_of
from tests.unit.gateway.test_tool_grammar import tokenizer_with

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER: Any = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT: Any = {"type": "any_text"}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=add>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TAGS: Any = [
    {"type": "tag", "begin": "<a>", "content": NUMBER, "end": "</a>"},
    {"type": "tag", "begin": "<b>", "content": TEXT, "end": ["</b>", "|"]},
]
TRIGGERED: Any = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
SEPARATED: Any = {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}
PARIS = '<function=weather>{"city": "Paris"}</function>'

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "legacy": (
        LEGACY,
        ["", "some text", PARIS, f"a {PARIS} b <function=add>3</function>{PARIS} < c", "<func"],
        ["<function=", "<function=weather>{}</function>", "a <function=other>", PARIS[:-1], "<function=add>x"],
    ),
    "constant": ({"format": {"type": "const_string", "value": "yes\n\"/"}}, ["yes\n\"/"], ["", "yes"]),
    "schema": ({"format": NUMBER}, ["12"], ["", "a"]),
    "regex": ({"format": {"type": "regex", "pattern": "a/b+"}}, ["a/bb"], ["a/", ""]),
    "text": ({"format": TEXT}, ["", "anything\n<a>"], []),
    "text without": ({"format": {**TEXT, "excludes": ["no"]}}, ["", "yes", "n o"], ["a no"]),
    "sequence": (
        {"format": {"type": "sequence", "elements": [NUMBER, TAGS[0], TEXT]}}, ["1<a>2</a>", "1<a>2</a> x"], ["1"]
    ),
    "or": ({"format": {"type": "or", "elements": [NUMBER, TAGS[1]]}}, ["1", "<b>x</b>", "<b>x|"], ["1<b>x|", "<b>x"]),
    "triggered": ({"format": TRIGGERED}, ["", "x", "<a>1</a> y <b>z|<a>2</a>", "<b></b>"], ["<a>x</a>", "<b>", "x <a"]),
    "at least one": (
        {"format": {**TRIGGERED, "at_least_one": True}},
        ["<a>1</a>", "<b>x</b> y <a>1</a>"],
        ["", "x", "x <a>1</a>"],
    ),
    "one": (
        {"format": {**TRIGGERED, "stop_after_first": True}}, ["x", "", "x <a>1</a>"], ["<a>1</a> x", "<a>1</a><a>1</a>"]
    ),
    "exactly one": (
        {"format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}}, ["<a>1</a>"], ["", "x<a>1</a>"]
    ),
    "excluded": ({"format": {**TRIGGERED, "excludes": ["no"]}}, ["yes <a>1</a>"], ["no", "no <a>1</a>"]),
    "separated": ({"format": SEPARATED}, ["", "<a>1</a>", "<a>1</a>, <b>x|"], ["<a>1</a><a>1</a>", "x", "<a>1</a>, "]),
    "separated, one": (
        {"format": {**SEPARATED, "at_least_one": True, "stop_after_first": True}},
        ["<a>1</a>"],
        ["", "<a>1</a>, <a>1</a>"],
    ),
    "nested": (
        {"format": {"type": "tag", "begin": "[", "content": SEPARATED, "end": "]"}},
        ["[]", "[<a>1</a>]"],
        ["[", "<a>1</a>"],
    ),
}  # fmt: skip


def accepts(tag: Any, text: str, markers: tuple[str, ...], *, begun: bool = False) -> bool:
    tokenizer, compiler = tokenizer_with(*markers)
    rules = CallRules({}, needs_call=False, is_parallel=False, content=(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    format = ChatFormat(THINK if begun else None)
    matcher = compiler.compile(
        GrammarKind.LARK, tool_grammar(format, rules, tokenizer.token_to_id, is_reasoning_begun=begun)
    )
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("markers", [(), ("<a>", "</a>", "<b>", "</b>", "</function>")], ids=["text", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_an_output_has_the_structure(name: str, markers: tuple[str, ...]) -> None:
    tag, valid, invalid = CASES[name]
    tokens = () if name in ("text", "triggered", "excluded") or "one" in name else markers
    for text in valid:
        assert accepts(tag, text, tokens), text
    for text in invalid:
        assert not accepts(tag, text, tokens), text


def test_triggers_may_be_tokens() -> None:
    tag = {"format": {**TRIGGERED, "triggers": ["<a>", "<b>"]}}
    for markers in ((), ("<a>", "</a>", "<b>", "</b>")):
        assert accepts(tag, "x <a>1</a> y<b>z</b>", markers)
        assert not accepts(tag, "x <a>z</a>", markers)


def test_reasoning_that_the_prompt_began_comes_first() -> None:
    assert accepts(LEGACY, f"<function= is a trigger</think>\n\n{PARIS}", ("<think>", "</think>"), begun=True)
    assert not accepts(LEGACY, PARIS, ("<think>", "</think>"), begun=True)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, r"structures is None; must be a list"),
        ({"structures": [5]}, r"structures\[0\] is 5; must be an object"),
        ({"structures": LEGACY["structures"]}, "triggers is None; must be a list"),
        ({**LEGACY, "triggers": ["<other"]}, r"tags\[0\].begin is '<function=weather>'; must start with one"),
        ({**LEGACY, "triggers": [""]}, r"triggers\[0\] is ''; must be a string that is not empty"),
        ({**LEGACY, "structures": [{"begin": "<function=", "end": ""}]}, r"json_schema is None; must be an object"),
        ({"format": []}, r"format is \[\]; must be an object"),
        ({"format": {"type": "grammar"}}, "format.type is 'grammar'; must be one of const_string, json_schema"),
        ({"format": {**NUMBER, "style": "qwen_xml"}}, "format.style is 'qwen_xml'; must be 'json'"),
        ({"format": {"type": "sequence", "elements": [TEXT, NUMBER]}}, r"elements\[0\] is free text without an end"),
        ({"format": {"type": "or", "elements": []}}, r"format.elements is \[\]; must be a list"),
        ({"format": {"type": "tag", "begin": "a", "content": NUMBER, "end": 5}}, "format.end is 5; must be a string"),
        ({"format": {**TRIGGERED, "tags": TAGS * 300}}, "more than 512 tags"),
        ({"format": {**TAGS[1], "end": [f"{i}" for i in range(1500)]}}, "a grammar of more than 131072 bytes"),
        ({"format": {**TRIGGERED, "excludes": ["-" * 30_000]}}, "a grammar of more than 131072 bytes"),
    ],
)  # fmt: skip
def test_a_bad_structure_is_refused_by_name(tag: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        accepts(tag, "", ())


def test_a_deep_structure_is_refused() -> None:
    tag: Any = NUMBER
    for _ in range(70):
        tag = {"type": "or", "elements": [tag]}
    with pytest.raises(GrammarError, match="nested"):
        accepts({"format": tag}, "", ())


async def test_large_fields_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat without tools has structures too, and the variables of its template may be a thinking budget."""
    names, lane = list[str](), Lane(1, "reader", is_call=False)
    for step in ("answer_grammar", "plan_generation"):
        monkeypatch.setattr(plan, step, lambda *args, **options: names.append(threading.current_thread().name))
    for structure, variables in ((10, 10), (10_000, 10), (10, 10_000)):
        chat, sampling = (
            pb.Chat(template_kwargs_json="x" * variables),
            types.SamplingParams(structural_tag="x" * structure),
        )
        request = pb.GenerateRequest(prompt=pb.Prompt(chat=chat), sampling=sampling)
        options: Any = {"request_id": "r", "grammar": None, "cache_salt": "", "replay": None}
        await Planner(Mock(), lane).plan(request, model_of(THINK), PromptInput([1]), **options)
    lane.close()
    assert [name.startswith("reader") for name in names] == [False, False, True, True, False, True]
