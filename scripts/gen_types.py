#!/usr/bin/env python
"""Generate dataclasses that repeat messages of the protocol: fields, types and comments come from the .proto files.

gen_protos.py calls this script. A field that is not set in a message has the
default of its dataclass; an enum is the name of its value in lower case.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROTO_ROOT = ROOT / "protos"
LINE = 120  # characters
COMMENT = re.compile(r"\s*// ?(.*)")
HEAD = re.compile(r"(message|enum|service) (\w+) {")
FIELD = re.compile(r"\s+(optional |repeated )?([\w.]+|map<.*>) (\w+) = \d+;")
SCALARS = {
    **dict.fromkeys(("double", "float"), ("float", "0.0")),
    **dict.fromkeys(("int32", "uint32", "int64", "uint64", "fixed64"), ("int", "0")),
    "bool": ("bool", "False"),
    "string": ("str", '""'),
    "bytes": ("bytes", 'b""'),
}
HEAD_OF_MODULE = '''# Generated from the .proto files by scripts/gen_types.py. Edit these.
"""{doc}"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

{imports}
'''
ENUM = "str", '"unknown"'


class Field(NamedTuple):
    """A field of a message."""

    label: str  # "optional ", "repeated " or empty
    kind: str
    comment: str


@dataclass(frozen=True)
class Message:
    """A message of the protocol."""

    comment: str
    fields: dict[str, Field] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """A message that becomes a dataclass."""

    message: str
    name: str = ""  # of the class; empty: the message's name
    types: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # fields with another type and default
    fields: tuple[str, ...] = ()  # in this order; empty: all, as the message has them
    base: str = "Result"


@dataclass(frozen=True)
class Module:
    """A generated module."""

    path: str
    doc: str
    imports: str  # lines
    copies: tuple[Copy, ...]


MODULES = (
    Module(
        "client/quire_client/results.py",
        "Results of calls that have the fields of a message.",
        "from quire_client.images import Image\nfrom quire_client.plain import Result, TokenCounts\n",
        (
            Copy("ToolCall"),
            Copy("ToolCallPart", "ToolCallDelta"),
            Copy("ChatMessage", "Message", {"role": ("str", ""), "parts": ("tuple[str | Image, ...]", "()")}),
            Copy("Usage", base="TokenCounts"),
            Copy("WeightVersion"),
            Copy("WeightVersionSpan"),
            Copy("PausedSample"),
            Copy("TensorChecksum"),
            Copy("GetWeightsResponse", "WeightsStatus"),
            Copy("ScoreResponse", "ScoreResult", fields=("scores", "prompt_tokens", "model", "revision", "request_id")),
            Copy("SessionSample"),
            Copy("Session", "SessionInfo"),
            Copy("Adapter", "AdapterStatus"),
            Copy("WorkerInfo", "WorkerStatus", {"role": ("str", '"both"')}),
            Copy("LatencyHistogram"),
            Copy("OpenRequest"),
            Copy("SchedulerStatus"),
            Copy("GetStatusResponse", "Status", {"pins_by_owner": ("dict[str, int]", "field(default_factory=dict)")}),
        ),
    ),
)


class Protocol:
    """All messages with their comments, by name. A name that two packages have is that of the public one."""

    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}
        self.enums: set[str] = set()
        for path in sorted(PROTO_ROOT.glob("quire/**/*.proto"), key=lambda path: "internal" not in path.parts):
            self._read(path.read_text().splitlines())

    def _read(self, lines: Iterable[str]) -> None:
        comment: list[str] = []
        message = Message("")
        for line in lines:
            if found := COMMENT.match(line):
                comment.append(found[1])
                continue
            if found := HEAD.match(line):
                message = Message(" ".join(comment))
                if found[1] == "message":
                    self.messages[found[2]] = message
                elif found[1] == "enum":
                    self.enums.add(found[2])
            elif found := FIELD.match(line):
                message.fields[found[3]] = Field(found[1] or "", found[2].rpartition(".")[2], " ".join(comment))
            comment = []


def source(module: Module, protocol: Protocol) -> str:
    """The text of a generated module."""
    names = {copy.message: copy.name or copy.message for copy in module.copies}
    public = "".join(f'    "{name}",\n' for name in sorted(names.values()))
    by_message = "".join(f'    "{message}": {name},\n' for message, name in names.items())
    parts = [
        f"__all__ = [\n{public}]\n",
        *(_class(copy, names, protocol) for copy in module.copies),
        f"MESSAGES: dict[str, type[Any]] = {{\n{by_message}}}\n",
    ]
    return HEAD_OF_MODULE.format(doc=module.doc, imports=module.imports) + "\n\n".join(parts)


def _class(copy: Copy, names: Mapping[str, str], protocol: Protocol) -> str:
    message = protocol.messages[copy.message]
    lines = [
        "@dataclass(frozen=True, slots=True)",
        f"class {names[copy.message]}({copy.base}):",
        *_docstring(message.comment),
        "",
    ]
    for name in copy.fields or message.fields:
        annotation, default = copy.types.get(name) or _type(message.fields[name], names, protocol.enums)
        lines.append(f"    {name}: {annotation}" + (f" = {default}" if default else ""))
        lines += _docstring(message.fields[name].comment)
    return "\n".join(lines) + "\n"


def _type(one: Field, names: Mapping[str, str], enums: Set[str]) -> tuple[str, str]:
    """The annotation and the default of a field."""
    name, default = ENUM if one.kind in enums else SCALARS.get(one.kind, ("", ""))
    if not name:
        name = names[one.kind]
        default = f"{name}()"
    if one.label == "repeated ":
        return f"tuple[{name}, ...]", "()"
    return (f"{name} | None", "None") if one.label else (name, default)


def _docstring(text: str) -> Iterator[str]:
    if len(line := f'    """{text}"""') <= LINE:
        yield line
        return
    wrapped = textwrap.wrap(text, LINE, initial_indent='    """', subsequent_indent="    ", break_on_hyphens=False)
    yield from (*wrapped, '    """')


def generate() -> None:
    protocol = Protocol()
    for module in MODULES:
        path, text = ROOT / module.path, source(module, protocol)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"generated {path}")


if __name__ == "__main__":
    generate()
