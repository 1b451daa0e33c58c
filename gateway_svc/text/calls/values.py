"""Values of arguments, read by their schema: one reader for all formats that do not write JSON.

A value is text where only strings are allowed; else JSON, else a Python literal, else text. NaN and Infinity are text.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
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
