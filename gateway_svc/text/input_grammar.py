r"""A client's Lark grammar of a text, as a grammar of the place in a call where the text is written. Pure.

`quoted`: in a JSON string. Each literal and each regular expression becomes one of the escaped text. Every character
has one form there, so the escaped text matches exactly if the text matches. Control characters other than \b \f \n \r
\t cannot be written. A lexer that sees one byte of an escape cannot tell whether an expression goes on. So the whole
text is one terminal; if the grammar is recursive or ignores text, it is rules with a terminal per character.

`plain`: in front of a marker such as `\n</parameter>`. An expression that may contain a line break stops at a line that
begins with `<`: the lexer is greedy, and would take the marker as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from grammars.schemas import GrammarError
from request_fields.fields import MAX_GRAMMAR_BYTES

ESCAPED = {
    '"': '"',
    "\\": r"\\",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}  # in a class, after a backslash
OTHERS = r'[^"\\\x00-\x1F\x7F]'  # characters that stand for themselves in a JSON string
SETS = {"d": "", "w": "", "s": "\f\n\r\t"}  # the escaped characters of a class such as \s
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
FLOAT = r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"
COMMON = {  # the terminals of %import common
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": FLOAT,
    "SIGNED_FLOAT": f"[+-]?({FLOAT})",
    "NUMBER": NUMBER,
    "SIGNED_NUMBER": f"[+-]?({NUMBER})",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
}
SKIP = "skip"  # the rule of ignored text
STRING = r'"(?:\\.|[^"\\\n])*"'
NAME = r"[_A-Za-z][\w-]*"
TOKEN = re.compile(
    rf"(?P<low>{STRING})\s*\.\.\s*(?P<high>{STRING})|(?P<string>{STRING})(?P<fold>i\b)?|(?:(?://|\#)[^\n]*|->\s*{NAME})"
    rf"|/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)|(?P<ignore>%ignore\b)"
    rf"|%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<own>{NAME}))?|\((?P<many>[\w\s,]*)\))"
    rf"|(?m:^)[ \t]*[?!]*(?P<defined>{NAME})[ \t]*:(?!:)|(?P<name>{NAME})"
    r"|(?P<other>[%~@<\[.:]|[\"/].*)",  # a string or an expression without an end is the rest of the text
    re.DOTALL,
)
CHAR = r"\\(?:[xu]\{[^}]{0,9}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP](?:\{[^}]{0,99}\}|.)|.)"
CLASS = r"\[\^?\]?(?:\\.|[^\\\[\]])*\]"
PART = re.compile(
    rf"(?P<char>{CHAR})|(?P<class>{CLASS})|(?P<syntax>\(\?(?P<flags>[a-zA-Z-]*)[:)]|\{{[0-9,]*\}}|[()|*+?^$])|.",
    re.DOTALL,
)
MEMBER = re.compile(rf"({CHAR}|.)(?:-({CHAR}|.))?", re.DOTALL)
SET_OPERATIONS = ("&&", "--", "~~")
KNOWN = "rules, strings, ranges, regular expressions, %import common and %ignore are"


def quoted(grammar: str) -> str:
    """The grammar of the text as it is written in a JSON string. Raises GrammarError."""
    return _not_gbnf(_Definitions(_checked(grammar)).text())


def plain(grammar: str) -> str:
    """The grammar of the text in front of a marker that begins with `<`. Raises GrammarError."""
    terminals: list[str] = []

    def written(token: re.Match[str]) -> str:
        units = _units(token["regex"] or "", token["flags"] or "")
        if not any("\n" in unit.specials for unit in units):
            return token[0]
        terminals.append(rf"LINES_{len(terminals)}: {token[0]} & ~/(?s:.*)\n<(?s:.*)/")
        return f"LINES_{len(terminals) - 1}"

    return _not_gbnf("\n".join([TOKEN.sub(written, _checked(grammar)), *terminals]))


def _not_gbnf(grammar: str) -> str:
    """The same grammar without the sign of GBNF, which would be converted."""
    return grammar.replace("::=", r"::\x3d")


def _checked(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {len(grammar)} characters; at most {MAX_GRAMMAR_BYTES} are allowed")
    return grammar


Body: TypeAlias = "list[str | re.Match[str]]"
"""The right side of a definition: tokens, and the text between them."""


class _Definitions:
    """The definitions of a grammar, for escaped text."""

    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, Body] = {}
        self._ignored: list[Body] = []
        self._imported: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        body: Body = []
        end = 0
        for token in TOKEN.finditer(grammar):
            body.append(grammar[end : token.start()])
            end = token.end()
            if token["defined"] or token["ignore"] or token["one"] or token["many"]:
                body = self._begin(token)
            elif token["other"]:
                raise GrammarError(
                    f"{grammar[token.start() :][:40]!r} is not known in the grammar of an input; {KNOWN}"
                )
            else:
                body.append(token)
        body.append(grammar[end:])
        if "start" not in self._bodies:
            raise GrammarError("it has no rule `start`")

    def _begin(self, token: re.Match[str]) -> Body:
        body: Body = []
        if token["defined"]:
            if token["defined"] in self._bodies:
                raise GrammarError(f"{token['defined'][:80]} is defined twice; use another name")
            self._bodies[token["defined"]] = body
        elif token["ignore"]:
            self._ignored.append(body)
        elif token["one"]:
            self._imported[token["own"] or token["one"]] = token["one"]
        else:
            self._imported.update((name, name) for name in token["many"].replace(",", " ").split())
        if unknown := next((name for name in self._imported.values() if name not in COMMON), ""):
            raise GrammarError(f"%import common.{unknown[:80]} is not known; known are {', '.join(COMMON)}")
        return body

    def text(self) -> str:
        """The grammar: a terminal of each definition, or rules and the terminals that they need."""
        is_rule = bool(self._ignored) or not self._is_acyclic()
        lines = [f"start: {SKIP if is_rule else ''} {self._name('start', is_rule=is_rule)}"]
        for own, name in self._imported.items():
            lines.append(f"{self._name(own, is_rule=is_rule)}: {_regex(COMMON[name], '', is_rule=is_rule)}")
        for name, body in self._bodies.items():
            text = self._text(body, is_rule=is_rule, skips=is_rule and not name.isupper())
            lines.append(f"{self._name(name, is_rule=is_rule)}: {text}")
        if is_rule:
            ignored = " | ".join(self._text(body, is_rule=True) for body in self._ignored)
            lines.append(f"{SKIP}: ({ignored})*")
        return "\n".join(lines)

    def _is_acyclic(self) -> bool:
        uses = {
            name: {part["name"] for part in body if isinstance(part, re.Match) and part["name"]}
            for name, body in self._bodies.items()
        }
        try:
            TopologicalSorter(uses).prepare()
        except CycleError:
            return False
        return True

    def _name(self, name: str, *, is_rule: bool) -> str:
        return f"{'r' if is_rule else 'T'}_{self._numbers.setdefault(name, len(self._numbers))}"

    def _text(self, body: Body, *, is_rule: bool, skips: bool = False) -> str:
        """The right side of a definition, without comments and aliases. `skips`: ignored text follows each terminal."""
        parts = []
        for one in body:
            text = one if isinstance(one, str) else self._token(one, is_rule=is_rule)
            is_terminal = skips and not isinstance(one, str) and (one["name"] or "X").isupper()
            parts.append(f"({text} {SKIP})" if is_terminal and text else text)
        return "".join(parts).strip()

    def _token(self, token: re.Match[str], *, is_rule: bool) -> str:
        if token["name"]:
            return self._name(token["name"], is_rule=is_rule)
        if token["string"]:
            return _string(token["string"], token["fold"] or "", is_rule=is_rule)
        if token["low"]:
            low, high = _text_of(token["low"]), _text_of(token["high"])
            if not len(low) == len(high) == 1:
                raise GrammarError(f"{token[0][:80]} is not a range of two characters")
            characters = rf"[\x{{{ord(low):x}}}-\x{{{ord(high):x}}}]"
            return _regex(characters, "", is_rule=is_rule)
        return _regex(token["regex"], token["flags"], is_rule=is_rule) if token["regex"] else ""


def _string(source: str, fold: str, *, is_rule: bool) -> str:
    """A literal; as a rule, with a terminal per character."""
    text = _text_of(source)
    written = [json.dumps(one, ensure_ascii=False)[1:-1] for one in text]
    if fold and "".join(written) != text:
        raise GrammarError(f"{source[:80]} ignores case and has escaped characters; write two strings")
    parts = written if is_rule and text else ["".join(written)]
    return f"({' '.join(json.dumps(one, ensure_ascii=False) + fold for one in parts)})"


def _text_of(source: str) -> str:
    """The text of a string literal."""
    try:
        return str(json.loads(re.sub(r"\\x([0-9A-Fa-f]{2})", r"\\u00\1", source)))
    except ValueError:
        raise GrammarError(f"{source[:80]} is not a valid string") from None


@dataclass(frozen=True, slots=True)
class _Unit:
    """A part of a regular expression: syntax, or a character or class and the escaped characters that it matches."""

    source: str
    is_syntax: bool = False
    specials: str = ""

    def escaped(self) -> str:
        """The part in a regular expression of the escaped text."""
        if not self.specials:
            return self.source
        escaped = rf"(?-i:\\[{''.join(ESCAPED[one] for one in self.specials)}])"
        if len(self.specials) == 1 and self.source[0] not in "[.":
            return escaped
        own = self.source if self.source[0] == "[" else f"[{self.source}]"
        return f"(?:{OTHERS if self.source == '.' else f'[{own}&&{OTHERS}]'}|{escaped})"


def _regex(regex: str, flags: str, *, is_rule: bool) -> str:
    """A regular expression of the escaped text; as a rule, with a terminal per character."""
    if not is_rule:
        return f"/{''.join(unit.escaped() for unit in _units(regex, flags))}/{flags}"
    parts = []
    for unit in _units(regex, flags):
        if unit.is_syntax and unit.source.startswith("(?") and unit.source != "(?:":
            words = "has flags, which a grammar that is recursive or ignores text cannot have"
            raise GrammarError(f"/{regex[:80]}/ {words}; write them behind it")
        parts.append(unit.source.replace("?:", "") if unit.is_syntax else f"/{unit.escaped()}/{flags}")
    return f"({' '.join(parts)})"


def _units(regex: str, flags: str) -> Iterator[_Unit]:
    """The parts of a regular expression. Raises GrammarError for a part that is not known."""
    if "x" in flags:
        raise GrammarError(f"/{regex[:80]}/x has white space without meaning; remove it and the flag x")
    is_dotall, outer = "s" in flags, list[bool]()
    for part in PART.finditer(regex):
        text = part[0]
        if text == "(" and regex.startswith("?", part.end()):
            raise GrammarError(f"/{regex[:80]}/ has a group with a name or a condition; write it without")
        if part["syntax"]:
            is_dotall = _dotall_after(part, outer, is_dotall=is_dotall)
            yield _Unit(text, is_syntax=True)
        elif part["char"]:
            yield _Unit(text, specials=_specials_of_char(text))
        elif part["class"]:
            yield _Unit(text, specials=_specials_of_class(text))
        elif text == ".":
            yield _Unit(text, specials="".join(one for one in ESCAPED if is_dotall or one != "\n"))
        elif text == "[":
            raise GrammarError(f"the regular expression /{regex[:80]}/ has a class in a class; list the characters")
        else:
            yield _Unit(text, specials=text if text in ESCAPED else "")


def _dotall_after(part: re.Match[str], outer: list[bool], *, is_dotall: bool) -> bool:
    """Whether the dot matches a line break after a part. `outer`: the same of the groups around it."""
    if part[0] == ")":
        return outer.pop() if outer else is_dotall
    if not part[0].startswith("("):
        return is_dotall
    if not (part["flags"] is not None and part[0].endswith(")")):  # flags without a group are for the rest of this one
        outer.append(is_dotall)
    on, _, off = (part["flags"] or "").partition("-")
    return ("s" in on or is_dotall) and "s" not in off


def _specials_of_char(text: str) -> str:
    """The escaped characters that an escape outside of a class matches."""
    if text[1].lower() in SETS or text[1] in "pP":
        return _specials_of_class(f"[{text}]")
    return _char(text) if _char(text) in ESCAPED else ""


def _specials_of_class(text: str) -> str:
    """The escaped characters in a class."""
    inner = text[2:-1] if text[1] == "^" else text[1:-1]
    if any(one in inner for one in SET_OPERATIONS) or re.search(r"\\[pP](?!\{?[LN])|\\P", inner):
        raise GrammarError(f"the class {text[:80]} cannot be used in the grammar of an input; list its characters")
    found = set[str]()
    for member in MEMBER.finditer(inner):
        name = member[1][1:2]
        if len(member[1]) > 1 and name.lower() in SETS:
            own = set(SETS[name.lower()])
            found |= own if name.islower() else set(ESCAPED) - own
        elif name not in ("p", "P"):
            low, high = _char(member[1]), _char(member[2] or member[1])
            found |= {one for one in ESCAPED if low <= one <= high}
    is_negated = text[1] == "^"
    return "".join(one for one in ESCAPED if (one in found) is not is_negated)


def _char(text: str) -> str:
    """The character that a part of a regular expression stands for."""
    if len(text) == 1:
        return text
    if len(text) == 2:
        return CONTROLS.get(text[1], text[1])
    try:
        return chr(int(text[2:].strip("{}"), 16))
    except (ValueError, OverflowError):
        raise GrammarError(f"{text[:80]} is not a character") from None
