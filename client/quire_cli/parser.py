"""The argument parser and the types of flag values. An error is one line and suggests a name for a mistyped one."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

N = TypeVar("N", int, float)

INVALID_CHOICE = re.compile(
    r"argument (?P<name>\S+): invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)"
)


MAX_IN_USAGE = 16  # rows of arguments, above which the first line of --help does not repeat them


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


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag or a positional argument: what `add_argument` takes."""

    names: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def is_value(self) -> bool:
        """It is not a flag."""
        return not self.names[0].startswith("-")


def arg(*names: str, help: str, **settings: Any) -> Argument:
    """A row of a table of arguments."""
    return Argument(names, {"help": help, **settings})


def switch(name: str, help: str) -> Argument:
    """A flag without a value."""
    return arg(name, help=help, action="store_true")


def count_of(name: str, help: str, low: int = 1, *, metavar: str = "N", **settings: Any) -> Argument:
    """A flag whose value is a whole number of at least `low`."""
    return arg(name, help=help, type=within(low), metavar=metavar, **settings)


@dataclass(frozen=True, slots=True)
class ArgumentGroup:
    """Arguments with a heading of their own in --help."""

    title: str
    arguments: Sequence[Argument]


Arguments = Sequence[Argument | ArgumentGroup]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the function that runs it, and its arguments; or a name for other commands."""

    name: str
    runs: str  # MODULE.FUNCTION of quire_cli.commands, or PACKAGE.MODULE.FUNCTION
    summary: str
    arguments: Arguments = ()
    epilog: str = ""
    actions: Sequence[Command] = ()

    def add_to(self, commands: argparse._SubParsersAction[Parser]) -> None:
        """Declare the command to argparse. Parsed arguments have `module`, `function` and `parser`."""
        parser = commands.add_parser(self.name, help=self.summary, description=self.summary, epilog=self.epilog)
        if len(self.arguments) > MAX_IN_USAGE:
            values = [row.names[0].upper() for row in self.arguments if isinstance(row, Argument) and row.is_value]
            parser.usage = " ".join(["%(prog)s [FLAG ...]", *values])
        for row in self.arguments:
            if isinstance(row, Argument):
                parser.add_argument(*row.names, **row.settings)
                continue
            group = parser.add_argument_group(row.title)
            for argument in row.arguments:
                group.add_argument(*argument.names, **argument.settings)
        if self.actions:
            found = parser.add_subparsers(metavar="ACTION", required=True)
            for action in self.actions:
                action.add_to(found)
        else:
            module, _, function = self.runs.rpartition(".")
            module = module if "." in module else f"quire_cli.commands.{module}"
            parser.set_defaults(module=module, function=function, parser=parser)


def _suggestion(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def within(low: N, high: N | None = None, kind: Callable[[str], N] = whole) -> Callable[[str], N]:
    """The type of a number from `low` to `high`, both included."""

    def convert(text: str) -> N:
        value = kind(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low:g}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(
                f"{text} is above {high:g}" if kind is number else f"{text} is above {high}"
            )
        return value

    return convert


def positive(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def size(text: str) -> str:
    """A number of bytes, as the services take it."""
    if not re.fullmatch(r"\d+(\.\d+)?[KMGTkmgt]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G")
    return text


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


def route_target(text: str) -> tuple[str, int]:
    name, equals, weight = text.rpartition("=")
    return (name, within(0)(weight)) if equals else (text, 1)


def token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give one or more token ids of at least 0")
    return ids
