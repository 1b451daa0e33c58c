"""Structural tags: free text with parts that match grammars, as vLLM and xgrammar write them, as rules in Lark.

{"structures": [{"begin", "schema", "end"}], "triggers": [...]}     a tag follows wherever a trigger begins one
{"format": {"type": ...}}                                           a tree; FORMATS has its types
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway_svc.text.lark import Lark
from grammars.schemas import GrammarError, depth, schema_of
from request_fields.parameters import GrammarKind

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
    """Writes the rule of each type of format. `where`: its path in the structural tag, for errors."""

    def __init__(self, lark: Lark) -> None:
        self._lark, self._num_tags = lark, 0

    def rule(self, where: str, value: Any) -> str:
        """The rule of one format."""
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
    "const_string": _Formats.const_string,
    "json_schema": _Formats.json_schema,
    "regex": _Formats.regex,
    "any_text": _Formats.any_text,
    "sequence": _Formats.sequence,
    "or": _Formats.any_of,
    "tag": _Formats.tag,
    "triggered_tags": _Formats.triggered_tags,
    "tags_with_separator": _Formats.tags_with_separator,
}
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
