"""A policy linter at its strictest level: every failed check of the hardened scenario has a reason here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.chart import CHART, ROOT, Values, read_values, render
from tests.chart.test_values import merged

CHECKOV = Path(os.environ.get("CHECKOV_VENV", ROOT / ".checkov")) / "bin" / "checkov"

DIGEST = f"@sha256:{'0' * 64}"
# The choices of a strict platform that are not our defaults: images by digest, always pulled, and limits of CPU time.
STRICT: Values = {
    "image": {"registry": "registry.example.com", "pullPolicy": "Always"},
    "gateway": {"image": f"registry.example.com/quire-gateway{DIGEST}", "resources": {"limits": {"cpu": "2"}}},
    "scheduler": {"image": f"registry.example.com/quire-scheduler{DIGEST}", "resources": {"limits": {"cpu": "2"}}},
    "workerDefaults": {"image": f"registry.example.com/quire-worker{DIGEST}", "resources": {"limits": {"cpu": "2"}}},
    "redis": {"resources": {"limits": {"cpu": "1"}}},
    "test": {"resources": {"limits": {"cpu": "1"}}},
}
TEST_POD = "Pod.team.r-quire-test"
ACCEPTED = {
    ("CKV_K8S_8", TEST_POD): "`helm test` runs to its end; a probe would restart it",
    ("CKV_K8S_9", TEST_POD): "`helm test` serves nothing",
    ("CKV2_K8S_6", TEST_POD): "`helm test` has no port",
    ("CKV_K8S_35", "Deployment.team.r-quire-redis"): "Valkey takes its password from its command line or configuration",
}


@pytest.mark.deep
@pytest.mark.skipif(
    not CHECKOV.exists(), reason="no checkov: scripts/install_checkov installs it, as make test-deep does"
)
def test_the_policy_linter_finds_only_what_is_accepted_with_a_reason(tmp_path: Path) -> None:
    objects = render(merged(read_values(CHART / "ci" / "hardened-values.yaml"), STRICT))
    (tmp_path / "objects.yaml").write_text(yaml.dump_all(objects.manifests))
    command = [str(CHECKOV), "--file", str(tmp_path / "objects.yaml"), "--framework", "kubernetes", "--output", "json"]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    failed = {(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]}
    assert report["summary"]["passed"] > 300
    assert failed == ACCEPTED.keys()
