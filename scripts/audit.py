"""Compares the locked versions with published advisories. Exit codes: 0 no finding, 1 findings, 2 invalid input.

audit.py                            asks OSV (pip-audit); prints `skipped: REASON` if it does not answer
audit.py --advisories DIR           reads advisories in OSV's JSON format from files instead
audit.py --accept GHSA-... CVE-...  advisories that do not concern Quire; write the reason where you set this
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("packaging/requirements.txt", "deploy/docker/constraints.txt", "constraints-dev.txt")
TIMEOUT_S = 10
TOTAL_TIMEOUT_S = 300


class SourceError(Exception):
    """The source of advisories does not answer, or not about all packages."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One advisory about one locked version."""

    name: str
    version: str
    ids: tuple[str, ...]  # the advisory's id and its aliases
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        remedy = f"fixed in {', '.join(self.fixed)}" if self.fixed else "not fixed yet"
        return f"{self.name} {self.version}: {', '.join(self.ids)}; {remedy}"


def locked(paths: Sequence[Path]) -> dict[str, set[str]]:
    """All versions of each package in the files."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*?\])?==([^\s;]+)", path.read_text(), re.MULTILINE):
            found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def from_osv(packages: dict[str, set[str]]) -> Iterator[Finding]:
    """Ask OSV about every version. Raises SourceError."""
    pairs = sorted((name, version) for name, versions in packages.items() for version in versions)
    rounds = max(map(len, packages.values()), default=0)
    for i in range(rounds):  # pip-audit takes one version of each package
        some = [f"{name}=={sorted(packages[name])[i]}" for name in packages if len(packages[name]) > i]
        for dependency in run_pip_audit(some):
            if "skip_reason" in dependency:
                raise SourceError(f"OSV was not asked about {dependency['name']}: {dependency['skip_reason']}")
            yield from (
                Finding(
                    dependency["name"], dependency["version"], (found["id"], *found["aliases"]),
                    tuple(found["fix_versions"]),
                )
                for found in dependency["vulns"]
            )  # fmt: skip
    print(f"asked OSV about {len(pairs)} versions", file=sys.stderr)


def run_pip_audit(requirements: list[str]) -> list[dict[str, Any]]:
    """pip-audit's answer about each requirement. Raises SourceError."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--timeout", str(TIMEOUT_S)]
        command += ["--format", "json", "--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TOTAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SourceError(f"OSV did not answer within {TOTAL_TIMEOUT_S} s") from None
    try:
        answer: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SourceError(f"OSV does not answer: {last[:300]}") from None
    return answer


def from_files(packages: dict[str, set[str]], source: Path) -> Iterator[Finding]:
    """Findings of advisory files. Raises ValueError for a file that is not an advisory."""
    files = sorted(source.rglob("*.json")) if source.is_dir() else [source]
    if not files:
        raise ValueError(f"--advisories {source}: no .json files")
    for path in files:
        try:
            advisory = json.loads(path.read_text())
            affected = [entry for entry in advisory["affected"] if entry["package"]["ecosystem"] == "PyPI"]
            for entry in affected:
                yield from matches(advisory, entry, packages)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--advisories {path}: not an advisory in OSV's format: {error!r}") from None


def matches(advisory: dict[str, Any], entry: dict[str, Any], packages: dict[str, set[str]]) -> Iterator[Finding]:
    name = canonicalize_name(entry["package"]["name"])
    ids = (advisory["id"], *advisory.get("aliases", ()))
    ranges = [found["events"] for found in entry.get("ranges", ()) if found["type"] == "ECOSYSTEM"]
    fixed = tuple(event["fixed"] for events in ranges for event in events if "fixed" in event)
    for version in sorted(packages.get(name, ())):
        if version in entry.get("versions", ()) or any(is_within(Version(version), events) for events in ranges):
            yield Finding(name, version, ids, fixed)


def is_within(version: Version, events: list[dict[str, str]]) -> bool:
    """OSV's rule: the last event at or before the version decides; `last_affected` ends after its version."""
    is_affected = False
    for event in sorted(events, key=lambda event: _version_of(event)):
        at = _version_of(event)
        if "introduced" in event and version >= at:
            is_affected = True
        elif ("fixed" in event and version >= at) or ("last_affected" in event and version > at):
            is_affected = False
    return is_affected


def _version_of(event: dict[str, str]) -> Version:
    (text,) = event.values()
    try:
        return Version(text)
    except InvalidVersion:
        raise ValueError(f"{text!r} is not a version") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advisories", type=Path, metavar="PATH", help="a file or folder of OSV advisories")
    parser.add_argument("--accept", nargs="+", default=[], metavar="ID", help="ids of advisories to ignore")
    parser.add_argument("--locks", nargs="+", type=Path, default=[ROOT / name for name in LOCKS], metavar="FILE")
    args = parser.parse_args(argv)
    packages = locked(args.locks)
    try:
        found = from_osv(packages) if args.advisories is None else from_files(packages, args.advisories)
        findings = sorted(finding for finding in set(found) if not {*finding.ids} & {*args.accept})
    except SourceError as error:
        print(f"skipped: {error}")
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    print(f"audited {sum(map(len, packages.values()))} versions: {len(findings) or 'no'} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
