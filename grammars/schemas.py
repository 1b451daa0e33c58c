"""JSON Schemas as documents: their sub-schemas, the enforced formats, and the part that cannot be used. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]
ErrorOf: TypeAlias = Callable[[Schema], str]
"""The error of a schema that is compiled alone; empty if it has none."""

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # keywords: schemas by name
LISTED = ("prefixItems", "items", "anyOf", "oneOf", "allOf")  # keywords that may be a list of schemas
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
INPUT = "input"  # the only argument of a custom tool, a text
INPUT_GRAMMAR = "x-grammar"  # keyword of the schema of a custom tool's arguments: the Lark grammar of the text
SHARED = ("$defs", "definitions")  # targets of references
MAX_DEPTH = 64  # nesting; llguidance's parser stops at 128
MAX_SEARCH_S = 0.05  # processor time for finding the part of a schema that cannot be used


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why."""


def schema_of(text: str) -> dict[str, Any]:
    """The schema of a JSON text. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError(f"it is a JSON {type(schema).__name__}; give an object")
    if (levels := depth(schema)) > MAX_DEPTH:
        raise GrammarError(f"it is nested {levels} levels deep; at most {MAX_DEPTH} are allowed")
    return schema


def sub_schemas(schema: Schema) -> Iterator[tuple[Path, Schema]]:
    """Path and content of each schema directly inside of a schema."""
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            yield from (((keyword, name), one) for name, one in value.items() if isinstance(one, dict))
        elif keyword in LISTED and isinstance(value, list):
            yield from (((keyword, i), one) for i, one in enumerate(value) if isinstance(one, dict))
        elif keyword in SINGLE and isinstance(value, dict):
            yield (keyword,), value


def all_schemas(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Path and content of a schema and of all schemas inside of it."""
    yield path, schema
    for steps, one in sub_schemas(schema):
        yield from all_schemas(one, (*path, *steps))


def listed_names(schema: Schema) -> list[str]:
    """The names of members that an object lists."""
    lists = [schema.get("properties"), schema.get("required")]
    names = [name for names in lists if isinstance(names, dict | list) for name in names if isinstance(name, str)]
    return list(dict.fromkeys(names))


def path_of(steps: Path) -> str:
    """A path as errors name it: `.properties.a.items[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def with_known_formats(schema: Schema) -> dict[str, Any]:
    """The schema without formats that grammars do not know: these are annotations. It is at most MAX_DEPTH deep."""
    return {keyword: _known(keyword, value) for keyword, value in schema.items() if not _is_unknown(keyword, value)}


def _is_unknown(keyword: str, value: Any) -> bool:
    return keyword == "format" and isinstance(value, str) and value not in FORMATS


def _known(keyword: str, value: Any) -> Any:
    if keyword in NAMED and isinstance(value, dict):
        return {name: _known_schema(one) for name, one in value.items()}
    if keyword in LISTED and isinstance(value, list):
        return [_known_schema(one) for one in value]
    return _known_schema(value) if keyword in SINGLE else value


def _known_schema(schema: Any) -> Any:
    return with_known_formats(schema) if isinstance(schema, dict) else schema


def depth(value: Any) -> int:
    """Nesting of objects and arrays, without recursion."""
    level, levels = [value], 0
    while True:
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return levels
        levels += 1


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def failing_part(schema: Schema, error_of: ErrorOf, stop_at: float) -> str:
    """The path of the innermost schema that has the same error as the whole: `.properties.a.items`; "" is the whole.

    `stop_at`: the processor time of this process at which the search ends early.
    """
    shared = {name: schema[name] for name in SHARED if name in schema}
    error, path = error_of(schema), ""
    while True:
        inner = next(
            (
                (steps, one)
                for steps, one in sub_schemas(schema)
                if time.process_time() < stop_at and error_of({**_of_keyword(shared, steps), **one}) == error
            ),
            None,
        )
        if inner is None:
            return path
        steps, schema = inner
        path += path_of(steps)


def _of_keyword(shared: Schema, steps: Path) -> Schema:
    """The targets of references that a sub-schema needs beside itself. A target itself is compiled without them."""
    return {} if steps[0] in SHARED else shared
