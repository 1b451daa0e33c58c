"""The argument parser and the types of flag values. An error is one line and suggests a name for a mistyped one."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from request_fields.fields import BY_PATH

INVALID_CHOICE = re.compile(
    r"argument (?P<name>\S+): invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)"
)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the line breaks of the examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of the whole command line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **settings)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The parsed arguments. An unknown flag is reported by the parser of its command."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: Parser = getattr(found, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.suggestion(unknown[0])}")
        return found

    def suggestion(self, flag: str) -> str:
        """A known flag that looks like `flag`, as the end of an error message."""
        return _suggestion(flag.partition("=")[0], [name for name in self._option_string_actions if name[:2] == "--"])

    def error(self, message: str) -> NoReturn:
        match = INVALID_CHOICE.fullmatch(message)
        if match:
            choices = [choice.strip(" '") for choice in match["choices"].split(",")]
            suggestion = _suggestion(match["given"], choices)
            is_command = match["name"] == "COMMAND"
            message = (f"there is no command {match['given']!r}" if is_command else message) + suggestion
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def _suggestion(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def at_least(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value

    return convert


def port(text: str) -> int:
    value = at_least(0)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def priority(text: str) -> int:
    """A value of the request field scheduling.priority."""
    field = BY_PATH["scheduling.priority"]
    assert field.low is not None and field.high is not None  # noqa: PT018
    value = at_least(int(field.low))(text)
    if value > field.high:
        raise argparse.ArgumentTypeError(f"{text} is above {field.high}")
    return value


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def positive(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def fraction(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def text_file(text: str) -> str:
    """The content of a file."""
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from None


def token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give one or more token ids of at least 0")
    return ids
