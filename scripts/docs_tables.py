"""Writes the tables of docs/, from the table of request fields also the comments of parameters in the protocol, and the
services' flags for `quire up`. `--check`: only report outdated files.

A table is the text between `<!-- NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import math
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import quire_client
from budget import code_lines
from gen_types import comment_lines, described, limits_of
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from quire.v1 import inference_pb2, session_pb2
from quire_client import errors as sdk_errors

import gateway_svc.flags
import gateway_svc.metrics
import scheduler_svc.flags
import scheduler_svc.metrics
import worker_svc.flags
import worker_svc.metrics
from gateway_svc.http.fields import ENDPOINTS, BodyField
from gateway_svc.text.reasoning import REASONING_FORMATS
from gateway_svc.text.tool_formats import TOOL_FORMATS
from request_fields.fields import BY_PATH, FIELDS, Field
from request_fields.parameters import NOT_WITH_BEAMS
from svc_common.config import FlagKind, allowed_values, environment_name, make_parser, settings_of
from svc_common.observe.metrics import COMMON, PREFIX, Spec
from worker_svc.engine.checkpoint.families import ARCHITECTURES
from worker_svc.engine.checkpoint.features import FEATURES, OF_BACKEND, features_of
from worker_svc.engine.checkpoint.quantization_config import FORMATS
from worker_svc.engine.encoder.families import ENCODERS
from worker_svc.engine.encoder_decoder.config import CROSS_ATTENTION, ENCODER_DECODERS

ROOT = Path(__file__).resolve().parents[1]
PARSERS = {
    "all": make_parser("all", ""),
    "gateway": gateway_svc.flags.make_parser(),
    "scheduler": scheduler_svc.flags.make_parser(),
    "worker": worker_svc.flags.make_parser(),
}
PARAMETERS = {  # message -> prefix of the paths of its fields
    "SamplingParams": "sampling.",
    "StopParams": "stop.",
    "OutputParams": "output.",
    "SchedulingParams": "scheduling.",
    "GenerateRequest": "",
}
PROTOS = [ROOT / "protos/quire/v1" / name for name in ("types.proto", "inference.proto")]
FLAGS_OF_SERVICES = ROOT / "client/quire_cli/stack/service_flags.json"
SPECS = {
    "every": COMMON,
    "gateway": gateway_svc.metrics.SPECS,
    "scheduler": scheduler_svc.metrics.SPECS,
    "worker": worker_svc.metrics.SPECS,
}


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def settings_rows() -> Iterator[list[str]]:
    """One row per setting and service. Settings that all services have are listed once, at the start."""
    common = {name for name, _ in settings_of(PARSERS["all"])}
    for service, parser in PARSERS.items():
        for name, action in settings_of(parser):
            if service == "all" or name not in common:
                yield [
                    f"`--{name}`",
                    f"`{environment_name(name)}`",
                    service,
                    _default_of(action),
                    allowed_values(action).replace("|", r"\|"),
                    (action.help or "").replace("%%", "%") + (" **Required.**" if action.required else ""),
                ]


def _default_of(action: argparse.Action) -> str:
    if action.default is None or action.default == []:
        return ""
    return f"`{str(action.default).lower() if isinstance(action.default, bool) else action.default}`"


def flags_of_services() -> str:
    """The flags of the services as JSON, one per line, for `quire up`, which imports no service."""
    flags: dict[str, dict[str, Any]] = {}
    for service in ("gateway", "scheduler", "worker"):
        for name, action in settings_of(PARSERS[service]):
            row = flags.setdefault(name, {"name": name, "services": [], **_flag_fields(action)})
            row["services"].append(service)
    return "[\n" + ",\n".join(json.dumps(row) for row in flags.values()) + "\n]\n"


def _flag_fields(action: argparse.Action) -> dict[str, Any]:
    """A flag's settings for argparse, as JSON. Ranges are checked by `quire up`, other values by the service."""
    default = "" if action.default in (None, [], False, "") else f" (default: {action.default})"
    fields: dict[str, Any] = {"help": f"{action.help}{default}"}
    if action.nargs == 0:
        return fields | {"is_switch": True}
    if action.choices is not None:
        fields["choices"] = list(action.choices)
    elif isinstance(action.type, FlagKind) and action.type.metavar in ("N", "X", "SIZE"):
        fields |= _checked_type(action.type)
    if action.metavar is not None:
        fields["metavar"] = action.metavar
    return fields | ({"is_list": True} if action.default == [] else {})


def _checked_type(kind: FlagKind[Any]) -> dict[str, Any]:
    if kind.metavar == "SIZE":
        return {"type": "size"}
    name, number = ("int", int) if kind.metavar == "N" else ("float", float)
    low, high = map(number, kind.allowed.split(" to "))
    return {} if high == math.inf else {"type": name, "range": [low, high]}


def metrics_rows(specs: Sequence[Spec]) -> Iterator[list[str]]:
    """One row per metric."""
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        compat = ", ".join(f"`vllm:{name}`" for name in spec.vllm)
        yield [f"`{PREFIX}{spec.name}`", spec.kind, spec.unit, labels, spec.meaning, compat]


def field_rows() -> Iterator[list[str]]:
    """One row per request field."""
    for field in FIELDS:
        yield [
            f"`{field.path}`",
            f"`{field.option}`",
            f"`--{field.option.replace('_', '-')}`" if field.has_flag or field.name == "n" else "",
            field.kind.value,
            _default_of_field(field),
            limits_of(field),
            ", ".join((side.name or "").lower() for side in field.applied_by),
            field.resume.value,
            field.doc,
        ]


def _default_of_field(field: Field) -> str:
    default = "" if field.default in (None, "") else f"`{str(field.default).lower()}`"
    return f"generation_config, else {default}" if field.config_key else default


def commented_proto(path: Path) -> str:
    """A file of the protocol with the comments of parameters from the table."""
    lines: list[str] = []
    message = ""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if found := re.match(r"message (\w+) {", line):
            message = found[1]
        found = re.match(r"  (?:optional |repeated )?[\w.]+(?:<.*>)? (\w+) = \d+;", line)
        field = BY_PATH.get(PARAMETERS[message] + found[1]) if found and message in PARAMETERS else None
        if field:
            while lines[-1].startswith("  //"):
                lines.pop()
            lines.append(comment_lines(described(field), "  // "))
        lines.append(line)
    return "".join(lines)


def message_rows() -> Iterator[list[str]]:
    """One row per field of a request message that is not a parameter, with the comment of the protocol."""
    comments = _comments()
    for message in _request_messages():
        for field in message.fields:
            if PARAMETERS.get(message.name, "") + field.name not in BY_PATH:
                yield [f"`{message.name}`", f"`{field.name}`", comments[message.name, field.name]]


def _request_messages() -> list[Any]:
    """Descriptors of the messages that clients send, each once: requests, then the messages in them."""
    files = inference_pb2.DESCRIPTOR, session_pb2.DESCRIPTOR
    services = [service for file in files for service in file.services_by_name.values()]
    found = [method.input_type for service in services for method in service.methods]
    for message in found:  # grows while it is read
        found += [field.message_type for field in message.fields if field.message_type]
    names = {message.full_name: message for message in found if not message.GetOptions().map_entry}
    return list(names.values())


def _comments() -> dict[tuple[str, str], str]:
    """The comment of each field of the public protocol, by message and field."""
    from grpc_tools import protoc  # slow to import

    with tempfile.NamedTemporaryFile() as out:
        flags = [f"-I{ROOT / 'protos'}", "--include_source_info", f"--descriptor_set_out={out.name}"]
        if protoc.main(["protoc", *flags, *(f"quire/v1/{name}.proto" for name in ("inference", "session", "types"))]):
            raise RuntimeError("protoc failed")
        files = FileDescriptorSet.FromString(out.read()).file
    comments: dict[tuple[str, str], str] = {}
    for file in files:
        texts = {tuple(at.path): " ".join(at.leading_comments.split()) for at in file.source_code_info.location}
        for i, message in enumerate(file.message_type):
            for j, field in enumerate(message.field):
                comments[message.name, field.name] = texts[4, i, 2, j]
    return comments


def body_rows(rows: Sequence[BodyField]) -> Iterator[list[str]]:
    """One row per supported field of a body. Type, limits and meaning of a parameter come from its request field."""
    for row in rows:
        field = BY_PATH.get(row.path)
        if row.is_served and field is None:
            yield [f"`{row.name}`", "", "", "", row.doc]
        elif row.is_served and field is not None:
            meaning = " ".join(words for words in (field.doc, row.doc) if words)
            yield [f"`{row.name}`", f"`{row.path}`", field.kind.value, limits_of(field), meaning]


def refused_body_rows() -> Iterator[list[str]]:
    """One row per unsupported field of a body."""
    names: dict[str, tuple[str, list[str]]] = {}
    for endpoint, rows in ENDPOINTS.items():
        for row in rows:
            if not row.is_served:
                accepted = ", ".join(f"`{json.dumps(value)}`" for value in row.only or ())
                names.setdefault(row.name, (accepted, []))[1].append(endpoint)
    for name, (accepted, endpoints) in names.items():
        yield [f"`{name}`", accepted, ", ".join(f"`{endpoint}`" for endpoint in endpoints)]


def architecture_rows() -> Iterator[list[str]]:
    """One row per architecture, with what each backend computes of it."""
    for name, row in ARCHITECTURES.items():
        needed = features_of(row)
        what = ", ".join(FEATURES[feature] for feature in sorted(needed | row.may_need))
        yield [f"`{name}`", row.models, what, *(_served(backend, needed, row.may_need) for backend in OF_BACKEND)]
    for name, family in ENCODER_DECODERS.items():
        served = (_served(backend, {CROSS_ATTENTION}, set()) for backend in OF_BACKEND)
        yield [f"`{name}`", family.models, FEATURES[CROSS_ATTENTION], *served]
    for name, family in ENCODERS.items():
        served = (_served(backend, {"encoder"}, set()) for backend in OF_BACKEND)
        yield [f"`{name}Model`", family.models, FEATURES["encoder"], *served]


def quantization_rows() -> Iterator[list[str]]:
    """One row per format of quantized checkpoints."""
    for method, *cells in FORMATS:
        yield [f"`{method}`", *cells]


def spine_rows(names: Sequence[str]) -> Iterator[list[str]]:
    """One row per file of the spine: its lines of code, and the first sentence of its docstring."""
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        head = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".:")
        yield [f"[{name}](../{name})", str(len(code_lines(text))), head.replace("|", r"\|")]


def tool_format_rows() -> Iterator[list[str]]:
    """One row per format of tool calls."""
    for one in TOOL_FORMATS.values():
        example = one.example if one.example.startswith("the ") else f"`{one.example}`"
        yield [_names(one.name, one.aliases), one.models, example.replace("|", r"\|")]


def sdk_call_rows(kind: type) -> Iterator[list[str]]:
    """One row per public method and property of a class of the SDK, and for the client one of its constructor."""
    if kind is quire_client.AsyncClient:
        yield [f"`{kind.__name__}{_signature(kind)}`", _summary(kind)]
    for name, member in vars(kind).items():
        is_property = isinstance(member, property)
        found = member.fget if is_property else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(found):
            continue
        shown = _signature(found).replace("() ", " ", is_property)
        yield [f"`{'await ' if inspect.iscoroutinefunction(found) else ''}{name}{shown}`", _summary(found)]


def sdk_result_rows() -> Iterator[list[str]]:
    """One row per public dataclass of the SDK."""
    for name in quire_client.__all__:
        if dataclasses.is_dataclass(kind := getattr(quire_client, name)):
            fields = ", ".join(f"{field.name}: {field.type}" for field in dataclasses.fields(kind))
            yield [f"`{name}`", f"`{fields}`".replace("|", r"\|"), _summary(kind)]


def sdk_error_rows() -> Iterator[list[str]]:
    """One row per error of the SDK, as in the table of its module."""
    for depth, name, code, meaning in re.findall(
        r"^( *)(\w+) {2,}(?:([A-Z_]{5,}(?: and others)?) )? *(.*)$", str(sdk_errors.__doc__), re.M
    ):
        yield [f"{'&nbsp;' * len(depth)}`{name}`", code and f"`{code}`", meaning]


def _signature(function: Any) -> str:
    """The parameters and the result as in the source, with escaped bars."""
    text = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")
    return re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", text).replace("|", r"\|").replace(" -> None", "")


def _summary(documented: Any) -> str:
    """The first paragraph of a docstring, and the errors that the others name."""
    first, _, rest = (documented.__doc__ or "").partition("\n\n")
    raised = re.findall(r"Raises [^.]*\.", rest)
    return " ".join(" ".join([first, *raised]).split()).replace("|", r"\|")


def reasoning_format_rows() -> Iterator[list[str]]:
    """One row per format of reasoning."""
    for one in REASONING_FORMATS.values():
        yield [_names(one.name, one.aliases), one.models, f"`{one.start}...{one.end}`".replace("|", r"\|")]


def _names(name: str, aliases: Sequence[str]) -> str:
    return ", ".join(f"`{one}`" for one in (name, *aliases))


def _served(backend: str, needed: Set[str], may_need: Set[str]) -> str:
    features = OF_BACKEND[backend]
    if needed - features:
        return "no"
    missing = [FEATURES[feature] for feature in sorted(may_need - features)]
    return f"yes, without {' and '.join(missing)}" if missing else "yes"


def written() -> dict[Path, str]:
    """Text of each generated file."""
    return pages() | {path: commented_proto(path) for path in PROTOS} | {FLAGS_OF_SERVICES: flags_of_services()}


def pages() -> dict[Path, str]:
    """Text of each page, with its tables generated."""
    settings = table(("flag", "environment", "service", "default", "allowed", "meaning"), settings_rows())
    head = ("metric", "type", "unit", "labels", "meaning", "vLLM's name")
    tables = {"settings": settings} | {
        f"metrics of {service}": table(head, metrics_rows(specs)) for service, specs in SPECS.items()
    }
    head = ("field", "SDK option", "flag", "type", "default", "limits", "applied by", "rebuilt on resume", "meaning")
    tables["request fields"] = table(head, field_rows())
    tables["not with beams"] = "  " + ", ".join(f"`{path}`" for path in NOT_WITH_BEAMS)
    tables["message fields"] = table(("message", "field", "meaning"), message_rows())
    head = ("field", "request field", "type", "limits", "meaning")
    tables |= {f"fields of {endpoint}": table(head, body_rows(rows)) for endpoint, rows in ENDPOINTS.items()}
    tables["refused body fields"] = table(("field", "value that is accepted", "endpoints"), refused_body_rows())
    tables["architectures"] = table(("architecture", "models", "needs", *OF_BACKEND), architecture_rows())
    tables["quantized checkpoints"] = table(
        ("`quant_method`", "read", "computed by `cpu` and `reference`", "computed by `cuda`"), quantization_rows()
    )
    head = ("`--tool-parser`", "models", "a call")
    tables["tool formats"] = table(head, tool_format_rows())
    tables["reasoning formats"] = table(("`--reasoning-parser`", "models", "reasoning"), reasoning_format_rows())
    for kind in (quire_client.AsyncClient, quire_client.AsyncSession, quire_client.AsyncGenerateStream):
        tables[f"sdk {kind.__name__.lower()}"] = table(("call", "what it does"), sdk_call_rows(kind))
    tables["sdk results"] = table(("class", "fields", "what it is"), sdk_result_rows())
    tables["sdk errors"] = table(("error", "gRPC code", "when"), sdk_error_rows())
    for group, files in tomllib.loads((ROOT / "budget.toml").read_text())["spine"]["files"].items():
        tables[f"spine {group}"] = table(("file", "lines of code", "what it is"), spine_rows(files))
    names = (
        "beam-search.md",
        "chat.md",
        "configuration.md",
        "http.md",
        "metrics.md",
        "models.md",
        "request-fields.md",
        "sdk-reference.md",
        "spine.md",
    )
    paths = [ROOT / "docs" / name for name in names]
    return {path: _fill(path.read_text(encoding="utf-8"), tables) for path in paths}


def _fill(page: str, tables: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z0-9_/ ]+) -->\n.*?<!-- end -->", put, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    is_check = parser.parse_args().check
    texts = written()
    stale = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: run scripts/docs_tables.py' if is_check else 'written'}")
        if not is_check:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
