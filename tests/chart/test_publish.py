"""The scripts that publish images and chart, with programs that record their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.chart import CHART, ROOT

DIGEST = f"sha256:{'ab' * 32}"
PROGRAMS = {
    "docker": """
while [ $# -gt 0 ]; do
  if [ "$1" = --metadata-file ]; then echo '{"containerimage.digest": "DIGEST"}' >"$2"; fi
  shift
done
""",
    "helm": 'case $1 in package) touch "$4/quire-0.1.0.tgz" ;; push) echo "Digest: DIGEST" ;; esac\n',
    "cosign": "",
    "python3": '[ "$2" != --base ] || mkdir "$3"\n',
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The file of the calls; the programs are in `bin` beside it."""
    (tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path / "calls"}\n{script.replace("DIGEST", DIGEST)}')
        path.chmod(0o755)
    return tmp_path / "calls"


def run(script: str, calls: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ | {"PYTHON": "python3"} | {"PATH": f"{calls.parent / 'bin'}:{os.environ['PATH']}"} | variables
    )
    command = [str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_images_are_pushed_with_sbom_signed_by_digest_and_printed(calls: Path) -> None:
    done = run("publish_images", calls, "reg.example.com/q/", COSIGN_KEY="k.pem")
    assert done.returncode == 0, done.stderr
    names = ["quire-gateway:0.1.0", "quire-scheduler:0.1.0", "quire-worker:0.1.0-cpu", "quire-worker:0.1.0-cuda"]
    redis = yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["image"].removeprefix("docker.io/")
    assert done.stdout.splitlines() == [
        *(f"reg.example.com/q/{n}@{DIGEST}" for n in names),
        f"reg.example.com/q/{redis}",
    ]
    lines = calls.read_text().splitlines()
    builds = [line for line in lines if line.startswith("docker buildx build")]
    assert len(builds) == 4
    assert all("--push --sbom=true --provenance=mode=max" in line for line in builds)
    signed = [line for line in lines if line.startswith("cosign")]
    assert signed[0] == f"cosign sign --yes --key k.pem reg.example.com/q/quire-gateway@{DIGEST}"
    assert len(signed) == 4
    copied, tag = f"docker.io/{redis}", redis.partition("@")[0]
    assert lines[-1] == f"docker buildx imagetools create --tag reg.example.com/q/{tag} {copied}"


def test_the_chart_is_pushed_and_signed_by_digest(calls: Path) -> None:
    done = run("publish_chart", calls, "reg.example.com/q/charts")
    assert (done.returncode, done.stdout) == (0, f"reg.example.com/q/charts/quire@{DIGEST}\n"), done.stderr
    assert calls.read_text().splitlines()[-1] == f"cosign sign --yes reg.example.com/q/charts/quire@{DIGEST}"


@pytest.mark.parametrize("script", ["publish_images", "publish_chart"])
def test_a_failed_push_publishes_nothing(script: str, calls: Path) -> None:
    assert "usage" in run(script, calls).stderr
    for name in ("docker", "helm"):
        (calls.parent / "bin" / name).write_text("#!/bin/sh\nexit 7\n")
    done = run(script, calls, "reg.example.com/q")
    assert done.returncode != 0
    assert "cosign" not in (calls.read_text() if calls.exists() else "")
