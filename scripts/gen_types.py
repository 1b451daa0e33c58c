#!/usr/bin/env python
"""Generate dataclasses that repeat messages of the protocol, and the SDK's options that repeat request fields. Names,
types and comments come from the .proto files and request_fields/fields.py.

gen_protos.py calls this script. A field that is not set in a message has the
default of its dataclass; an enum is the name of its value in lower case.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from request_fields.fields import FIELDS, MAX_UINT32, BodyForm, Kind
from request_fields.fields import Field as RequestField

ROOT = Path(__file__).resolve().parents[1]
PROTO_ROOT = ROOT / "protos"
LINE = 120  # characters
COMMENT = re.compile(r"\s*// ?(.*)")
HEAD = re.compile(r"(message|enum|service) (\w+) {")
VALUE = re.compile(r"  ([A-Z]\w+) = (\d+);")
FIELD = re.compile(r"\s+(optional |repeated )?([\w.]+|map<.*>) (\w+) = \d+;")
SCALARS = {
    **dict.fromkeys(("double", "float"), ("float", "0.0")),
    **dict.fromkeys(("int32", "uint32", "int64", "uint64", "fixed64"), ("int", "0")),
    "bool": ("bool", "False"),
    "string": ("str", '""'),
    "bytes": ("bytes", 'b""'),
}
SDK_TYPES = {
    **dict.fromkeys((Kind.INT32, Kind.UINT32, Kind.UINT64), "int"), Kind.FLOAT: "float", Kind.BOOL: "bool",
    Kind.STRING: "str", Kind.STRINGS: "str | Sequence[str]", Kind.TOKEN_IDS: "Sequence[int]",
    Kind.BLOBS: "Sequence[Image | bytes | str | PathLike[str]]", Kind.BIASES: "Mapping[int, float]",
    Kind.COUNTS: "Mapping[str, int]",
}  # fmt: skip
HEAD_OF_MODULE = '''# Generated from the .proto files by scripts/gen_types.py. Edit these.
"""{doc}"""

from __future__ import annotations

from dataclasses import dataclass, field
{imports}
'''
OPTIONS = '''# Generated from request_fields/fields.py by scripts/gen_types.py. Edit that file.
"""Options of the SDK that set fields of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from quire_client.inputs import Image


class RequestOptions(TypedDict, total=False):
    """Keyword options that set fields of a request. An unset option takes the model's default, then the server's."""

'''
ENUM = "str", '"unknown"'
IDS = "U32", "field(default_factory=lambda: EMPTY)", "np.array(message.{}, np.uint32)"
ALLOWED = (
    "dict[int, U32]",
    "field(default_factory=dict)",
    "{{at.position: np.array(at.ids, np.uint32) for at in message.{}}}",
)


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
    name: str = ""  # name of the class; empty: the message's name
    # Fields with another type and default, and the expression that reads the field `{}` of a message:
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()  # in this order; empty: all, as the message has them
    base: str = ""
    is_read: bool = False  # the class reads its message


@dataclass(frozen=True)
class Module:
    """A generated module."""

    path: str
    doc: str
    imports: str  # lines
    copies: tuple[Copy, ...]
    enums: Mapping[str, str] = field(default_factory=dict)  # name of the value 0 of each enum; empty: it is never sent
    base: str = ""  # base of the copies that name none


MODULES = (
    Module(
        "client/quire_client/results.py",
        "Results of calls that have the fields of a message.",
        "from typing import Any\n\nfrom quire_client.inputs import Image\n"
        "from quire_client.plain import Chances, Result, TokenCounts\n",
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
            Copy("Answer", base="Chances"),
            Copy("DecideResponse", "DecideResult", fields=("answers", "model", "revision", "request_id")),
            Copy("SessionSample"),
            Copy("Session", "SessionInfo"),
            Copy("Adapter", "AdapterStatus"),
            Copy("Route", "Route", {"targets": ("dict[str, int]", "field(default_factory=dict)")}),
            Copy("WorkerInfo", "WorkerStatus", {"role": ("str", '"both"')}),
            Copy("LatencyHistogram"),
            Copy("OpenRequest"),
            Copy("SchedulerStatus"),
            Copy(
                "ModelInfo",
                "ModelFacts",
                {"determinism": ("str", '"best_effort"'), "quantization": ("str | None", "None")},
                fields=(
                    *("revision", "max_model_len", "vocab_size", "eos_token_ids", "block_size", "max_num_blocks"),
                    *("max_num_seqs", "dtype", "determinism", "quantization", "hidden_size"),
                ),
            ),
            Copy("GetStatusResponse", "Status", {"pins_by_owner": ("dict[str, int]", "field(default_factory=dict)")}),
        ),
        base="Result",
    ),
    Module(
        "step_protocol/types.py",
        "What rows carry into a step, why they fail, and what a worker announces.",
        "from enum import Enum\nfrom typing import Any, Self\n\nimport numpy as np\n\n"
        "from step_protocol.columns import EMPTY, U32\n",
        (
            Copy("CarriedInput", is_read=True),
            Copy("EncoderInput", types={"allowed": ALLOWED, "banned_ids": IDS, "first_banned_ids": IDS}, is_read=True),
            Copy("Pooling", types={"token_ids": IDS}, is_read=True),
            Copy(
                "RowError",
                types={"code": ("RowErrorCode", "RowErrorCode.INTERNAL")},
                fields=("row", "message", "code"),
            ),
            Copy("CacheGroup", types={"block_bytes": ("int", "1")}, is_read=True),
            Copy("BlockMovement", is_read=True),
            Copy("WorkerAdapter"),
            Copy(
                "ModelInfo",
                "AnnouncedModel",
                fields=(
                    *("model", "revision", "numerics", "build", "max_model_len", "vocab_size", "eos_token_ids"),
                    *("block_size", "max_num_seqs", "hidden_size", "is_encoder"),
                    *("weights_digest", "weight_version", "weights_revision"),
                ),
            ),
            Copy("TensorChecksum"),
            Copy("PausedSample"),
            Copy("PoolingInfo"),
            Copy("ImageInfo", types={"token_cost": ("float", "1.0")}),
            Copy("AudioInfo"),
            Copy("EncoderInfo", types={"audio": ("AudioInfo | None", "None")}),
        ),
        enums={"PoolingKind": "", "PoolingTask": "", "RowErrorCode": "", "WorkerRole": "BOTH"},
    ),
)


class Protocol:
    """All messages with their comments, by name. A name that two packages have is that of the public one."""

    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}
        self.enums: dict[str, Message] = {}  # values as fields: their names, and their numbers as labels
        for path in sorted(PROTO_ROOT.glob("quire/**/*.proto"), key=lambda path: "internal" not in path.parts):
            self._read(path.read_text().splitlines())

    def _read(self, lines: Iterable[str]) -> None:
        comment: list[str] = []
        message, prefix = Message(""), ""
        for line in lines:
            if found := COMMENT.match(line):
                comment.append(found[1])
                continue
            if found := HEAD.match(line):
                message = Message(" ".join(comment))
                if found[1] == "message":
                    self.messages[found[2]] = message
                elif found[1] == "enum":
                    self.enums[found[2]], prefix = message, f"{_upper(found[2])}_"
            elif found := FIELD.match(line):
                message.fields[found[3]] = Field(found[1] or "", found[2].rpartition(".")[2], " ".join(comment))
            elif found := VALUE.match(line):
                message.fields[found[1].removeprefix(prefix)] = Field(found[2], "", " ".join(comment))
            comment = []


def source(module: Module, protocol: Protocol) -> str:
    """The text of a generated module."""
    names = {copy.message: copy.name or copy.message for copy in module.copies}
    classes = [_class(copy, module, names, protocol) for copy in module.copies]
    if module.base:
        public = "".join(f'    "{name}",\n' for name in sorted(names.values()))
        by_message = "".join(f'    "{message}": {name},\n' for message, name in names.items())
        classes = [
            f"__all__ = [\n{public}]\n",
            *classes,
            f"MESSAGES: dict[str, type[Any]] = {{\n{by_message}}}\n",
        ]
    else:
        used = dict.fromkeys(
            one.kind for copy in module.copies for one in protocol.messages[copy.message].fields.values()
        )
        classes = [
            *(_enum(name, module.enums, protocol.enums[name]) for name in used if name in protocol.enums),
            *classes,
        ]
    return HEAD_OF_MODULE.format(doc=module.doc, imports=module.imports) + "\n\n".join(classes)


def _class(copy: Copy, module: Module, names: Mapping[str, str], protocol: Protocol) -> str:
    message, base = protocol.messages[copy.message], copy.base or module.base
    lines = [
        "@dataclass(frozen=True, slots=True)",
        f"class {names[copy.message]}" + (f"({base}):" if base else ":"),
        *_docstring(message.comment),
        "",
    ]
    reads = []
    for name in copy.fields or message.fields:
        one = message.fields[name]
        annotation, default, *read = copy.types.get(name) or _type(one, names, module, protocol.enums)
        lines.append(f"    {name}: {annotation}" + (f" = {default}" if default else ""))
        lines += _docstring(one.comment)
        reads.append(read[0].format(name) if read else f"message.{name}")
    if copy.is_read:
        lines += ["", "    @classmethod", "    def read(cls, message: Any) -> Self:"]
        lines += ['        """The fields of a message."""', "        return cls("]
        lines += [*(f"            {read}," for read in reads), "        )"]
    return "\n".join(lines) + "\n"


def _enum(name: str, zeros: Mapping[str, str], enum: Message) -> str:
    """The class of an enum and its members by number; of an enum without a class, the names of its values."""
    (_, zero), *others = enum.fields.items()
    if name not in zeros:
        return _table(name, "str", {one.label: f'"{value.lower()}"' for value, one in others})
    kept = [(zeros[name], zero), *others] if zeros[name] else others
    lines = [f"class {name}(Enum):", *_docstring(enum.comment), ""]
    for value, one in kept:
        lines += [f'    {value} = "{value.lower()}"', *_docstring(one.comment)]
    return "\n".join(lines) + "\n\n\n" + _table(name, name, {one.label: f"{name}.{value}" for value, one in kept})


def _table(name: str, kind: str, by_number: Mapping[str, str]) -> str:
    pairs = "".join(f"    {number}: {value},\n" for number, value in by_number.items())
    return f"{_upper(name)}S: dict[int, {kind}] = {{\n{pairs}}}\n"


def _upper(name: str) -> str:
    """The name of an enum as its values begin with it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _type(one: Field, names: Mapping[str, str], module: Module, enums: Mapping[str, Message]) -> tuple[str, ...]:
    """The annotation and the default of a field, and the expression that reads it."""
    if one.kind.startswith("map<string"):
        return "dict[str, int]", "field(default_factory=dict)", "dict(message.{})"
    if one.kind in enums and not module.base:
        first = module.enums.get(one.kind) or list(enums[one.kind].fields)[1]
        known = f"{_upper(one.kind)}S.get(message.{{0}}, "
        if one.kind in module.enums:
            return one.kind, f"{one.kind}.{first}", f"{known}{one.kind}.{first})"
        return "str", '""', f"{known}str(message.{{0}}))"
    name, default = ENUM if one.kind in enums else SCALARS.get(one.kind, ("", ""))
    if not name:
        name = names[one.kind]
        default = f"{name}()"
    if one.label == "repeated ":
        return f"tuple[{name}, ...]", "()", "tuple(message.{})"
    return (f"{name} | None", "None") if one.label else (name, default)


def options_source() -> str:
    """The text of the module with the SDK's options."""
    return OPTIONS + "".join(map(_option, FIELDS))


def _option(field: RequestField) -> str:
    """One attribute with its comment: behind it if the line has room, else above."""
    attribute = f"    {field.option}: {_sdk_type(field)}"
    comment = described(field)
    if len(line := f"{attribute}  # {comment}") <= LINE:
        return f"{line}\n"
    return f"{comment_lines(comment, '    # ')}{attribute}\n"


def _sdk_type(field: RequestField) -> str:
    if field.http and field.http.form is BodyForm.OBJECT_OR_TEXT:
        return "str | Mapping[str, Any]"
    if field.kind is Kind.ENUM:
        return " | ".join(sorted({type(value).__name__ for value in field.values or {}}))
    return SDK_TYPES[field.kind]


def described(field: RequestField) -> str:
    """The meaning, limits and default of a field in one text."""
    limits = limits_of(replace(field, high=None) if field.high and field.high >= MAX_UINT32 else field)
    words = [field.doc]
    words += [f"{limits[0].upper()}{limits[1:]}."] if limits and limits != "at least 0" else []
    if field.default not in (None, ""):
        number = isinstance(field.default, float)
        words.append(f"Default {f'{field.default:g}' if number else str(field.default).lower()}.")
    return " ".join(words)


def comment_lines(text: str, mark: str) -> str:
    """A comment whose lines begin with `mark`."""
    lines = textwrap.wrap(text, LINE, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def limits_of(field: RequestField) -> str:
    """Range and sizes of a field."""
    limits = [] if field.kind is Kind.ENUM or field.low is None else [field.allowed]
    counts = ", ".join(f"{name} {high}" for name, high in (field.counts or {}).items())
    limits += [f"at most {counts}"] if counts else []
    limits += [f"at most {field.max_items} items"] if field.max_items else []
    limits += [f"1 to {field.max_chars} characters each"] if field.max_chars else []
    limits += [f"at most {_size(field.max_bytes)}"] if field.max_bytes else []
    return ", ".join(limits)


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes" if num_bytes % 1024 else f"{num_bytes >> 10} KiB"


def _docstring(text: str) -> Iterator[str]:
    if len(line := f'    """{text}"""') <= LINE:
        yield line
        return
    wrapped = textwrap.wrap(text, LINE, initial_indent='    """', subsequent_indent="    ", break_on_hyphens=False)
    yield from (*wrapped, '    """')


def generate() -> None:
    protocol = Protocol()
    texts = {module.path: source(module, protocol) for module in MODULES}
    for path, text in (texts | {"client/quire_client/options.py": options_source()}).items():
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            print(f"generated {path}")


if __name__ == "__main__":
    generate()
