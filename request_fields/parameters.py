"""Parameters that several fields of a request form together, as services use them: beam search, and the grammar of the
output, in the form that workers compile:

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

from request_fields.fields import FIELDS, GRAMMAR_FIELDS, MAX_GRAMMAR_BYTES, FieldError, ProtoMessage

# White space between JSON tokens: a space, or a line break with indentation. The limit matters because small models
# may repeat unlimited white space forever.
JSON_WHITESPACE = r"(\x20|\x0A\x20{0,16})"
ANY_OBJECT = '{"type":"object"}'


class EarlyStopping(Enum):
    """When a beam search ends, with the names and meanings of `early_stopping` in transformers.

    FALSE: when the best running beam, at its current length, can no longer beat the worst kept sequence. TRUE: as soon
    as `width` sequences are complete. NEVER: like FALSE, but a positive length_penalty assumes the largest length.
    """

    FALSE = 1
    TRUE = 2
    NEVER = 3


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of one beam search: the typed form of the `sampling` fields about beams."""

    width: int  # beams that run at once
    num_returned: int  # best sequences that the client gets
    length_penalty: float = 1.0  # a sequence's score is its log probability / length ** length_penalty
    early_stopping: EarlyStopping = EarlyStopping.FALSE


NOT_WITH_BEAMS = [field.path for field in FIELDS if not field.works_with_beams]
ONLY_WITH_BEAMS = [field.path for field in FIELDS if field.needs_beams]


def check_beam_fields(fields_set: Mapping[str, Any]) -> None:
    """Check the fields that a request sets, by path, against its beam_width. Raises FieldError."""
    width = fields_set.get("sampling.beam_width") or 0
    if width < 2:
        for path in ONLY_WITH_BEAMS:
            if path in fields_set:
                raise FieldError(path, "is set; it needs sampling.beam_width of at least 2")
        return
    for path in NOT_WITH_BEAMS:
        if path in fields_set:
            value = fields_set[path]
            shown = f"is {value:g}" if isinstance(value, int | float) else "is set"
            raise FieldError(
                path, f"{shown}, and sampling.beam_width is {width}; beam search does not support it: unset one"
            )


def beam_params(sampling: Mapping[str, Any], max_tokens: int) -> BeamParams | None:
    """Beam search parameters from `sampling` values by field name; None without beam search. Raises FieldError."""
    width, n = sampling.get("beam_width") or 0, sampling.get("n") or 1
    if width < 2:
        return None
    if n > width:
        raise FieldError("sampling.n", f"is {n}; must be at most sampling.beam_width, {width}")
    if not max_tokens:
        raise FieldError("stop.max_tokens", "is 0; must be at least 1 with sampling.beam_width")
    early = sampling.get("early_stopping") or EarlyStopping.FALSE.value
    return BeamParams(width, n, float(sampling.get("length_penalty", 1.0)), EarlyStopping(early))


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
