"""The argument parser: errors of one line, with a suggestion for a mistyped command or flag."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

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
