"""Generates files of the chart from other files:

    values.yaml -> quire/values.schema.json (types, descriptions) and the table in quire/README.md

    python deploy/k8s/generate.py               write them
    python deploy/k8s/generate.py --check       list outdated files; exit status 1 if there are any
    python deploy/k8s/generate.py --base FOLDER render the chart as a kustomize base, for use without Helm

The comment of a value is its description. Its type is the type of the default. A comment line `@schema {...}` adds to
the schema. A value whose `@schema` has a `$ref` or `additionalProperties` is one value, not a section.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

HERE = Path(__file__).resolve().parent
CHART = HERE / "quire"
TABLE_BEGIN, TABLE_END = "<!-- values: written by deploy/k8s/generate.py -->\n", "<!-- end of values -->\n"
MARK = "@schema "
NAMESPACE = "default"  # the namespace in which the base is rendered
# Files cannot hold tokens and passwords, so the base refers to Secrets that the user creates (docs/deployment.md).
BASE_VALUES = {"trust": {"existingSecret": "quire-tokens"}, "redis": {"auth": {"existingSecret": "quire-redis"}}}
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")

FREE: dict[str, Any] = {"type": "object", "additionalProperties": True}


def resources(*types: str) -> dict[str, Any]:
    """Requests and limits, with amounts of these types."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            kind: {
                "type": "object",
                "description": f"Resource {kind}, in Kubernetes syntax.",
                "additionalProperties": {"type": list(types)},
            }
            for kind in ("requests", "limits")
        }
        | {
            "claims": {
                "type": "array",
                "description": "Names of resourceClaims that the container uses.",
                "items": FREE,
            }
        },
    }


DEFINITIONS: dict[str, Any] = {
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "object": FREE,
    "objects": {"type": "array", "items": FREE},
    "quantity": {"type": "string"},  # checked by a template, whose error says what to write
    "name": {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?)?$"},
    "resources": resources("string", "number", "null"),
}

# null in a list entry removes a key of the defaults. Elsewhere Helm removes it before it validates the schema.
IN_ENTRIES = {
    "strings": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
}


@dataclass(frozen=True, slots=True)
class Value:
    """One value of values.yaml. A section has `children`."""

    name: str
    path: str
    default: Any
    comment: str
    extra: dict[str, Any]
    children: tuple[Value, ...]


def read_values(text: str) -> list[Value]:
    """All values of a values.yaml, with their comments."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_read_mapping(root, text.splitlines(), yaml.safe_load(text), ""))


def _read_mapping(node: yaml.MappingNode, lines: list[str], values: dict[str, Any], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        comment, extra = _comment_above(lines, key.start_mark.line)
        default, path = values[key.value], f"{prefix}{key.value}"
        is_section = isinstance(child, yaml.MappingNode) and not {"$ref", "additionalProperties"} & extra.keys()
        children = tuple(_read_mapping(child, lines, default, f"{path}.")) if is_section else ()
        yield Value(key.value, path, default, comment, extra, children)


def _comment_above(lines: list[str], line: int) -> tuple[str, dict[str, Any]]:
    words, extra = [], {}
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    for text in lines[first:line]:
        text = text.lstrip().removeprefix("#").strip()
        if text.startswith(MARK):
            extra = yaml.safe_load(text.removeprefix(MARK))
        else:
            words.append(text)
    return " ".join(words), extra


def leaves(values: list[Value] | tuple[Value, ...]) -> Iterator[Value]:
    """Values that are not sections, in the order of the file."""
    for value in values:
        if value.children:
            yield from leaves(value.children)
        else:
            yield value


# -- schema ------------------------------------------------------------------------------------------------------------


def make_schema(values: list[Value]) -> dict[str, Any]:
    """The JSON schema of all values (draft 7, which all versions of Helm support)."""
    by_name = {value.name: value for value in values}
    definitions = DEFINITIONS | {f"{name}InEntries": schema for name, schema in IN_ENTRIES.items()}
    definitions |= {
        "model": _item_schema(by_name["modelDefaults"], required=("name",)),
        "pool": _item_schema(by_name["workerDefaults"], required=("name", "model")),
        "schedulerOverride": _object_schema(by_name["scheduler"].children, is_entry=True),
    }
    schema = _object_schema(values)
    schema["properties"]["global"] = FREE | {"description": "Set by Helm if this chart is a subchart."}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": definitions} | schema


def _item_schema(defaults: Value, required: tuple[str, ...]) -> dict[str, Any]:
    schema = _object_schema(defaults.children, is_entry=True)
    for name in required:
        schema["properties"][name] = {"type": "string", "minLength": 1, "description": _text(defaults, name)} | (
            {"pattern": DEFINITIONS["name"]["pattern"]} if name == "name" else {}
        )
    return schema | {"required": list(required)}


def _text(section: Value, name: str) -> str:
    return next(value.comment for value in section.children if value.name == name)


def _object_schema(values: list[Value] | tuple[Value, ...], *, is_entry: bool = False) -> dict[str, Any]:
    properties = {value.name: _value_schema(value, is_entry=is_entry) for value in values}
    # null removes a value, and templates read all of them. In an entry it only removes what the defaults have again.
    required = [value.name for value in values if not is_entry and "null" not in _types(properties[value.name])]
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": required} if required else {})


def _types(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _value_schema(value: Value, *, is_entry: bool) -> dict[str, Any]:
    described = {"description": value.comment or f"Values of {value.path}."}
    if value.children:
        return described | _object_schema(value.children, is_entry=is_entry)
    if "$ref" in value.extra:
        in_entries = is_entry and value.extra["$ref"].rpartition("/")[2] in IN_ENTRIES
        return described | value.extra | ({"$ref": f"{value.extra['$ref']}InEntries"} if in_entries else {})
    return described | {"type": type_name(value)} | value.extra


def type_name(value: Value) -> str:
    """The JSON type name of a value."""
    if "$ref" in value.extra:
        name = value.extra["$ref"].rpartition("/")[2]
        return str(DEFINITIONS.get(name, {"type": "object"})["type"])
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value.default)]


# -- README, kustomize -------------------------------------------------------------------------------------------------


def make_table(values: list[Value]) -> str:
    """The table of the README."""
    rows = ["| value | type | default | meaning |", "| --- | --- | --- | --- |"]
    for value in leaves(values):
        default = json.dumps(value.default).replace("|", "\\|")
        rows.append(f"| `{value.path}` | {type_name(value)} | `{default}` | {value.comment.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def make_readme(values: list[Value]) -> str:
    """README.md with a new table."""
    text = (CHART / "README.md").read_text()
    head, _, rest = text.partition(TABLE_BEGIN)
    return head + TABLE_BEGIN + make_table(values) + TABLE_END + rest.partition(TABLE_END)[2]


def make_base() -> dict[str, str]:
    """Files of a kustomize base: the chart with `BASE_VALUES`, one file per object, without a namespace."""
    with Chart.load(CHART) as chart:
        rendered = chart.render(BASE_VALUES, name="quire", namespace=NAMESPACE)
    files = {}
    for path, text in rendered.items():
        if path.endswith(".txt") or "/tests/" in path:
            continue
        for manifest in filter(None, yaml.safe_load_all(text)):
            files[f"{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml"] = _dump(_anywhere(manifest))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(files),
    }
    return files | {"kustomization.yaml": _dump(kustomization)}


def _anywhere(manifest: Any) -> Any:
    """Removes Helm's labels and the namespace: overlays set one, and short names resolve in a pod's own namespace."""
    if isinstance(manifest, list):
        return [_anywhere(item) for item in manifest]
    if isinstance(manifest, str):
        return manifest.replace(f".{NAMESPACE}.svc.cluster.local", "")
    if not isinstance(manifest, dict):
        return manifest
    return {key: _anywhere(item) for key, item in manifest.items() if key not in (*HELM_LABELS, "namespace")}


def _dump(document: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, width=120))


def chart_files() -> dict[Path, str]:
    """Generated files in the chart, with their contents."""
    values = read_values((CHART / "values.yaml").read_text())
    schema = json.dumps(make_schema(values), indent=2) + "\n"
    return {CHART / "values.schema.json": schema, CHART / "README.md": make_readme(values)}


def stale(wanted: dict[Path, str]) -> list[Path]:
    """The files whose contents differ."""
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]


def update(wanted: dict[Path, str], *, is_check: bool) -> int:
    """Writes outdated files, or only lists them. Returns their number."""
    paths = stale(wanted)
    for path in paths:
        print(f"{'out of date' if is_check else 'written'}: {path}")
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return len(paths)


def main() -> int:
    """Generates the files of the chart, checks them, or renders a kustomize base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="list outdated files without writing; exit status 1 if there are any"
    )
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="write the kustomize base into this folder")
    args = parser.parse_args()
    if args.base is None:
        return 1 if update(chart_files(), is_check=args.check) and args.check else 0
    update({args.base / name: text for name, text in make_base().items()}, is_check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
