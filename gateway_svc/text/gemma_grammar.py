"""A JSON Schema as a grammar of Gemma's arguments: bare keys, strings between markers, numbers and literals as in JSON.

Every value that the grammar accepts is valid. It accepts one way to write each: without white space, members in the
order of the schema, required ones first. A keyword that it cannot enforce is refused by name; titles and the like are
annotations, and so is `format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway_svc.text.calls.gemma import WORD
from gateway_svc.text.lark import Lark
from grammars.schemas import SHARED, GrammarError, Schema

ANNOTATIONS = frozenset(
    (*SHARED, "title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly", "strict"),
) | {"$schema", "$id", "$comment"}
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS: Mapping[str, tuple[str, ...]] = {  # enforced keywords, by type
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "integer": OF_NUMBERS,
    "number": OF_NUMBERS,
    "boolean": (),
    "null": (),
}
COMMA = '","'
KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"  # name of a member that the schema does not name


class GemmaValues:
    """The rules of one schema. `root` is the rule of the whole. Raises GrammarError, which begins with `where`."""

    def __init__(self, lark: Lark, quote: str, schema: Schema, where: str) -> None:
        self._lark = lark
        self._quote = quote
        self._schema = schema
        self._references: dict[str, str] = {}  # rules of schemas that references name
        self._known: dict[str, str] = {}  # rules of numbers and strings by their keywords
        self._any = ""
        try:
            self.root = self._rule(schema, where)
        except RecursionError:
            raise GrammarError(f"{where}: a chain of references is too long") from None

    def _rule(self, schema: Any, where: str) -> str:
        if schema is True or schema == {}:
            return self._any_value()
        if not isinstance(schema, dict):
            raise GrammarError(f"{where}: {json.dumps(schema)} is no schema that a value can match")
        return self._lark.add("value", " | ".join(self._alternatives(schema, where)))

    def _alternatives(self, schema: Schema, where: str) -> Iterator[str]:
        """The forms of a value. A schema has alternatives, or one type or several."""
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._check(schema, (keyword,), where)
                given = _given(schema, keyword, list, where)
                yield from (self._rule(one, f"{where}.{keyword}[{i}]") for i, one in enumerate(given))
                return
        if "$ref" in schema:
            self._check(schema, ("$ref",), where)
            yield self._reference(_given(schema, "$ref", str, where), where)
            return
        if "enum" in schema or "const" in schema:
            self._check(schema, ("enum", "const", "type"), where)
            values = _given(schema, "enum", list, where) if "enum" in schema else [schema["const"]]
            yield from (self._lark.literal(self._text(value, where)) for value in values)
            return
        types = schema.get("type") or next((one for one, words in KEYWORDS.items() if set(words) & schema.keys()), None)
        if types is None:
            self._check(schema, (), where)
            yield self._any_value()
            return
        types = types if isinstance(types, list) else [types]
        if unknown := [one for one in types if not isinstance(one, str) or one not in KEYWORDS]:
            raise GrammarError(f"{where}.type: {json.dumps(unknown[0])} is no type of JSON Schema")
        self._check(schema, ("type", *(word for one in types for word in KEYWORDS[one])), where)
        yield from (self._typed(one, schema, where) for one in types)

    def _check(self, schema: Schema, known: Sequence[str], where: str) -> None:
        if unknown := sorted(schema.keys() - ANNOTATIONS - set(known)):
            raise GrammarError(
                f"{where}: the keyword {unknown[0]!r} cannot be enforced in the notation of Gemma's calls"
            )

    def _typed(self, kind: str, schema: Schema, where: str) -> str:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "string":
            return self._string(schema, where)
        words = {"type": kind, **{word: schema[word] for word in KEYWORDS[kind] if word in schema}}
        return self._once(json.dumps(words), lambda: self._lark.add_json(words))

    def _once(self, key: str, add: Callable[[], str]) -> str:
        """Equal rules are one: each costs the lexer time."""
        if key not in self._known:
            self._known[key] = add()
        return self._known[key]

    def _object(self, schema: Schema, where: str) -> str:
        named, required = _given(schema, "properties", dict, where) or {}, _given(schema, "required", list, where) or []
        others = schema.get("additionalProperties", True)
        if missing := [key for key in required if key not in named]:
            raise GrammarError(f"{where}.required: {json.dumps(missing[0])} is not in properties")
        if not named and others is not False:
            member = f'{self._lark.add("key", KEY)} ":" {self._rule(others, f"{where}.additionalProperties")}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        members = {key: self._member(key, value, f"{where}.properties.{key}") for key, value in named.items()}
        fixed = [members[key] for key in named if key in required]
        optional = [member for key, member in members.items() if key not in required]
        return f'"{{" {self._lark.members(fixed, optional, COMMA)} "}}"' if members else '"{}"'

    def _member(self, key: str, schema: Any, where: str) -> str:
        is_bare = WORD.fullmatch(key) and key.strip() == key and key
        head = self._lark.literal(f"{key}:" if is_bare else f"{self._quote}{key}{self._quote}:")
        return f"{head} {self._rule(schema, where)}"

    def _array(self, schema: Schema, where: str) -> str:
        item, first, last = self._rule(schema.get("items", True), f"{where}.items"), *_range(schema, "Items", where)
        if last == 0:
            return '"[]"'
        more = f'("," {item}){{{max(first - 1, 0)},{"" if last is None else last - 1}}}'
        return f'"[" {item} {more} "]"' if first else f'"[" ({item} {more})? "]"'

    def _string(self, schema: Schema, where: str) -> str:
        (first, last), pattern = _range(schema, "Length", where), _given(schema, "pattern", str, where)
        regexes = [f"(?s:.{{{first},{'' if last is None else last}}})"]
        regexes += [] if pattern is None else [_searched(pattern)]
        may_be_empty = first == 0 and (pattern is None or _is_found_in_nothing(pattern, where))

        def add() -> str:
            rest = self._lark.matching_until(self._quote, regexes, may_be_empty=may_be_empty)
            return self._lark.add("text", f"{self._lark.literal(self._quote)} {rest}")

        return self._once(json.dumps(regexes), add)

    def _reference(self, target: str, where: str) -> str:
        if target not in self._references:
            found: Any = self._schema
            for step in target.removeprefix("#").split("/")[1:]:
                found = found.get(step) if isinstance(found, dict) else None
            if not target.startswith("#") or found is None:
                raise GrammarError(f"{where}.$ref: {target!r} is not in this schema")
            # The name is known before the rule, because a schema may contain itself
            self._references[target] = name = self._lark.reserve("value")
            self._lark.define(name, self._rule(found, target))
        return self._references[target]

    def _text(self, value: Any, where: str) -> str:
        """One value as it is written."""
        if isinstance(value, str) and self._quote in value:
            raise GrammarError(f"{where}: a value contains {self._quote}, which ends a string in Gemma's calls")
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(self._text(one, where) for one in value)}]"
        if isinstance(value, dict):
            members = (f"{self._text(key, where)}:{self._text(one, where)}" for key, one in value.items())
            return f"{{{','.join(members)}}}"
        return json.dumps(value)

    def _any_value(self) -> str:
        if not self._any:
            self._any = name = self._lark.reserve("any")
            plain = self._lark.add_json({"type": ["number", "boolean", "null"]})
            items = f'"[" ({name} ("," {name})*)? "]"'
            members = self._object({"additionalProperties": True}, "")
            self._lark.define(name, f"{plain} | {self._string({}, '')} | {items} | {members}")
        return self._any


def _given(schema: Schema, keyword: str, kind: type, where: str) -> Any:
    """The value of a keyword; None if it is not set. Raises GrammarError."""
    value = schema.get(keyword)
    if value is not None and type(value) is not kind:
        raise GrammarError(f"{where}.{keyword}: is a JSON {type(value).__name__}; it must be a {kind.__name__}")
    return value


def _range(schema: Schema, ending: str, where: str) -> tuple[int, int | None]:
    """The values of a pair of keywords."""
    first, last = (_given(schema, f"{side}{ending}", int, where) for side in ("min", "max"))
    first = first or 0
    if first < 0 or (last is not None and last < first):
        raise GrammarError(f"{where}.max{ending}: {last} is below min{ending}, {first}")
    return first, last


def _is_found_in_nothing(pattern: str, where: str) -> bool:
    try:
        return re.search(pattern, "") is not None
    except re.error as error:
        raise GrammarError(f"{where}.pattern: {error}") from None


def _searched(pattern: str) -> str:
    """A regular expression of whole texts in which `pattern` is found."""
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern[0 if start else 1 : None if end else -1]
    return f"{start}(?:{inner}){end}"
