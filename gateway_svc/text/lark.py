"""Rules of a grammar in Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gateway_svc.text.input_grammar import plain, quoted
from grammars.schemas import INPUT, INPUT_GRAMMAR, GrammarError, with_known_formats
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
