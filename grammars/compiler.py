"""Grammars as llguidance compiles them, for the tokens of one model.

llguidance's limits are deterministic: they bound the work of compiling and of each mask, and depend on nothing but the
grammar and the tokens so far. A few constructs exceed them anyway (a large `multipleOf`), so a gateway compiles in a
process that it can kill (gateway_svc/request/sandbox/grammar_process.py), before a worker sees the grammar.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from grammars.schemas import (
    INPUT_GRAMMAR,
    MAX_SEARCH_S,
    GrammarError,
    Schema,
    all_schemas,
    failing_part,
    listed_names,
    path_of,
    schema_of,
    with_known_formats,
)
from request_fields.parameters import JSON_WHITESPACE, GrammarKind

MAX_ERROR_CHARS = 400
GBNF_RULE = "::="


class DeadPartError(GrammarError):
    """A part of a grammar accepts nothing, so a matcher would fail there: number of the schema, and path in it."""

    def __init__(self, message: str, schema: int, path: str) -> None:
        super().__init__(message)
        self.place = schema, path


class UnsupportedTokenizerError(ValueError):
    """Grammars cannot be compiled for this tokenizer."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer and vocabulary. Threads may share it.

    `vocab_size` is the model's, which may be larger than the tokenizer's. Raises UnsupportedTokenizerError.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise UnsupportedTokenizerError("the model has no end-of-sequence id, so a complete output cannot end")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except Exception as error:  # the library raises several types
            raise UnsupportedTokenizerError(f"its tokenizer.json cannot be used: {_first_line(str(error))}") from None
        self._limits = LLParserLimits(verbose_errors=False)
        self.vocab_size = vocab_size

    def compile(self, kind: GrammarKind, text: str) -> LLMatcher:
        """A matcher at the start of the output; copies of it are independent. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, _to_llguidance(kind, text), log_level=0, limits=self._limits)
        _check(matcher)
        mask = matcher.deep_copy()
        if not any(mask.compute_bitmask()) or mask.is_error():
            raise GrammarError("it accepts no text at all")
        return matcher

    def check_parts(self, schemas: Sequence[str]) -> None:
        """Raise DeadPartError for a pattern of names that matches only names that its object lists, and for a grammar
        of an input that accepts no text. A matcher fails there, if the output takes this path."""
        for i, text in enumerate(schemas):
            root = schema_of(text)
            if INPUT_GRAMMAR in root:
                self._check_input(i, root[INPUT_GRAMMAR])
            for path, schema in all_schemas(root):
                names = listed_names(schema)
                for pattern in schema.get("patternProperties", ()) if names else ():
                    if not self._has_more_names(names, pattern):
                        words = "matches only names that `properties` or `required` list; remove the pattern"
                        raise DeadPartError(f"{pattern!r} {words}", i, path_of((*path, "patternProperties")))

    def _check_input(self, schema: int, grammar: str) -> None:
        try:
            self.compile(GrammarKind.LARK, grammar)
        except GrammarError as error:
            raise DeadPartError(str(error), schema, "") from None

    def _has_more_names(self, names: Sequence[str], pattern: str) -> bool:
        properties = {name: {"const": 0} for name in names}
        rule = {"properties": properties, "required": names, "patternProperties": {pattern: {}}}
        matcher = self.compile(GrammarKind.JSON_SCHEMA, json.dumps({**rule, "additionalProperties": False}))
        begun = json.dumps(dict.fromkeys(names, 0), ensure_ascii=False)[:-1] + ', "'
        is_fit = all(map(matcher.consume_token, self.token_ids(begun)))
        return is_fit and any(matcher.compute_bitmask()) and not matcher.is_error()

    def texts(self, token_ids: Sequence[int]) -> list[bytes]:
        """The text of each token; empty for special tokens."""
        known = self._tokenizer
        return [b"" if known.is_special_token(one) else bytes(known.decode_bytes([one])) for one in token_ids]

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        return list(self._tokenizer.tokenize_str(text))


def located_error(schemas: Sequence[str]) -> tuple[int, str, str] | None:
    """Number, path and error of the first schema, of those in a grammar, that cannot be compiled; None if all can be.

    The search is limited: its path may end early.
    """
    stop_at = time.process_time() + MAX_SEARCH_S
    for i, text in enumerate(schemas):
        schema = with_known_formats(schema_of(text))
        if time.process_time() >= stop_at:
            return None
        if INPUT_GRAMMAR in schema and (error := _error_of_lark(schema[INPUT_GRAMMAR])):
            return i, "", error
        if error := _error_of_schema(schema):
            return i, failing_part(schema, _error_of_schema, stop_at), error
    return None


def _error_of_lark(text: str) -> str:
    return _first_line(LLMatcher.validate_grammar(_to_llguidance(GrammarKind.LARK, text)))


def _error_of_schema(schema: Schema) -> str:
    return _first_line(LLMatcher.validate_grammar(_to_llguidance(GrammarKind.JSON_SCHEMA, json.dumps(schema))))


def normalized(kind: GrammarKind, text: str) -> str:
    """The text in the form that `compile` takes: GBNF becomes Lark. Raises GrammarError."""
    if kind is GrammarKind.JSON_SCHEMA:
        schema = schema_of(text)
        return text if (known := with_known_formats(schema)) == schema else json.dumps(known, ensure_ascii=False)
    if kind is not GrammarKind.LARK:
        return text
    if text.lstrip().startswith("{"):
        raise GrammarError("it is JSON; give a grammar in Lark or GBNF, or use json_schema")
    if GBNF_RULE not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises its own errors and RecursionError
        raise GrammarError(f"it is not valid GBNF: {_first_line(str(error))}") from None


def error_of(matcher: LLMatcher) -> str:
    """The error of a matcher in one line; empty if it has none."""
    return _first_line(matcher.get_error()) if matcher.is_error() else ""


def _to_llguidance(kind: GrammarKind, text: str) -> str:
    if kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(text))
    if kind is GrammarKind.LARK:
        return str(LLMatcher.grammar_from_lark(text))
    if kind is GrammarKind.STRUCTURAL_TAG:
        raise GrammarError("it is a structural tag, of which a gateway makes a grammar")
    try:
        return str(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_WHITESPACE}))
    except ValueError as error:
        raise GrammarError(_first_line(str(error))) from None


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(error_of(matcher))


def _first_line(text: str) -> str:
    """The first lines of a library's message as one line of limited length."""
    line = " ".join(text.split("<state>")[0].split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}..."
