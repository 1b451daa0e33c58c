"""Random JSON schemas, and whether a text satisfies one."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

MAX_DEPTH = 3
WORDS = ("alpha", "beta", "été", "a b", 'q"q', "back\\slash", "line\nbreak", "日本", "😀", "")
PATTERNS = ("^[a-z]{1,4}$", "^\\d{2}-\\d{2}$", "^(yes|no)$", "^[A-F0-9]{2,6}$", "^a.{0,3}$")


def make_schema(rng: random.Random) -> dict[str, Any]:
    """A schema whose texts are short enough for an answer."""
    schema = _object(rng, 0) if rng.random() < 0.7 else _any(rng, 0)
    if rng.random() < 0.2:
        schema = {"$defs": {"part": _any(rng, 1)}, **_referring(rng, schema)}
    return schema


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that satisfies the schema."""
    try:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _referring(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": "#/$defs/part"}
    return {"type": "array", "prefixItems": [reference, schema], "items": False, "minItems": rng.randint(0, 2)}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _integer, _number, _enum, _const, _plain)
    branches = (_object, _array, _any_of)
    make = rng.choice(leaves if depth >= MAX_DEPTH else (*leaves, *branches))
    return make(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(("id", "name", "größe", "with space", 'quo"te', "tags", "x"), rng.randint(1, 4))
    properties = {name: _any(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-10, 10)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 100)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [*rng.sample(WORDS, 3), rng.randint(0, 9), None, rng.random() < 0.5]}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice((rng.choice(WORDS), 7, [1, "a"], {"k": None}))}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}
