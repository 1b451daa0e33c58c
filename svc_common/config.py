"""Settings of a service: flags, then environment, then defaults. A bad value stops the start with its name.

Every flag `--max-waiting` can also be given as the environment variable `QUIRE_MAX_WAITING`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T", int, float)


def make_parser(service: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser with the flags that every service has."""
    parser = argparse.ArgumentParser(
        prog=f"quire-{service}",
        description=description,
        epilog=epilog + "\nEvery flag can be set by environment: --max-waiting is QUIRE_MAX_WAITING.",
        formatter_class=_Formatter,
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="log lines for people or JSON")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="least level that is logged"
    )
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something and keeps the epilog's line breaks."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse flags over environment over defaults; exits with 2 and the setting's name on a bad value."""
    words = sys.argv[1:] if argv is None else list(argv)
    given = {word.partition("=")[0] for word in words}
    for action in parser._actions:
        flag = next((s for s in action.option_strings if s.startswith("--")), None)
        # A list on the command line replaces the environment's; argparse would append to it.
        if flag is not None and flag != "--help" and not (_is_list(action) and flag in given):
            _apply_environment(parser, action, flag)
    return parser.parse_args(words)


def _apply_environment(parser: argparse.ArgumentParser, action: argparse.Action, flag: str) -> None:
    name = "QUIRE_" + flag[2:].upper().replace("-", "_")
    text = os.environ.get(name)
    if text is None:
        return
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    if isinstance(action, argparse._StoreTrueAction):
        convert = _flag
    try:
        values = [convert(part) for part in text.split(",")] if _is_list(action) else convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"environment variable {name}={text!r}: {error}")
    if action.choices is not None and values not in action.choices:
        parser.error(f"environment variable {name}={text!r}: choose from {', '.join(map(str, action.choices))}")
    action.default = values
    action.required = False


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no", ""):
        return False
    raise ValueError("use true or false")


def in_range(kind: Callable[[str], T], low: T, high: T) -> Callable[[str], T]:
    """An argparse type: a number from low to high, both included."""

    def convert(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low} to {high}")
        return value

    return convert


def address(text: str) -> str:
    """An argparse type: host:port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return text


def size_bytes(text: str) -> int:
    """An argparse type: bytes, with K, M, G or T for powers of 1024 (`2G`, `512M`)."""
    units = {"K": 1, "M": 2, "G": 3, "T": 4}
    number, power = (text[:-1], units[text[-1].upper()]) if text and text[-1].upper() in units else (text, 0)
    try:
        return int(float(number) * 1024**power)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G") from None
