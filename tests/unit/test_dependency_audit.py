"""scripts/audit.py: advisories that concern locked versions are found, and a missing source is not a clean result."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
audit = importlib.util.module_from_spec(spec)
sys.modules["audit"] = audit
spec.loader.exec_module(audit)

# An advisory in the form that OSV publishes.
ADVISORY = {
    "id": "PYSEC-2026-1",
    "aliases": ["CVE-2026-1", "GHSA-1"],
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Jinja2", "purl": "pkg:pypi/jinja2"},
            "ranges": [
                {"type": "GIT", "repo": "https://example.org", "events": [{"introduced": "0"}]},
                {"type": "ECOSYSTEM", "events": [{"introduced": "3"}, {"fixed": "3.1.6"}]},
            ],
            "versions": ["3.0.0", "3.1.5"],
        },
        {"package": {"ecosystem": "npm", "name": "grpcio"}, "versions": ["1.0.0"]},
    ],
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lock.txt").write_text(
        "# a note\njinja2==3.1.5 ; sys_platform != 'win32'\ngrpcio==1.0.0 \\\n    --hash=x\n"
    )
    (tmp_path / "advisories").mkdir()
    (tmp_path / "advisories" / "1.json").write_text(json.dumps(ADVISORY))
    return tmp_path


def run(files, capsys, *flags, source="advisories"):
    words = ["--locks", str(files / "lock.txt"), *flags]
    words += ["--advisories", str(files / source)] if source else []
    code = audit.main(words)
    return code, capsys.readouterr()


def test_an_advisory_about_a_locked_version_is_a_finding(files, capsys):
    code, said = run(files, capsys)
    assert code == 1
    assert said.out == (
        "jinja2 3.1.5: PYSEC-2026-1, CVE-2026-1, GHSA-1; fixed in 3.1.6\naudited 2 versions: 1 findings\n"
    )
    assert run(files, capsys, "--accept", "CVE-2026-1")[0] == 0
    (files / "lock.txt").write_text("jinja2==3.1.6\n")
    code, said = run(files, capsys)
    assert (code, said.out) == (0, "audited 1 versions: no findings\n")


@pytest.mark.parametrize(
    ("events", "affected"),
    [
        ([{"introduced": "0"}], "1.0 2.0 3.0"),
        ([{"introduced": "0"}, {"fixed": "2.0"}], "1.0"),
        ([{"introduced": "2.0"}, {"last_affected": "2.0"}], "2.0"),
        ([{"introduced": "0"}, {"fixed": "1.5"}, {"introduced": "2.5"}], "1.0 3.0"),
        ([{"fixed": "10.0"}, {"introduced": "2.0"}], "2.0 3.0"),
    ],
)
def test_ranges(events, affected):
    assert " ".join(text for text in ("1.0", "2.0", "3.0") if audit.is_within(Version(text), events)) == affected


@pytest.mark.parametrize("content", ["no json", "[]", '{"affected": [{}]}'])
def test_a_file_that_is_not_an_advisory_is_an_error(files, capsys, content):
    (files / "advisories" / "2.json").write_text(content)
    code, said = run(files, capsys)
    assert code == 2
    assert "2.json: not an advisory in OSV's format" in said.err


def answer(**dependency):
    return json.dumps({"dependencies": [{"name": "jinja2", "version": "3.1.5", "vulns": [], **dependency}]})


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "words"),
    [
        ("", "requests.exceptions.ConnectionError: no such host", 0, "skipped: OSV does not answer: requests"),
        (answer(skip_reason="not found"), "", 0, "skipped: OSV was not asked about jinja2: not found"),
        (answer(), "", 0, "audited 2 versions: no findings"),
        (
            answer(vulns=[{"id": "GHSA-1", "aliases": ["CVE-2026-1"], "fix_versions": ["3.1.6"]}]),
            "",
            1,
            "jinja2 3.1.5: GHSA-1, CVE-2026-1; fixed in 3.1.6",
        ),
    ],
)
def test_answers_of_pip_audit(files, capsys, monkeypatch, stdout, stderr, code, words):
    done = audit.subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(audit.subprocess, "run", lambda *args, **kwargs: done)
    found, said = run(files, capsys, source=None)
    assert found == code
    assert words in said.out


def test_every_lock_of_the_project_is_audited():
    packages = audit.locked([ROOT / name for name in audit.LOCKS])
    assert {"grpcio", "torch", "starlette", "cryptography", "pytest"} <= packages.keys()
