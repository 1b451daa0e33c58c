"""Grammars of the inputs of custom tools: in every format of calls, exactly the texts that the client's grammar has."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.text.chat_output import parse
from gateway_svc.text.input_grammar import plain, quoted
from grammars.schemas import GrammarError
from request_fields.parameters import GrammarKind
from tests.unit.gateway.test_tool_grammar import VALID, Case, tokenizer_with, valid

APPLY_PATCH = (Path(__file__).parents[2] / "apply_patch.lark").read_text()  # Codex sends this one
PATCH = '*** Begin Patch\n*** Update File: a "b\\c\n@@ def f():\n-\tx = "1"\n+\tx = \'é\\n\'\n*** End Patch'
CUSTOM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
    "x-grammar": APPLY_PATCH,
}
NESTED = """
start: stmt
stmt: "for" NAME "in" expr | expr   // a comment with "quotes
?expr: NAME | "(" expr ")" -> group | NUMBER | TEXT | "a".."b" "!"
NAME: /[a-z]+/i
TEXT: ESCAPED_STRING
%import common (NUMBER, ESCAPED_STRING)
%import common.WS -> SPACE
%ignore SPACE
%ignore /#[^\\n]*/
"""


def call_of(name: str, text: str, *, has_tokens: bool) -> str:
    """A call of apply_patch with this input."""
    sample = next((one for one in valid(name, has_tokens=has_tokens) if "Paris" in one), "")
    sample = sample or '<function_calls>weather(city="Paris")</function_calls>'
    sample = re.sub(r",\s?days[:=]3", "", sample).replace("weather", "apply_patch").replace("city", "input")
    written = json.dumps(text, ensure_ascii=False) if '"Paris"' in sample else text
    return sample.replace('"Paris"', written).replace("Paris", written)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("needs_call", [True, False])
def test_a_patch_is_accepted_and_another_text_is_not(name: str, has_tokens: bool, needs_call: bool) -> None:
    schemas = {"apply_patch": CUSTOM, "clock": {"type": "object", "properties": {}}}
    case = Case(name, has_tokens=has_tokens, schemas=schemas, needs_call=needs_call)
    text = call_of(name, PATCH, has_tokens=has_tokens)
    assert case.accepts(text), text
    items = parse(case.format, text, tools=schemas)
    assert (items[0].name, json.loads(items[0].text)) == ("apply_patch", {"input": PATCH})
    for wrong in ("", "x", PATCH[:-1], PATCH.replace("-\t", "\t"), PATCH.replace("\n+", "\n*")):
        if needs_call or name != "xlam":
            assert not case.accepts(call_of(name, wrong, has_tokens=has_tokens)), wrong
    if needs_call:
        assert not case.accepts("Hello")


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar of the text as a JSON string accepts it."""
    tokenizer, compiler = tokenizer_with()
    matcher = compiler.compile(GrammarKind.LARK, f'start: "\\"" text "\\""\ntext: %lark {{\n{quoted(grammar)}\n}}\n')
    ids = tokenizer.encode(json.dumps(text, ensure_ascii=False), add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ("start: /[^a]+/", '"\\\n b', "ba"),
        (r'start: "a".."c" /[\n"]+/ /\S/', 'b\n"x', "d\nx"),
        (r"start: /(?s:a.b)c.d/", "a\nbcxd", "a\nbc\nd"),
        (r"start: /a.b/s", "a\nb", "a\n\nb"),
        (r"start: /(?s)a(?-s:.)b./", "a b\n", "a\nb\n"),
        (r'start: "::=" "\x41\t" "b"i', "::=A\tB", "::=a\tb"),
        (r"start: /\x{22}\u{5c}[\x20-\x7e]\p{L}\//", '"\\"é/', '"\\"é'),
        (r"start: /[\W]\w[\D][\S]/", '"a\nb', '"a\n\n'),
        ("start: LF WS INT\n%import common (LF, WS)\n%import common.INT", "\n\r\n\t 12", "\n12"),
        (NESTED, 'for fox # c"\n in ("a\\" b" )', "for x of y"),
        (NESTED, "b!", "c!"),
        (NESTED, "((\n1.5e3\t) )", "((1)"),
        ('start: pair\npair: "\\"" pair "\\n" | "\\\\"', '""\\\n\n', '""\\\n'),
        ("start: /[\\s\\S]+/", "<b>\n\\u", ""),
    ],
)
def test_escaped_text_matches_exactly_if_the_text_does(grammar: str, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: ~/a/", "is not known in the grammar of an input"),
        ("start: <|x|>", "is not known"),
        ('start: %json {"type": "string"}', "is not known"),
        ("start[lazy]: /a/", "is not known"),
        ("start.2: /a/", "is not known"),
        ("start: /[[a]]/", "has a class in a class"),
        ("start: /[a&&b]/", "list its characters"),
        (r"start: /[\p{P}]/", "list its characters"),
        ("start: /(?=a)b/", "has a group with a name or a condition"),
        ("start: /a b/x", "has white space without meaning"),
        ('start: a\na: "(" a ")" | /(?i:b)/', "has flags"),
        ('start: "a\\n"i', "ignores case"),
        ('start: "ab".."c"', "is not a range"),
        ('start: "\\q"', "is not a valid string"),
        (r"start: /\x{110000}/", "is not a character"),
        ("start: A\n%import common.NOTHING", "known are DIGIT"),
        ("start: a\na: /b/\na: /c/", "is defined twice"),
        ("begin: /a/", "has no rule `start`"),
        ("start: /a/" + " " * (128 << 10), "characters; at most"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)):
        quoted(grammar)


def test_plain_text_stops_before_a_line_that_begins_with_a_marker() -> None:
    tokenizer, compiler = tokenizer_with()
    inner = plain(r'start: "// @exec\n"? /[\s\S]+/')
    text = f'start: text "\\n"? "</p>"\ntext: %lark {{\n{inner}\n}}\n'
    for good in ("// @exec\na < b\n  <p>\n</p>", "x\n</p>"):
        matcher = compiler.compile(GrammarKind.LARK, text)
        ids = tokenizer.encode(good, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids), matcher.is_accepting()) == (len(ids), True)


@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "/[a]",
        '"',
        "\\",
        "(",
        ".\\",
        "a-",
        "%import common",
        '"a"',
        "/(",
        "a:",
        "start: a\n",
        "b: b\n",
        "[^",
        r"\/",
        r"\"",
        r"\x{",
    ],
)
def test_the_cost_of_a_definition_is_linear(unit: str) -> None:
    """A definition of the greatest size takes less than 0.3 s of processor time; a quadratic step takes minutes."""
    grammar = (f"start: /{unit}" + unit * (128 << 10))[: 128 << 10]
    start = time.process_time()
    for convert in (quoted, plain):
        with contextlib.suppress(GrammarError):
            convert(grammar)
    assert time.process_time() - start < 2
