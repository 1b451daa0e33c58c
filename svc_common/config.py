"""Settings of a service: flags override the environment, which overrides a file, which overrides defaults.

The flag `--max-waiting` is `QUIRE_MAX_WAITING` in the environment and `max-waiting` in the TOML file that `--config`
names. A table `[scheduler]` in the file holds settings of that service only, so one file may serve all services. An
invalid setting stops the start with its name and source.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)

SERVICES = ("gateway", "scheduler", "worker")
OFF = "off"
NAME_SCHEME = "dns:///"  # scheme of a name whose addresses are all meant
NO_SETTINGS = ("help", "config", "print-config")  # flags that a file cannot hold
EPILOG = """
Every flag can be set by environment and file: --max-waiting is QUIRE_MAX_WAITING in the environment, and max-waiting
in the TOML file of --config. A flag overrides the environment, which overrides the file.
"""
SECRET_ENDS = ("-key", "-token", "-password", "-secret")


class SettingError(ValueError):
    """A setting cannot be used. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class FlagKind(Generic[T]):
    """An argparse type that can describe the values it accepts."""

    convert: Callable[[str], T]
    allowed: str
    metavar: str | None = None
    choices: tuple[T, ...] = ()

    def __call__(self, text: str) -> T:
        return self.convert(text)


@dataclass(frozen=True, slots=True)
class Given:
    """A setting as written by the user, and its source."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting: its name, the kind of its values, its meaning and its default.

    argparse, the environment, the file of --config, docs/configuration.md and the test of the chart derive from it.
    """

    name: str  # with its dashes
    kind: Callable[[str], Any]
    help: str
    default: Any = None
    metavar: str | None = None  # None: that of the kind
    is_list: bool = False  # the flag may be repeated
    is_required: bool = False

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Declare the flag to argparse."""
        if self.kind is switch:
            group.add_argument(self.name, action="store_true", help=self.help)
            return
        choices = self.kind.choices if isinstance(self.kind, FlagKind) else ()
        settings: dict[str, Any] = {"choices": choices} if choices else {"type": self.kind, "metavar": self._metavar()}
        if self.is_list:
            settings |= {"action": "append", "default": []}
        else:
            settings["default"] = self.default
        group.add_argument(self.name, required=self.is_required, help=self.help, **settings)

    def _metavar(self) -> str | None:
        is_rate = self.name.endswith("-per-s")
        of_unit = None if is_rate else {"s": "S", "ms": "MS"}.get(self.name.rpartition("-")[2])
        return self.metavar or of_unit or (self.kind.metavar if isinstance(self.kind, FlagKind) else None)


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags with a heading of their own in --help."""

    title: str
    flags: Sequence[Flag]
    description: str | None = None


def make_parser(
    service: str, description: str, epilog: str = "", flags: Sequence[Flag | FlagGroup] = ()
) -> argparse.ArgumentParser:
    """A parser of the flags that all services share, and of `flags`."""
    parser = argparse.ArgumentParser(
        prog=f"quire-{service}",
        description=description,
        epilog=epilog + EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_flags(parser, (COMMON, *flags))
    return parser


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag | FlagGroup]) -> None:
    """Declare the flags to argparse."""
    for row in flags:
        if isinstance(row, Flag):
            row.add_to(parser)
            continue
        group = parser.add_argument_group(row.title, row.description)
        for flag in row.flags:
            flag.add_to(group)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None and keeps the epilog's line breaks."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


# -- reading ----------------------------------------------------------------------------------------------------------


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse all sources. Exits with status 2 and the setting's name if one is invalid.

    `shown_settings` of the result is the text of --print-config.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    flags = {word.partition("=")[0] for word in words}
    in_file = _read_file(parser, words)
    sources: dict[str, str] = {}
    for name, action in settings_of(parser):
        given = Given(None, "flag") if f"--{name}" in flags else _from_environment(name) or in_file.get(name)
        sources[name] = "default" if given is None else given.source
        if given is not None and given.value is not None:
            action.default = _convert(parser, name, action, given)
            action.required = False
        elif given is not None and _is_list(action):
            action.default = None  # a list of flags replaces the default; argparse would append to it
    args = parser.parse_args(words)
    args.shown_settings = describe(parser, args, sources)
    if args.print_config:
        print(args.shown_settings)
        raise SystemExit(0)
    return args


def settings_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Every setting with its name in a file."""
    for action in parser._actions:
        name = next((s[2:] for s in action.option_strings if s.startswith("--")), None)
        if name is not None and name not in NO_SETTINGS:
            yield name, action


def environment_name(name: str) -> str:
    """max-waiting -> QUIRE_MAX_WAITING."""
    return "QUIRE_" + name.upper().replace("-", "_")


def _from_environment(name: str) -> Given | None:
    variable = environment_name(name)
    text = os.environ.get(variable)
    return None if text is None else Given(text, f"environment variable {variable}")


def _read_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Given]:
    """The file's settings of this service. Exits if the file has an unknown setting."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=os.environ.get("QUIRE_CONFIG"))
    path = finder.parse_known_args(words)[0].config
    if not path:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    own = parser.prog.removeprefix("quire-")
    # `scheduler` is either the table of the scheduler or the setting of gateways and workers: a list of addresses.
    of_services = {name: value for name, value in tables.items() if name in SERVICES and isinstance(value, dict)}
    for_all = {name: value for name, value in tables.items() if name not in of_services}
    given: dict[str, Given] = {}
    for table, values in (("", for_all), (own, of_services.get(own, {}))):
        for name, value in values.items():
            where = f"{path}:{_line_of(text, table, name)}"
            _check_name(parser, name, value, where)
            given[name] = Given(value, where)
    return given


def _check_name(parser: argparse.ArgumentParser, name: str, value: object, where: str) -> None:
    known = [known for known, _ in settings_of(parser)]
    if isinstance(value, dict):
        tables = ", ".join(f"[{service}]" for service in SERVICES)
        parser.error(f"{where}: [{name}] is not a service; the tables are {tables}")
    if name not in known:
        close = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"{parser.prog} --help lists all settings"
        parser.error(f"{where}: {name} is not a setting of {parser.prog}; {advice}")


def _line_of(text: str, table: str, name: str) -> int:
    """The line where a table sets `name`, or where the table `name` begins."""
    here, key = "", re.compile(rf"""\s*["']?{re.escape(name)}["']?\s*[=.]""")
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"""\s*\[\s*["']?([^"'\]]+?)["']?\s*\]""", line):
            here = header[1]
            if not table and here == name:
                return number
        elif here == table and key.match(line):
            return number
    return 1


def _convert(parser: argparse.ArgumentParser, name: str, action: argparse.Action, given: Given) -> Any:
    shown = f"={given.value!r}" if given.source.startswith("env") else f": {name} = {_toml(given.value)}"
    where = given.source if name.endswith(SECRET_ENDS) else given.source + shown
    try:
        return _values(action, given.value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"{where}: {error}")


def _values(action: argparse.Action, value: Any) -> Any:
    """Converts text of the environment, or text, number, boolean or list of a file. Raises ValueError."""
    if _is_list(action):
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        return [_one_value(action, part) for part in parts]
    return _one_value(action, value)


def _one_value(action: argparse.Action, value: Any) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        return value if isinstance(value, bool) else _flag(str(value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"write {allowed_values(action)}")
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    converted = convert(str(value))
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"choose from {', '.join(map(str, action.choices))}")
    return converted


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no", ""):
        return False
    raise ValueError("use true or false")


# -- showing ----------------------------------------------------------------------------------------------------------


def describe(parser: argparse.ArgumentParser, args: argparse.Namespace, sources: Mapping[str, str]) -> str:
    """The settings in force as a TOML file, each with its source; secrets are hidden."""
    lines = []
    for name, action in settings_of(parser):
        value = getattr(args, action.dest)
        if value is None or value == []:
            lines.append(f"# {name} is not set")
            continue
        shown = "***" if name.endswith(SECRET_ENDS) else without_password(value)
        lines.append(f"{name} = {_toml(shown)}  # {sources[name]}")
    return "\n".join(lines)


def allowed_values(action: argparse.Action) -> str:
    """The values that a setting accepts, for messages and docs."""
    if isinstance(action, argparse._StoreTrueAction):
        return "true or false"
    if action.choices is not None:
        return ", ".join(map(str, action.choices))
    one = action.type.allowed if isinstance(action.type, FlagKind) else "text"
    return f"a list of: {one}" if _is_list(action) else one


def without_password(value: Any) -> Any:
    """Makes a setting safe to show: in a URL, `***` replaces the password before the host and in parameters."""
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = re.sub(r"(?<=[?&]password=)[^&#]*", "***", value, flags=re.IGNORECASE).partition("://")
    # Split at the last @: a password with an unescaped / or ? makes the URL malformed, but must still be hidden.
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{place}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        flat = [part for item in value for part in (item if isinstance(item, list) else [item])]
        return f"[{', '.join(map(_toml, flat))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)


# -- kinds of values --------------------------------------------------------------------------------------------------


def in_range(kind: Callable[[str], N], low: N, high: N) -> FlagKind[N]:
    """An argparse type: a number from low to high, both included."""
    span = " to ".join(str(end) if isinstance(end, int) else f"{end:g}" for end in (low, high))

    def convert(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number; write {span}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {span}")
        return value

    return FlagKind(convert, span, "N" if kind is int else "X")


def one_of(*choices: str) -> FlagKind[str]:
    """An argparse type: one of some words."""
    return FlagKind(str, ", ".join(choices), choices=choices)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return text


def _scheduler_address(text: str) -> str:
    if "://" in text or text.startswith(("dns:", "unix:")):
        if not text.startswith(NAME_SCHEME) or "/" in text.removeprefix(NAME_SCHEME):
            raise argparse.ArgumentTypeError(f"{text!r} is not host:port or {NAME_SCHEME}name:port")
        return NAME_SCHEME + _address(text.removeprefix(NAME_SCHEME))
    return _address(text)


def _size_bytes(text: str) -> int:
    units = {"K": 1, "M": 2, "G": 3, "T": 4}
    number, power = (text[:-1], units[text[-1].upper()]) if text and text[-1].upper() in units else (text, 0)
    try:
        size = int(float(number) * 1024**power)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G")
    return size


text = FlagKind(str, "text")
path = FlagKind(Path, "a path", "FILE")
switch = FlagKind(_flag, "true or false")
address = FlagKind(_address, "host:port", "HOST:PORT")
scheduler_address = FlagKind(
    _scheduler_address, f"host:port, or {NAME_SCHEME}name:port for all addresses of a name", "HOST:PORT"
)
address_or_off = FlagKind(
    lambda text: OFF if text.lower() in (OFF, "") else _address(text), "host:port or off", "HOST:PORT"
)
size_bytes = FlagKind(_size_bytes, "bytes, or with K, M, G, T for powers of 1024 (512M, 2G)", "SIZE")

COMMON = FlagGroup(
    "configuration, logs, metrics, probes", (
        Flag("--config", text, "TOML file with settings; in the environment QUIRE_CONFIG", metavar="FILE"),
        Flag("--print-config", switch, "print the settings in force, each with its source, and exit"),
        Flag("--log-format", one_of("text", "json"), "text for terminals or JSON for collectors", default="text"),
        Flag("--log-level", one_of("debug", "info", "warning", "error"), "lowest level that is logged", default="info"),
        Flag("--metrics-listen", address_or_off,
            "address for /metrics, /startupz, /livez and /readyz over HTTP; port 0: any free port, shown in the log",
            default=OFF,
        ),
        Flag("--metrics-compat", one_of("none", "vllm", "inference-pool"),
            "vllm: export metrics under vLLM's names too, for dashboards and autoscalers made for vLLM; "
            "inference-pool: gateways also export the queue and KV use of their schedulers under these names, for "
            "the endpoint picker of Kubernetes, so sums over all services count them several times", default="none",
        ),
        Flag("--health-listen", address_or_off,
            "address for grpc.health without TLS (services `startup`, `liveness` and `readiness`), for kubelet "
            "probes", default=OFF,
        ),
    ),
)  # fmt: skip
