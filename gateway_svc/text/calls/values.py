"""Values of arguments, read by their schema: one reader for all formats that do not write JSON.

A value is text where only strings are allowed; else JSON, else a Python literal, else text. NaN and Infinity are text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

TYPES = frozenset(("string", "number", "boolean", "null", "object", "array"))
TEXT = frozenset(("string",))
TEXT_OR_NULL = frozenset(("string", "null"))
NAMES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", dict: "object"}
MAX_SCHEMAS = 256  # schemas that are looked at for one value
MAX_LITERAL = 1 << 14  # characters of a Python literal

Schema = Mapping[str, Any]


def member(schema: Schema, key: str) -> Any:
    """The schema of a member of an object; None if there is none."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that a schema allows; all of them, if it does not say. `root`: the schema of its references."""
    return _types(schema, root, iter(range(MAX_SCHEMAS)))


def _types(schema: Any, root: Schema, budget: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, dict) or next(budget, None) is None:
        return TYPES
    found, given = TYPES, schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is not None:
        found &= frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    if isinstance(values := schema.get("enum"), list):
        found &= frozenset(map(_type_of, values))
    if "const" in schema:
        found &= {_type_of(schema["const"])}
    for choices in _choices(schema):
        found &= frozenset[str]().union(*(_types(one, root, budget) for one in choices))
    for one in (*_list(schema, "allOf"), *([_target(schema["$ref"], root)] if "$ref" in schema else ())):
        found &= _types(one, root, budget)
    return found or TYPES


def texts_of(schema: Any, root: Schema, depth: int = 0) -> list[str] | None:
    """The only texts that a schema of strings and null allows; None: any text."""
    if not isinstance(schema, dict) or depth > len(TYPES):
        return None
    if "$ref" in schema:
        return texts_of(_target(schema["$ref"], root), root, depth + 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return ["null" if value is None else str(value) for value in values]
    if schema.get("type") == "null":
        return ["null"]
    for choices in _choices(schema):
        texts = [texts_of(one, root, depth + 1) for one in choices]
        return None if None in texts else [text for some in texts for text in some or ()]
    return None


def json_of(text: str, types: frozenset[str], *, is_literal: bool = False) -> str:
    """A value as JSON. `is_literal`: its strings are quoted, as in Python."""
    try:
        value = parsed(text) if is_literal or "string" not in types else json.loads(text, parse_constant=_refuse)
        kind = _type_of(value)
        is_fit = kind in types if kind != "string" else is_literal or not types <= TEXT_OR_NULL
        if is_fit or "string" not in types:
            return _dumped(text, value)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def parsed(text: str) -> Any:
    """A JSON value or a Python literal. Raises ValueError or RecursionError."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except ValueError:
        pass
    if len(text) > MAX_LITERAL:
        raise ValueError("the literal is too long")
    try:
        with warnings.catch_warnings(action="ignore"):  # escapes that are none
            return ast.literal_eval(text.strip())
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError(str(error)) from None


def _dumped(text: str, value: Any) -> str:
    """The text, if it is JSON, else the value. Raises ValueError for a value that JSON has not."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    except ValueError:
        pass
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _type_of(value: Any) -> str:
    return NAMES.get(type(value), "array")


def _choices(schema: Schema) -> list[list[Any]]:
    return [choices for keyword in ("anyOf", "oneOf") if (choices := _list(schema, keyword))]


def _list(schema: Schema, keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _target(reference: Any, root: Schema) -> Any:
    """The schema that a reference names; None if it is not in `root`."""
    found: Any = root
    for step in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if str(reference).startswith("#") else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


SPACE = re.compile(r"[ \t\r\n]*")
STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*')
LITERAL_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
WORD = re.compile(r"-?[A-Za-z]{0,10}")
WORDS = {"True": "true", "False": "false", "None": "null"} | {
    name: json.dumps(name) for name in ("NaN", "Infinity", "-Infinity")
}
MAX_GAP = 16  # white space after a comma that is held back
LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
ESCAPES = frozenset('"\\/bfnrtu')
CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """A pushdown automaton for one JSON object, which it reads in pieces, in time linear in the text.

    It mends what models get wrong and what has one meaning: control characters in strings, Python's literals, a comma
    before a closing bracket. NaN and Infinity become strings.

    `is_complete`: its last brace was read. `is_invalid`: the character at the position that `scan` returned is not
    valid there. `edits`: start, end and new text of what the last scan mended.
    """

    __slots__ = ("_expect", "_is_held", "_is_key", "_literal", "_stack", "edits", "is_complete", "is_invalid")

    def __init__(self) -> None:
        self._stack: list[str] = []  # closing brackets that are still missing
        self._literal = ""
        self._is_key = False
        self._is_held = False  # the text at the position is read when more follows
        self.edits: list[tuple[int, int, str]] = []
        self._expect: Callable[[str, int], int] = self._object
        self.is_complete = False
        self.is_invalid = False

    @classmethod
    def after_value(cls) -> JsonScanner:
        """A scanner inside an object, after the value of one of its keys."""
        scanner = cls()
        scanner._stack.append("}")
        scanner._expect = scanner._after_value
        return scanner

    def scan(self, text: str, start: int) -> int:
        """Read from `start` to the end of the text, of the object, or to an error. Returns the position reached."""
        position, end = start, len(text)
        self.edits, self._is_held = [], False
        while position < end and not (self.is_complete or self.is_invalid or self._is_held):
            position = self._expect(text, position)
        return position

    def mended(self, text: str, start: int, end: int) -> str:
        """The text that the last scan read from `start` to `end`, as JSON."""
        pieces: list[str] = []
        for first, last, new in self.edits:
            pieces += (text[start:first], new)
            start = last
        return "".join([*pieces, text[start:end]])

    def _object(self, text: str, position: int) -> int:
        return self._open(text, position) if text[position] == "{" else self._fail(position)

    def _value(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position == len(text):
            return position
        char = text[position]
        if char in CLOSERS:
            return self._open(text, position)
        if char == '"':
            return self._begin_string(position, is_key=False)
        self._literal, self._expect = "", self._in_literal
        word = WORD.match(text, position)
        if word is None or not any(one.startswith(word[0]) for one in WORDS if word[0]):
            return position
        if word.end() == len(text):
            self._expect = self._value
            return self._hold(position)
        if word[0] in WORDS:
            self.edits.append((position, word.end(), WORDS[word[0]]))
            self._expect = self._after_value
            return word.end()
        return position

    def _hold(self, position: int) -> int:
        self._is_held = True
        return position

    def _first_item(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position < len(text) and text[position] == "]":
            return self._close(position)
        return self._value(text, position)

    def _key(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position == len(text):
            return position
        return self._begin_string(position, is_key=True) if text[position] == '"' else self._fail(position)

    def _first_key(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position < len(text) and text[position] == "}":
            return self._close(position)
        return self._key(text, position)

    def _colon(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position == len(text):
            return position
        if text[position] != ":":
            return self._fail(position)
        self._expect = self._value
        return position + 1

    def _after_value(self, text: str, position: int) -> int:
        position = self._skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            after = self._skip_space(text, position + 1)
            if after == len(text) and after - position <= MAX_GAP:
                return self._hold(position)
            if text.startswith(self._stack[-1], after) and after - position <= MAX_GAP:
                self.edits.append((position, position + 1, ""))
                return after
            self._expect = self._key if self._stack[-1] == "}" else self._value
            return position + 1
        return self._close(position) if text[position] == self._stack[-1] else self._fail(position)

    def _in_string(self, text: str, position: int) -> int:
        position = _end(STRING_BODY, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._expect = self._escaped
        elif text[position] != '"':
            self.edits.append((position, position + 1, json.dumps(text[position])[1:-1]))
        else:
            self._expect = self._colon if self._is_key else self._after_value
        return position + 1

    def _escaped(self, text: str, position: int) -> int:
        if text[position] not in ESCAPES:
            return self._fail(position)
        self._expect = self._in_string
        return position + 1

    def _in_literal(self, text: str, position: int) -> int:
        end = _end(LITERAL_CHARS, text, position)
        self._literal += text[position:end]
        if end == len(text):
            return end
        self._expect = self._after_value
        return end if LITERAL.fullmatch(self._literal) else self._fail(end)

    def _skip_space(self, text: str, position: int) -> int:
        return _end(SPACE, text, position)

    def _begin_string(self, position: int, *, is_key: bool) -> int:
        self._is_key = is_key
        self._expect = self._in_string
        return position + 1

    def _open(self, text: str, position: int) -> int:
        char = text[position]
        self._stack.append(CLOSERS[char])
        self._expect = self._first_key if char == "{" else self._first_item
        return position + 1

    def _close(self, position: int) -> int:
        self._stack.pop()
        self.is_complete = not self._stack
        self._expect = self._after_value
        return position + 1

    def _fail(self, position: int) -> int:
        self.is_invalid = True
        return position


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
