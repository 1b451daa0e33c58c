"""Grammars that make a model write valid tool calls: Lark as llguidance reads it, in the format of the model's calls.

    start: reasoning calls               tool_choice required, or a named tool
    start: reasoning (calls | content)   auto, if the content has a grammar of its own
    start: reasoning TEXT? calls?        auto, with strict tools

The name and the markers are fixed text, and the arguments match the tool's JSON schema. A marker that is one token of
the vocabulary is written as this token: text cannot contain it. The reasoning is free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gateway_svc.text.calls.gemma import GemmaCalls
from gateway_svc.text.calls.json_calls import MISTRAL, JsonCalls, MarkedCalls, MistralCalls
from gateway_svc.text.calls.python import PythonCalls
from gateway_svc.text.calls.values import TEXT_OR_NULL, texts_of, types_of
from gateway_svc.text.calls.xml import XmlCalls
from gateway_svc.text.chat_output import ChatFormat
from gateway_svc.text.gemma_grammar import GemmaValues
from gateway_svc.text.lark import Lark, TokenId, add_structural_tag
from gateway_svc.text.reasoning import HarmonyReasoning, ReasoningFormat
from gateway_svc.text.tool_formats import HARMONY, TOOL_FORMATS, HarmonyCalls
from grammars.schemas import INPUT, INPUT_GRAMMAR, SHARED, GrammarError
from request_fields.parameters import GrammarKind

Layout = TypeVar("Layout")

COMMA = '", "'
CLOSED_OBJECT: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
GAP = r"/[ \t\r\n]{0,4}/"
MAX_CALLS = 32  # limit of one answer: weak models repeat a call until the context is full
MORE = f"{{0,{MAX_CALLS - 1}}}"


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls the output may have."""

    schemas: Mapping[str, Mapping[str, Any]]  # schemas of the arguments, by tool; an empty schema: no arguments
    needs_call: bool
    is_parallel: bool
    content: tuple[GrammarKind, str] | None = None  # an answer without a call: a schema or a regex; None: any text


def tool_grammar(format: ChatFormat, rules: CallRules, token_id: TokenId, *, is_reasoning_begun: bool = False) -> str:
    """The grammar of an answer in this format. `format.tools` must be set if the rules have calls. Raises GrammarError
    for a schema that the format has no grammar for."""
    lark = Lark(token_id, format.markers)
    writer = _writer(lark, format)
    body = writer.body if rules.content is None else writer.body_beside_content
    bodies = [lark.add("call", _named(body, name, schema)) for name, schema in rules.schemas.items()]
    content = "" if rules.content is None else writer.content(_content(lark, *rules.content))
    calls = ""
    if bodies:
        calls = writer.calls(lark.add("any_call", " | ".join(bodies)), is_parallel=rules.is_parallel)
    if content:
        answer = f"({writer.lead} {calls} | {content})" if bodies else content
    elif rules.needs_call:
        answer = f"{writer.lead} {calls}"
    else:
        answer = writer.calls_or_text(calls)
    return lark.text(f"{_reasoning(lark, format.reasoning, is_begun=is_reasoning_begun)} {answer}")


def _named(body: Callable[[str, Mapping[str, Any]], str], name: str, schema: Mapping[str, Any]) -> str:
    """The body of a call. An error in the grammar of an input names the tool."""
    try:
        return body(name, schema)
    except GrammarError as error:
        raise GrammarError(f"the grammar of {name!r}: {error}" if INPUT_GRAMMAR in schema else str(error)) from None


def _content(lark: Lark, kind: GrammarKind, text: str) -> str:
    return add_structural_tag(lark, text) if kind is GrammarKind.STRUCTURAL_TAG else lark.add_content(kind, text)


def _writer(lark: Lark, format: ChatFormat) -> _Writer[Any]:
    if isinstance(format.reasoning, HarmonyReasoning):
        return _Harmony(lark, HARMONY)
    tools = format.tools or TOOL_FORMATS["hermes"]  # without calls, all formats write content alike
    return WRITERS[type(tools.layout)](lark, tools.layout)


def _reasoning(lark: Lark, format: ReasoningFormat | None, *, is_begun: bool) -> str:
    if format is None:
        return ""
    rest = f"{lark.until(format.end)} {lark.literal(format.after) if format.after else GAP}"
    return rest if is_begun else f"({lark.literal(format.start)} {rest})?"


class _Writer(Generic[Layout]):
    """Calls with a marker before each."""

    start = ""  # the marker before the first call; "": none
    opener = "{"  # without a marker: what free text must not begin with
    separator = '"\\n"'

    def __init__(self, lark: Lark, layout: Layout) -> None:
        self._lark = lark
        self._layout = layout
        self._bare: dict[str, str] = {}  # calls that are read without the marker before them: first text -> the rest
        self._tails: list[str] = []  # the rest of a call, per tool

    @property
    def lead(self) -> str:
        return self._lark.literal(self.start) if self.start else ""

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        """One call without the marker before it."""
        raise NotImplementedError

    def body_beside_content(self, name: str, schema: Mapping[str, Any]) -> str:
        """The same, if the answer may be content that matches a grammar instead."""
        return self.body(name, schema)

    def content(self, rule: str) -> str:
        """Content that matches a rule."""
        return rule

    def calls_or_text(self, calls: str) -> str:
        """Any text, and the calls if they are not forced."""
        ways = {self.start: calls, **self._bare}
        at_once = [ways.pop("")] if "" in ways else []
        opener = self.opener if at_once else ""
        later = (f"{self._lark.until(one, ways.keys() - {one}, opener)} {rule}" for one, rule in ways.items())
        return f"({' | '.join([*at_once, *later, self._lark.add_text(ways, opener)])})?"

    def calls(self, body: str, *, is_parallel: bool) -> str:
        """All calls, without the marker before the first."""
        return f"{body} ({self.separator} {self.lead} {body}){MORE}" if is_parallel else body


class _Json(_Writer[JsonCalls]):
    """Objects, one in a block or several in a list."""

    def __init__(self, lark: Lark, layout: JsonCalls) -> None:
        super().__init__(lark, layout)
        self.start = "" if self._layout.is_bare else self._layout.start
        self.opener = "[" if self._layout.is_list else "{"
        self.separator = json.dumps(self._layout.separator)

    @property
    def _gap(self) -> str:
        """The white space after the marker."""
        return self._layout.block[0].removeprefix(self._layout.start)

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        call = _object(self._lark, self._layout.head.replace("{name}", json.dumps(name)), schema)
        if self._layout.is_list or self._layout.is_bare:
            return call
        return f"{self._lark.literal(self._gap)} {call} {self._lark.literal(self._layout.block[1])}"

    def body_beside_content(self, name: str, schema: Mapping[str, Any]) -> str:
        """Without a marker, as a JSON Schema: the lexer cannot follow a literal and the start of another object at the
        same time."""
        if self.start or self._layout.is_list:
            return self.body(name, schema)
        if INPUT_GRAMMAR in schema:
            raise GrammarError("it cannot be enforced beside a format of the text")
        shared = {keyword: schema[keyword] for keyword in SHARED if keyword in schema}
        properties = {"name": {"const": name}, "parameters": _arguments(schema)}
        return self._lark.add_json({**shared, **CLOSED_OBJECT, "properties": properties, "required": list(properties)})

    def calls(self, body: str, *, is_parallel: bool) -> str:
        if not self._layout.is_list:
            calls = super().calls(body, is_parallel=is_parallel)
            if self._layout.is_bare:
                self._bare[self._layout.start] = calls
            return calls
        more = f"({self.separator} {body}){MORE}" if is_parallel else ""
        return f'{self._lark.literal(self._gap)} "[" {body} {more} "]" {self._lark.literal(self._layout.block[1])}'


class _Python(_Writer[PythonCalls]):
    """Calls with named arguments: required ones, then optional ones, each in the order of the schema."""

    def __init__(self, lark: Lark, layout: PythonCalls) -> None:
        super().__init__(lark, layout)
        self.start, self.opener = self._layout.start, "["

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = _properties(schema), schema.get("required") or ()
        arguments = {key: self._argument(key, value, schema) for key, value in properties.items()}
        fixed = [rule for key, rule in arguments.items() if key in required]
        optional = [rule for key, rule in arguments.items() if key not in required]
        return f'{self._lark.literal(f"{name}(")} {self._lark.members(fixed, optional, COMMA)} ")"'

    def calls(self, body: str, *, is_parallel: bool) -> str:
        opened, closed = ('"["', '"]"') if self._layout.is_list else ("", "")
        more = f"({json.dumps(self._layout.separator)} {body}){MORE}" if is_parallel else ""
        return f"{opened} {body} {more} {closed} {self._lark.literal(self._layout.block[1])}"

    def _argument(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        if INPUT_GRAMMAR in root:
            return f"{self._lark.literal(f'{key}=')} {self._lark.add_quoted_input(root)}"
        if types_of(schema, root) == {"boolean"}:
            return f'{self._lark.literal(f"{key}=")} ("True" | "False")'
        shared = {name: root[name] for name in SHARED if name in root}
        return f"{self._lark.literal(f'{key}=')} {self._lark.add_json({**shared, **schema})}"


class _Xml(_Writer[XmlCalls]):
    """Required parameters, then the optional ones, each in the order of the schema."""

    def __init__(self, lark: Lark, layout: XmlCalls) -> None:
        super().__init__(lark, layout)
        self.start = self._layout.block[0].strip()

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = _properties(schema), schema.get("required") or ()
        ordered = sorted(properties, key=lambda key: key not in required)
        parameters = [self._parameter(key, properties[key], schema) for key in ordered]
        optional = [p if key in required else f"({p})?" for key, p in zip(ordered, parameters, strict=True)]
        head, end = (one.replace("{name}", name) for one in self._layout.function)
        gap, end = ("", end) if self._layout.has_many else (self._gap, end + self._layout.block[1])
        rest = self._lark.literal(head.removeprefix(self._call))
        tail = self._lark.add("tail", f"{rest} {' '.join(optional)} {self._lark.literal(end)}")
        self._tails.append(tail)
        return f"{self._lark.literal(gap + self._call)} {tail}"

    @property
    def _call(self) -> str:
        """The text before the name of a tool."""
        return self._layout.function[0].partition("{name}")[0]

    @property
    def _gap(self) -> str:
        """The white space after the start of a block."""
        return self._layout.block[0].removeprefix(self.start)

    def calls(self, body: str, *, is_parallel: bool) -> str:
        start, again, end = "", f"{self.separator} {self.lead} {body}", ""
        if self._layout.has_many:
            start, again, end = self._lark.literal(self._gap), body, self._lark.literal(self._layout.block[1])
        more = f"({again}){MORE} {end}" if is_parallel else end
        if self._call:
            self._bare[self._call] = f"({' | '.join(self._tails)}) {more}"
        return f"{start} {body} {more}"

    def _parameter(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        head, end = self._lark.literal(self._layout.parameter[0].replace("{key}", key)), self._layout.parameter[1]
        if INPUT_GRAMMAR in root:  # the text may have taken the line break of the marker
            return f'{head} {self._lark.add_plain_input(root)} "\\n"? {self._lark.literal(end.lstrip())}'
        if types_of(schema, root) <= TEXT_OR_NULL:
            texts, marker = texts_of(schema, root), end.strip()
            if texts is None:
                return f"{head} {self._lark.until(marker)} {self._lark.literal(end.partition(marker)[2])}"
            return f"{head} ({' | '.join(map(json.dumps, texts))}) {self._lark.literal(end)}"
        shared = {name: root[name] for name in SHARED if name in root}
        return f"{head} {self._lark.add_json({**shared, **schema})} {self._lark.literal(end)}"


class _Marked(_Writer[MarkedCalls]):
    """A name and JSON arguments between markers."""

    def __init__(self, lark: Lark, layout: MarkedCalls) -> None:
        super().__init__(lark, layout)
        self.start = self._layout.section[0]

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        before, after = self._layout.call[0].removeprefix(self._layout.start).split("{name}")
        head = self._lark.literal(f"{before}{name}{after}")
        if self._layout.is_numbered:
            named = self._lark.literal(f"{before}functions.{name}:")
            head = f"{named} /[0-9]{{1,4}}/ {self._lark.literal(after)}"
        arguments = self._lark.add_arguments(_arguments(schema))
        tail = self._lark.add("tail", f"{head} {arguments} {self._lark.literal(self._layout.call[1])}")
        self._tails.append(tail)
        return f"{self._lark.literal(self._layout.start)} {tail}"

    def calls(self, body: str, *, is_parallel: bool) -> str:
        more = f"({self._lark.literal(self._layout.separator)} {body}){MORE}" if is_parallel else ""
        rest = f"{more} {self._lark.literal(self._layout.section[1])}"
        self._bare[self._layout.start] = f"({' | '.join(self._tails)}) {rest}"
        return f"{body} {rest}"


class _Gemma(_Writer[GemmaCalls]):
    """A name and arguments in Gemma's own notation."""

    separator = ""

    def __init__(self, lark: Lark, layout: GemmaCalls) -> None:
        super().__init__(lark, layout)
        self.start = self._layout.start

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        return (
            f"{self._lark.literal(f'call:{name}')} {self._values(name, schema)} {self._lark.literal(self._layout.end)}"
        )

    def _values(self, name: str, schema: Mapping[str, Any]) -> str:
        quote = self._layout.quote
        if INPUT_GRAMMAR not in schema:
            return GemmaValues(self._lark, quote, _arguments(schema), f"tool {name!r}").root
        before, after = self._lark.literal(f"{{{INPUT}:{quote}"), self._lark.literal(f"{quote}}}")
        return f"{before} {self._lark.add_plain_input(schema)} {after}"


class _Harmony(_Writer[HarmonyCalls]):
    """A message with a call or with content. It ends the turn, so there is one call, and its end is left to EOS."""

    start = "<|channel|>commentary to=functions."
    final = "<|channel|>final<|message|>"
    preamble = "<|channel|>commentary<|message|>"

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        head = self._lark.literal(f"{name} <|constrain|>json<|message|>")
        return f"{head} {self._lark.add_arguments(_arguments(schema))}"

    def content(self, rule: str) -> str:
        return f"{self._lark.literal(self.final)} {rule}"

    def calls_or_text(self, calls: str) -> str:
        end, next_ = self._lark.until("<|end|>"), self._lark.literal("<|start|>assistant")
        before = f"({self._lark.literal(self.preamble)} {end} {next_})?"
        return f"({before} {self.lead} {calls} | {self.content(self._lark.add_text(['<|end|>']))})"

    def calls(self, body: str, *, is_parallel: bool) -> str:
        return body


class _Mistral(_Writer[MistralCalls]):
    """The format with [ARGS] if the vocabulary has this token, else a list."""

    start = MISTRAL.start
    separator = ""

    def __init__(self, lark: Lark, layout: MistralCalls) -> None:
        super().__init__(lark, layout)
        self._is_list = lark.token_id("[ARGS]") is None

    def body(self, name: str, schema: Mapping[str, Any]) -> str:
        if self._is_list:
            return _object(self._lark, self._layout.head.replace("{name}", json.dumps(name)), schema)
        return f"{self._lark.literal(f'{name}[ARGS]')} {self._lark.add_arguments(_arguments(schema))}"

    def calls(self, body: str, *, is_parallel: bool) -> str:
        if not self._is_list:
            return super().calls(body, is_parallel=is_parallel)
        more = f'(", " {body}){MORE}' if is_parallel else ""
        return f'"[" {body} {more} "]"'


WRITERS: Mapping[type, type[_Writer[Any]]] = {
    MistralCalls: _Mistral, HarmonyCalls: _Harmony, JsonCalls: _Json, PythonCalls: _Python, GemmaCalls: _Gemma,
    XmlCalls: _Xml, MarkedCalls: _Marked,
}  # fmt: skip


def _object(lark: Lark, head: str, schema: Mapping[str, Any]) -> str:
    """The object of a call. The schema stays a separate document, because its references start at its root."""
    return f'{json.dumps(head)} {lark.add_arguments(_arguments(schema))} "}}"'


def _arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not schema:
        return {**CLOSED_OBJECT, "properties": {}}
    return {**schema, "type": "object"}


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    given = schema.get("properties")
    given = given if isinstance(given, dict) else {}
    return {key: value if isinstance(value, dict) else {} for key, value in given.items()}
