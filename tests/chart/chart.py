"""Renders the chart with Helm's own library and validates the result as an API server would."""

from __future__ import annotations

import functools
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from helm_python.chart import Chart

from svc_common.security.trust import ROLES
from tests.chart.custom_resources import SCHEMAS
from tests.chart.merge_keys import duplicates

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "k8s" / "quire"
SCENARIOS = sorted(CHART.glob("ci/*-values.yaml"))
VERSIONS = ("1.30", "1.32", "1.34", "1.36")
RELEASE, NAMESPACE = "r", "team"

FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if it is available


class Loader(FastLoader):
    """Refuses duplicate keys, as an API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        keys = [key.value for key, _ in node.value]
        if len(keys) > len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key: {keys}", node.start_mark)
        return dict(super().construct_mapping(node, deep))


# Without the cache every call reads two schema files, which takes longer than the validation.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

Values = dict[str, Any]
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one rendering."""

    manifests: tuple[Manifest, ...]
    notes: str

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def get(self, kind: str, name: str) -> Manifest:
        """The object with this name after the release prefix: `get("Deployment", "gateway")`."""
        return next(m for m in self.all(kind) if m["metadata"]["name"] == f"{RELEASE}-quire-{name}")

    def has(self, kind: str) -> bool:
        return bool(self.all(kind))

    def pods(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Every workload with the metadata and spec of its pods."""
        for manifest in self.manifests:
            if manifest["kind"] in ("Deployment", "StatefulSet"):
                yield manifest, manifest["spec"]["template"]
            elif manifest["kind"] == "LeaderWorkerSet":
                yield from ((manifest, template) for template in templates_of(manifest))
            elif manifest["kind"] == "Pod":
                yield manifest, manifest


@functools.cache
def loaded_chart() -> Chart:
    """Charts do not change after loading."""
    return Chart.load(CHART)


LOOKUP = 'lookup "v1" "Secret" $.Release.Namespace '


@functools.cache
def chart_of_upgrade() -> Chart:
    """The chart with `lookup`, which needs a cluster, replaced by the Secrets in the value global.secrets."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(CHART, Path(folder) / "chart"))
        for name in ("trust-secrets.yaml", "redis-secret.yaml"):
            template = copy / "templates" / name
            text = template.read_text()
            assert text.count("lookup") == text.count(LOOKUP) == 1
            template.write_text(text.replace(LOOKUP, "get $.Values.global.secrets "))
        return Chart.load(copy)


def render_upgrade(values: Values, before: Objects) -> Objects:
    """The objects of an upgrade in a cluster that has the Secrets of the release before."""
    # `lookup` returns an empty map if the object does not exist.
    missing: Values = {f"{RELEASE}-quire-{name}": {} for name in (*(f"tokens-{role}" for role in ROLES), "redis")}
    secrets = missing | {manifest["metadata"]["name"]: manifest for manifest in before.all("Secret")}
    return render(values | {"global": {"secrets": secrets}}, chart=chart_of_upgrade())


def render(
    values: Values | None = None, *, name: str = RELEASE, namespace: str = NAMESPACE, chart: Chart | None = None
) -> Objects:
    """The objects of a release. Raises HelmError with Helm's message."""
    rendered = (chart or loaded_chart()).render(values or {}, name=name, namespace=namespace)
    notes = next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))
    texts = [text for path, text in rendered.items() if not path.endswith(".txt")]
    return Objects(tuple(m for text in texts for m in pickle.loads(_documents(text))), notes)


@functools.lru_cache(maxsize=1000)
def _documents(text: str) -> bytes:
    """The documents of a file, pickled: most files are the same in most renderings, and parsing them takes long."""
    return pickle.dumps([document for document in yaml.load_all(text, Loader) if document])


def program(name: str) -> str:
    """A command installed beside this Python, independent of PATH."""
    return str(Path(sys.executable).with_name(name))


def read_values(path: Path) -> Values:
    return dict(yaml.safe_load(path.read_text()))


def templates_of(manifest: Manifest) -> list[Manifest]:
    """The pod templates of a LeaderWorkerSet: of the leader, of the others. Other kinds have none."""
    if manifest["kind"] != "LeaderWorkerSet":
        return []
    templates = manifest["spec"]["leaderWorkerTemplate"]
    return [templates["leaderTemplate"], templates["workerTemplate"]]


def validate(manifest: Manifest, version: str) -> None:
    """Validates as an API server of this version would: unknown fields, and items of a list with one merge key, are
    refused. Raises ValidationError or ValueError.
    """
    custom = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if custom is not None:
        jsonschema.validate(manifest, custom)
        for template in templates_of(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
            validate(pod, version)
        return
    kubernetes_validate.validate(manifest, version, strict=True)
    if found := duplicates(manifest, version):
        raise ValueError("; ".join(found))


def dig(document: Any, path: str) -> Any:
    """The element at a path such as `spec.containers.0.args`; KeyError or IndexError if it does not exist."""
    for part in path.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part.replace("~", ".")]
    return document
