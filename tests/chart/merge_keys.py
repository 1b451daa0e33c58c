"""Checks that items of lists have different merge keys: server-side apply and `helm upgrade` identify items by them.

JSON Schema cannot express this, so a validator accepts two variables with one name. The schemas of Kubernetes carry the
keys: `x-kubernetes-list-map-keys`, or `x-kubernetes-patch-merge-key` of older lists.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

DEFAULTS = {"protocol": "TCP"}  # not in the schemas of all versions

Schema = dict[str, Any]


@functools.cache
def _folder(version: str) -> Path:
    """The schemas of the newest patch release of a version such as 1.34."""
    folders = Path(str(files("kubernetes_validate").joinpath("kubernetes-json-schema"))).glob(f"v{version}.*-local")
    return max(folders)


@functools.cache
def _read(path: Path) -> Schema:
    return dict(json.loads(path.read_text()))


def duplicates(manifest: dict[str, Any], version: str) -> list[str]:
    """The lists in which two items have the same merge key, with that key."""
    group = manifest["apiVersion"].partition("/")
    name = group[0].partition(".")[0] + f"-{group[2]}" if group[2] else group[0]
    folder = _folder(version)
    schema = _read(folder / f"{manifest['kind'].lower()}-{name}.json")
    return list(_walk(manifest, schema, _read(folder / "_definitions.json"), manifest["kind"]))


def _walk(value: Any, schema: Schema, definitions: Schema, path: str) -> Iterator[str]:
    schema = _resolved(schema, definitions)
    if isinstance(value, list):
        yield from _same_keys(value, schema, path)
        for i, item in enumerate(value):
            yield from _walk(item, schema.get("items", {}), definitions, f"{path}.{i}")
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _walk(child, schema.get("properties", {}).get(key, {}), definitions, f"{path}.{key}")


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    while "$ref" in schema:
        schema = definitions["$defs"][schema["$ref"].rpartition("/")[2]] | {
            k: v for k, v in schema.items() if k != "$ref"
        }
    return schema


def _same_keys(items: list[Any], schema: Schema, path: str) -> Iterator[str]:
    keys = schema.get("x-kubernetes-list-map-keys") or list(filter(None, [schema.get("x-kubernetes-patch-merge-key")]))
    seen = set()
    for item in items if keys else []:
        found = tuple(item.get(key, DEFAULTS.get(key)) for key in keys)
        if found in seen:
            yield f"{path} has two items with {', '.join(f'{k} {v}' for k, v in zip(keys, found, strict=True))}"
        seen.add(found)
