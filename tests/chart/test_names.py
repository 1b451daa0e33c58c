"""Values that look like other YAML types stay strings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helm_python.chart import Chart

from tests.chart.chart import CHART, VERSIONS, Objects, Values, render, validate
from tests.chart.test_values import NEEDED, merged

OUTSIDE = {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}

LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
PLAIN, PLAIN_TEXT = "plain", "any text"


def named(word: str, text: str) -> Objects:
    """A release in which every free name is `word`, and the served name of the model is `text`."""
    keys = {"existingSecret": word, "key": word}
    pool = {
        "name": word,
        "model": word,
        "backend": word,
        "runtimeClassName": word,
        "priorityClassName": word,
        "shmSize": "1000",
        "podLabels": {"own": word},
        "nodeSelector": {"own": word},
        "topologySpreadConstraints": [{"topologyKey": word, "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
        "schedulerName": word,
        "serviceAccountName": word,
        "labels": {"own": word},
        "annotations": {"own": word},
        "autoscaling": {"enabled": True},
    }
    model = {
        "name": word,
        "servedName": text,
        "path": f"/models/{text}",
        "storage": {"claimSize": "1000", "storageClass": word},
        "download": {"image": word, "command": [word], "existingSecret": word},
    }
    values: Values = {
        "nameOverride": word,
        "fullnameOverride": "full",
        "commonLabels": {"team": word},
        "image": {"tag": word, "pullSecrets": [{"name": word}]},
        "gateway": {
            "image": word,
            "tls": {"existingSecret": word, "clientCaSecret": word, "serverName": word, "caConfigMap": word},
            "apiKeys": {"existingSecret": word, "testEntry": word},
            "records": {"existingSecret": word},
            "jwt": {"issuer": text, "audiences": [text], "jwksUrl": text, "tenantClaim": text, "scope": text},
            "admin": {"enabled": True, "existingSecret": word},
            "keyLimits": {"toml": text},
            "ingress": {"enabled": True, "className": word, "hosts": [word], "tlsSecret": word},
            "http": {
                "enabled": True,
                "allowOrigins": [text],
                "ingress": {"enabled": True, "className": word, "hosts": [word], "tlsSecret": word},
            },
        },
        "trust": {"existingSecret": word},
        "scheduler": {"blockKey": {"existingSecret": word}},
        "test": {"tlsSecret": word, "caEntry": word},
        "models": [model],
        "workers": [pool],
        "redis": {"namespace": word, "auth": keys},
        "serviceAccount": {"name": word},
        "keda": {"enabled": True, "prometheusAddress": "http://p:9090", "authenticationRef": word},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"own": word}}},
        "networkPolicy": {"enabled": True, "egress": {"enabled": True, "extra": [OUTSIDE]}},
    }
    for more in (NEEDED["ROUTE"], NEEDED["RULES"], NEEDED["DASHBOARD"]):
        values = merged(values, more)
    return render(values, name=word, namespace=word)


def renamed(document: Any, names: dict[str, str]) -> Any:
    """The same document with words replaced in all strings."""
    if isinstance(document, dict):
        return {renamed(key, names): renamed(value, names) for key, value in document.items()}
    if isinstance(document, list):
        return [renamed(item, names) for item in document]
    if isinstance(document, str):
        for old, new in names.items():
            document = document.replace(old, new)
    return document


@pytest.mark.parametrize("word", ["7", "1e3", "0x1f", "true", "null", "on"])
def test_names_stay_strings(word: str) -> None:
    text = f"it's {word}: a # name"
    objects = named(word, text)
    for manifest in objects.manifests:
        validate(manifest, VERSIONS[-1])
    expected = renamed(list(named(PLAIN, PLAIN_TEXT).manifests), {PLAIN_TEXT: text, PLAIN: word})
    assert list(objects.manifests) == expected


@pytest.mark.parametrize("url", ["redis://h:1/0 #1", "rediss://h:1/0?a: b"])
def test_addresses_stay_unchanged(url: str) -> None:
    values: Values = {"redis": {"enabled": False, "external": {"url": url}, "namespace": "42"}}
    gateway = render(values).get("Deployment", "gateway")
    variables = {item["name"]: item["value"] for item in gateway["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (variables["QUIRE_REDIS"], variables["QUIRE_REDIS_NAMESPACE"]) == (url, "42")


def test_releases_that_share_a_redis_have_keys_of_their_own() -> None:
    names = set()
    for release in ("one", "two"):
        objects = render({"redis": {"enabled": False, "external": {"url": "redis://h:1/0"}}}, name=release)
        for deployment in objects.all("Deployment"):
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            (name,) = {item["value"] for item in container["env"] if item["name"] == "QUIRE_REDIS_NAMESPACE"}
            names.add((release, name))
    assert len(names) == len({name for _, name in names}) == 2


def test_entries_of_an_external_redis_secret_stay_strings() -> None:
    external = {"existingSecret": "7", "key": "1", "caSecret": "8", "caKey": "true"}
    for manifest in render({"redis": {"enabled": False, "external": external}}).manifests:
        validate(manifest, VERSIONS[-1])


@pytest.mark.parametrize("build", ["1a2b", "a" * 50 + "-b"], ids=["short", "long"])
def test_versions_with_build_metadata_are_valid_labels(tmp_path: Path, build: str) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    about = tmp_path / "chart" / "Chart.yaml"
    about.write_text(re.sub(r"(?m)^(version|appVersion): .*", rf"\1: 0.1.0+{build}", about.read_text()))
    with Chart.load(tmp_path / "chart") as built:
        objects = render(chart=built)
    labels = objects.get("Deployment", "gateway")["metadata"]["labels"]
    assert labels["app.kubernetes.io/version"].startswith("0.1.0_")
    assert labels["helm.sh/chart"].startswith("quire-0.1.0_")
    for manifest in objects.manifests:
        assert [v for v in manifest["metadata"]["labels"].values() if not LABEL.fullmatch(v)] == []
    assert all(f":0.1.0_{build}" in image for image in images(objects) if "valkey" not in image)


def images(objects: Objects) -> list[str]:
    return [container["image"] for _, pod in objects.pods() for container in pod["spec"]["containers"]]


def test_user_labels_occur_once_and_the_most_specific_takes_precedence() -> None:
    part_of, team = "app.kubernetes.io/part-of", "team"
    values: Values = {
        "commonLabels": {part_of: "platform", team: "all"},
        "gateway": {"podLabels": {team: "gateways"}},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {team: "monitors"}}},
    }
    objects = render(values)  # refuses duplicate keys
    assert {manifest["metadata"]["labels"][part_of] for manifest in objects.manifests} == {"platform"}
    assert {pod["metadata"]["labels"][part_of] for _, pod in objects.pods()} == {"platform"}
    assert objects.get("Deployment", "gateway")["metadata"]["labels"][team] == "all"
    assert objects.get("Deployment", "gateway")["spec"]["template"]["metadata"]["labels"][team] == "gateways"
    assert objects.all("ServiceMonitor")[0]["metadata"]["labels"][team] == "monitors"
