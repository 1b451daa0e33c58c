"""The grammar of a request: the `sampling` field that constrains the output, in the form that workers compile.

json_schema   a JSON Schema
json_object   any JSON object: the schema {"type": "object"}
regex         a regular expression; the whole output matches it
choice        one of several strings: a regular expression
grammar       a context-free grammar, in llguidance's variant of Lark
structural_tag  text with tags; gateways make a Lark grammar of it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from request_fields.fields import GRAMMAR_FIELDS, MAX_GRAMMAR_BYTES, FieldError, ProtoMessage

# White space between JSON tokens: a space, or a line break with indentation. The limit matters because small models
# may repeat unlimited white space forever.
JSON_WHITESPACE = r"(\x20|\x0A\x20{0,16})"
ANY_OBJECT = '{"type":"object"}'


class GrammarKind(Enum):
    """The language of a grammar. The value is the SamplingParams field that carries the text to a worker."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "grammar"
    STRUCTURAL_TAG = "structural_tag"  # never reaches a worker


@dataclass(frozen=True, slots=True)
class GrammarSchema:
    """A JSON Schema in a grammar, for error messages. `owner`: words that name what it describes."""

    field: str
    text: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as text, not compiled. `field`: the request field, for error messages."""

    kind: GrammarKind
    text: str
    field: str = ""
    schemas: tuple[GrammarSchema, ...] = ()  # schemas in the text

    @property
    def key(self) -> tuple[GrammarKind, str]:
        """Grammars with the same key accept the same texts."""
        return self.kind, self.text


def grammar_of(sampling: ProtoMessage) -> Grammar:
    """The grammar of a SamplingParams that has one. Raises FieldError if it has several, or one that is too long."""
    values = {d.name: value for d, value in sampling.ListFields() if d.name in GRAMMAR_FIELDS}
    if len(values) > 1:
        *others, last = sorted(values)
        raise FieldError(f"sampling.{last}", f"is set together with {' and '.join(others)}; set only one of them")
    return _grammar(values)


def _grammar(values: Mapping[str, Any]) -> Grammar:
    ((name, value),) = values.items()
    field = f"sampling.{name}"
    if name == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, field)
    if name == "choice":
        return Grammar(GrammarKind.REGEX, regex_of_choice(_checked_choices(field, value)), field)
    if not value:
        raise FieldError(field, "is empty; leave it unset, or give a text")
    schemas = (GrammarSchema(field, value),) if name == GrammarKind.JSON_SCHEMA.value else ()
    return Grammar(GrammarKind(name), value, field, schemas)


def _checked_choices(field: str, choices: Sequence[str]) -> Sequence[str]:
    size = sum(len(choice.encode()) for choice in choices)
    if size > MAX_GRAMMAR_BYTES:
        raise FieldError(field, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed in all strings together")
    return choices


def regex_of_choice(choices: Iterable[str]) -> str:
    """A regular expression that matches exactly these strings."""
    return "|".join(map(re.escape, dict.fromkeys(choices)))
