"""Rules of a grammar in Lark, as llguidance reads it; and structural tags as such rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gateway_svc.text.input_grammar import plain, quoted
from grammars.schemas import INPUT, INPUT_GRAMMAR, GrammarError, depth, schema_of, with_known_formats
from request_fields.fields import MAX_GRAMMAR_BYTES
from request_fields.parameters import JSON_WHITESPACE, GrammarKind

TokenId: TypeAlias = Callable[[str], int | None]
"""The id of a text that is one token of the vocabulary, else None."""

IN_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)  # parts of a regular expression that may change between slashes


class Lark:
    """The rules of one grammar."""

    def __init__(self, token_id: TokenId, markers: Iterable[str]) -> None:
        self.token_id = token_id
        self._markers: set[str] = set()
        self.add_markers(markers)
        self._rules: list[str] = []
        self._num_free = 0  # characters that describe free text

    def add_markers(self, markers: Iterable[str]) -> None:
        """Write these texts as tokens from now on, if they are one token."""
        self._markers |= {one for one in markers if self.token_id(one) is not None}
        longest_first = sorted(self._markers, key=lambda one: (-len(one), one))
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "")

    def add(self, name: str, body: str) -> str:
        """Add a rule. Returns its name, made unique."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def reserve(self, name: str) -> str:
        """The unique name of a rule that `define` adds later, because it may contain itself."""
        return self.add(name, "")

    def define(self, name: str, body: str) -> None:
        """Add the rule of a reserved name."""
        self._rules[int(name.rpartition("_")[2])] = f"{name}: {body}"

    def add_json(self, schema: Mapping[str, Any]) -> str:
        """Add a JSON value of this schema."""
        schema = {**with_known_formats(schema), "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
        return self.add("json", f"%json {json.dumps(schema)}")

    def add_content(self, kind: GrammarKind, text: str) -> str:
        """Add text that matches a JSON Schema or a regular expression. Raises ValueError for text that is not JSON."""
        if kind is GrammarKind.JSON_SCHEMA:
            return self.add_json(json.loads(text))
        return self.add("regex", slashed(text))

    def add_arguments(self, schema: Mapping[str, Any]) -> str:
        """Add the JSON object of a call's arguments. Raises GrammarError for an invalid grammar of an input."""
        if INPUT_GRAMMAR not in schema:
            return self.add_json(schema)
        head = json.dumps(f'{{"{INPUT}": ')
        return f'{head} {self.add_quoted_input(schema)} "}}"'

    def add_quoted_input(self, schema: Mapping[str, Any]) -> str:
        """Add a JSON string of text that matches the grammar of a custom tool."""
        return f'"\\"" {self._add_nested(quoted(schema[INPUT_GRAMMAR]))} "\\""'

    def add_plain_input(self, schema: Mapping[str, Any]) -> str:
        """Add text that matches the grammar of a custom tool, to be followed by a marker."""
        return self._add_nested(plain(schema[INPUT_GRAMMAR]))

    def _add_nested(self, grammar: str) -> str:
        return self.add("input", f"%lark {{\n{grammar}\n}}")

    def members(self, required: Sequence[str], optional: Sequence[str], comma: str) -> str:
        """Rules one after the other with commas between them, the optional ones after the others."""
        if required:
            return f" {comma} ".join(required) + "".join(f" ({comma} {one})?" for one in optional)
        found, rest = [], ""
        for one in reversed(optional):
            found.append(f"{one} {rest}")
            rest = self.add("rest", f"({comma} {one})? {rest}")
        return f"({' | '.join(found[::-1])})?" if found else ""

    def add_text(self, markers: Iterable[str], opener: str = "") -> str:
        """Add text that is not empty, contains none of the markers and does not begin with the opener."""
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {self._other_text('/(?s:.+)/', markers, opener)}")
        return name

    def until(self, marker: str, others: Iterable[str] = (), opener: str = "") -> str:
        """Add any text up to and including the first occurrence of the marker. It contains none of the other markers
        and does not begin with the opener."""
        if self._tokens.pattern and self._tokens.match(marker):
            return f"{self.add_text((marker, *others), opener)}? {self.literal(marker)}"
        return self._add_before(marker, self._other_text("/(?s:.*)/", others, opener))

    def matching_until(self, marker: str, regexes: Sequence[str], *, may_be_empty: bool) -> str:
        """Add text that all regular expressions match, up to and including the marker."""
        if self.token_id(marker) is None:
            return self._add_before(marker, " & ".join(map(slashed, regexes)))
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(map(slashed, ('(?s:.+)', *regexes)))} & {_without(marker)}")
        return f"{name}{'?' if may_be_empty else ''} {self.literal(marker)}"

    def _add_before(self, marker: str, body: str) -> str:
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(marker)}]: {body}")
        return name

    def _other_text(self, text: str, markers: Iterable[str], opener: str) -> str:
        """Text that contains none of the markers and does not begin with the opener, if there is one. Raises
        GrammarError if the rules are too large, before they take the memory of all texts times all markers."""
        begun = [rf"~/[ \t\r\n]*\{opener}(?s:.*)/"] if opener else []
        rule = " & ".join([text, *map(_without, markers), *begun])
        self._num_free += len(rule)
        if self._num_free > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it needs a grammar of more than {MAX_GRAMMAR_BYTES} bytes; exclude fewer texts")
        return rule

    def literal(self, text: str) -> str:
        """A text; markers in it that are one token are written as this token."""
        parts = self._tokens.split(text) if self._tokens.pattern else [text]
        return " ".join(self._token(one) if self._tokens.fullmatch(one) else json.dumps(one) for one in parts if one)

    def _token(self, marker: str) -> str:
        return f"<[{self.token_id(marker)}]>"

    def text(self, start: str) -> str:
        """The grammar."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def _without(marker: str) -> str:
    """Text that does not contain the marker."""
    return rf"~/(?s:.*){_escaped(marker)}(?s:.*)/"


def slashed(text: str) -> str:
    """A regular expression as Lark has it."""
    return f"/{IN_SLASHES.sub(_in_slashes, text)}/"


def _escaped(text: str) -> str:
    """Text as part of a regular expression between slashes."""
    return "".join(char if char.isalnum() or char == "_" else f"\\x{{{ord(char):x}}}" for char in text)


def _in_slashes(found: re.Match[str]) -> str:
    """A part of a regular expression as it is written between slashes."""
    return found[0].replace("\n", "n" if found[0].startswith("\\") else "\\n") if found[0] != "/" else r"\/"


MARKERS = re.compile(r"<[^<>]*>"), re.compile(r"\[[^\[\]]*\]")  # texts that may be tokens
MAX_DEPTH = 64  # nesting of the whole value, schemas included
MAX_TAGS = 512  # in all formats together
Json = Mapping[str, Any]


def add_structural_tag(lark: Lark, text: str) -> str:
    """Add the text that a structural tag describes. Returns its rule. Raises GrammarError that names the wrong part."""
    value = schema_of(text)
    if depth(value) > MAX_DEPTH:
        raise GrammarError(f"it is nested more than {MAX_DEPTH} levels deep")
    lark.add_markers(marker for one in _strings(value) for pattern in MARKERS for marker in pattern.findall(one))
    if "format" in value:
        return lark.add("tags", _Formats(lark).rule("format", value["format"]))
    tags = [
        {**_object(f"structures[{i}]", one), "content": {"type": "json_schema", "json_schema": one.get("schema")}}
        for i, one in enumerate(_list("structures", value.get("structures")))
    ]
    return lark.add("tags", _Formats(lark).triggered_tags("", {"tags": tags, "triggers": value.get("triggers")}))


class _Formats:
    """Structural tags: free text with parts that match grammars, as vLLM and xgrammar write them, a method
    per type of format. `where`: the path of a format in the tag, for errors.

        {"structures": [{"begin", "schema", "end"}], "triggers": [...]}     a tag follows wherever a trigger begins one
        {"format": {"type": ...}}                                           a tree; FORMATS has its types
    """

    def __init__(self, lark: Lark) -> None:
        self._lark, self._num_tags = lark, 0

    def rule(self, where: str, value: Any) -> str:
        kind = _object(where, value).get("type")
        if not isinstance(kind, str) or kind not in FORMATS:
            raise GrammarError(f"{where}.type is {kind!r:.40}; must be one of {', '.join(FORMATS)}")
        return f"({FORMATS[kind](self, where, value)})"

    def const_string(self, where: str, value: Json) -> str:
        return self._lark.literal(_text(f"{where}.value", value.get("value")))

    def json_schema(self, where: str, value: Json) -> str:
        if value.get("style", "json") != "json":
            raise GrammarError(f"{where}.style is {value['style']!r:.40}; must be 'json'")
        return self._lark.add_json(_object(f"{where}.json_schema", value.get("json_schema")))

    def regex(self, where: str, value: Json) -> str:
        return self._lark.add_content(GrammarKind.REGEX, _text(f"{where}.pattern", value.get("pattern")))

    def any_text(self, where: str, value: Json) -> str:
        return f"{self._lark.add_text(_texts(f'{where}.excludes', value.get('excludes') or []))}?"

    def sequence(self, where: str, value: Json) -> str:
        elements = _list(f"{where}.elements", value.get("elements"))
        free = (i for i, one in enumerate(elements[:-1]) if isinstance(one, dict) and one.get("type") in FREE)
        if (i := next(free, None)) is not None:
            raise GrammarError(f"{where}.elements[{i}] is free text without an end; put it last, or into a tag")
        return " ".join(self.rule(f"{where}.elements[{i}]", one) for i, one in enumerate(elements))

    def any_of(self, where: str, value: Json) -> str:
        elements = _list(f"{where}.elements", value.get("elements"))
        return " | ".join(self.rule(f"{where}.elements[{i}]", one) for i, one in enumerate(elements))

    def tag(self, where: str, value: Json, cut: int = 0) -> str:
        """A tag without the first `cut` characters."""
        self._num_tags += 1
        if self._num_tags > MAX_TAGS:
            raise GrammarError(f"it has more than {MAX_TAGS} tags")
        begin, end = _text(f"{where}.begin", value.get("begin"))[cut:], value.get("end", "")
        ends = [_text(f"{where}.end", one, least=0) for one in (end if isinstance(end, list) else [end])]
        content = _object(f"{where}.content", value.get("content"))
        if content.get("type") == "any_text" and all(ends):
            excludes = _texts(f"{where}.content.excludes", content.get("excludes") or [])
            rest = (self._lark.until(one, [*excludes, *(other for other in ends if other != one)]) for one in ends)
            return f"{self._lark.literal(begin)} ({' | '.join(rest)})"
        closing = f"({' | '.join(map(self._lark.literal, filter(None, ends)))})" if any(ends) else ""
        closing += "?" if closing and not all(ends) else ""
        return f"{self._lark.literal(begin)} {self.rule(f'{where}.content', content)} {closing}"

    def triggered_tags(self, where: str, value: Json) -> str:
        """Text in which a trigger begins a tag."""
        where = where and f"{where}."
        triggers = _texts(f"{where}triggers", value.get("triggers"))
        excludes = _texts(f"{where}excludes", value.get("excludes") or [])
        ways: dict[str, list[str]] = {}
        at_once = []
        for i, one in enumerate(_list(f"{where}tags", value.get("tags"))):
            name = f"{where}tags[{i}]"
            begin = _text(f"{name}.begin", _object(name, one).get("begin"))
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"{name}.begin is {begin!r:.40}; must start with one of the triggers")
            rest = self._lark.add("tag", self.tag(name, one, len(trigger)))
            ways.setdefault(trigger, []).append(rest)
            at_once.append(f"{self._lark.literal(trigger)} {rest}")
        found = (
            f"{self._lark.until(one, [*(ways.keys() - {one}), *excludes])} ({' | '.join(rest)})"
            for one, rest in ways.items()
        )
        later = self._lark.add("later", " | ".join(found))
        text, first = f"{self._lark.add_text([*ways, *excludes])}?", f"({' | '.join(at_once)})"
        if value.get("stop_after_first"):
            return first if value.get("at_least_one") else f"{later} | {text}"
        return f"{first} ({later})* {text}" if value.get("at_least_one") else f"({later})* {text}"

    def tags_with_separator(self, where: str, value: Json) -> str:
        tags = _list(f"{where}.tags", value.get("tags"))
        one = " | ".join(self.tag(f"{where}.tags[{i}]", _object(f"{where}.tags[{i}]", t)) for i, t in enumerate(tags))
        one = self._lark.add("tag", one)
        separator = _text(f"{where}.separator", value.get("separator", ""), least=0)
        more = "" if value.get("stop_after_first") else f" ({self._lark.literal(separator)} {one})*"
        return f"{one}{more}" if value.get("at_least_one") else f"({one}{more})?"


FORMATS: Mapping[str, Callable[[_Formats, str, Json], str]] = {
    "const_string": _Formats.const_string, "json_schema": _Formats.json_schema, "regex": _Formats.regex,
    "any_text": _Formats.any_text, "sequence": _Formats.sequence, "or": _Formats.any_of, "tag": _Formats.tag,
    "triggered_tags": _Formats.triggered_tags, "tags_with_separator": _Formats.tags_with_separator,
}  # fmt: skip
FREE = ("any_text", "triggered_tags")


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{where} is {value!r:.40}; must be an object")
    return value


def _list(where: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{where} is {value!r:.40}; must be a list with at least one item")
    return value


def _text(where: str, value: Any, least: int = 1) -> str:
    if not isinstance(value, str) or len(value) < least:
        raise GrammarError(f"{where} is {value!r:.40}; must be a string{' that is not empty' if least else ''}")
    return value


def _texts(where: str, values: Any) -> list[str]:
    if not isinstance(values, list):
        raise GrammarError(f"{where} is {values!r:.40}; must be a list of strings")
    return [_text(f"{where}[{i}]", one) for i, one in enumerate(values)]


def _strings(value: Any) -> list[str]:
    """Strings of a value in which markers may be, without schemas."""
    if isinstance(value, str):
        return [value]
    items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    if isinstance(value, dict):
        items = [one for key, one in value.items() if key not in ("schema", "json_schema", "pattern")]
    return [text for one in items for text in _strings(one)]
