"""Writes a software bill of materials in CycloneDX 1.6 JSON. Uses only the standard library, so that builds can run it.

    sbom.py wheel quire-server             the locked requirements of a wheel, with the digests of their archives
    sbom.py image quire-gateway:0.1.0      the Python and Debian packages of the environment that runs it

Equal input gives an equal file: there is no time in it, and its serial number is a digest of its content.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = uuid.UUID("5a0f7b0e-6c1a-4f0c-9f0e-5b1de0a6f3d1")
CLIENT_EXTRAS = ("bench", "hub")  # quire-server has the other extras
OWN = ("quire", "quire-client", "quire-server")
LICENSE = "Apache-2.0"
DPKG_STATUS, OS_RELEASE = Path("/var/lib/dpkg/status"), Path("/etc/os-release")


@dataclass(slots=True)
class Package:
    """One component. `needs` has the names of the packages that it requires."""

    name: str
    version: str
    purl: str
    digests: list[str] = field(default_factory=list)
    licence: str = ""
    needs: set[str] = field(default_factory=set)

    @classmethod
    def of_pypi(cls, name: str, version: str) -> Package:
        return cls(name, version, f"pkg:pypi/{normal(name)}@{version}")

    def component(self) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "library", "bom-ref": self.purl, "name": self.name, "version": self.version}
        if self.licence:
            made["licenses"] = [{"expression": self.licence}]
        made["purl"] = self.purl
        if self.digests:
            # Each digest belongs to one archive of this version: a wheel of a platform, or the source.
            hashes = [{"alg": "SHA-256", "content": digest} for digest in self.digests]
            url = f"https://pypi.org/project/{normal(self.name)}/{self.version}/"
            made["externalReferences"] = [{"type": "distribution", "url": url, "hashes": hashes}]
        return made


def normal(name: str) -> str:
    """A name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return normal(found[0]) if found else ""


def bom(subject: Package, kind: str, packages: Iterable[Package]) -> dict[str, Any]:
    """The document about `subject`, which contains or requires `packages`."""
    listed = sorted(packages, key=lambda package: package.purl)
    refs = {normal(package.name): package.purl for package in listed if package.purl.startswith("pkg:pypi/")}
    depends = [
        {"ref": package.purl, "dependsOn": sorted({refs[name] for name in package.needs if name in refs})}
        for package in (subject, *listed)
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "scripts/sbom.py of Quire"}]},
            "component": subject.component() | {"type": kind},
        },
        "components": [package.component() for package in listed],
        "dependencies": depends,
    }
    serial = uuid.uuid5(NAMESPACE, json.dumps(document, sort_keys=True))
    return document | {"serialNumber": f"urn:uuid:{serial}"}


# -- a wheel ----------------------------------------------------------------------------------------------------------


def of_wheel(name: str) -> dict[str, Any]:
    """The wheel and its requirements with all extras, in the locked versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subject = Package.of_pypi(name, project["version"])
    subject.licence = LICENSE
    extras = project["optional-dependencies"]
    names = CLIENT_EXTRAS if name == "quire-client" else extras.keys() - {*CLIENT_EXTRAS, "dev"}
    required = [line for extra in names for line in extras[extra]]
    required += project["dependencies"] if name == "quire-client" else []
    subject.needs = {name_of(line) for line in required} - {"quire"}
    locked = read_locked(ROOT / "packaging" / "requirements.txt")
    if name == "quire-server":
        client = Package.of_pypi("quire-client", project["version"])
        client.licence = LICENSE
        client.needs = {name_of(line) for line in project["dependencies"]}
        locked["quire-client"] = client
        subject.needs.add("quire-client")
    return bom(subject, "library", needed_by(subject, locked))


def read_locked(path: Path) -> dict[str, Package]:
    """The packages of a file of `uv pip compile --generate-hashes`. Its `via` comments name the dependents."""
    packages: dict[str, Package] = {}
    vias: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        if found := re.match(r"([A-Za-z0-9._-]+)(?:\[.*?\])?==([^\s;]+)", line):
            current = packages[normal(found[1])] = Package.of_pypi(found[1], found[2])
        elif found := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            current.digests.append(found[1])
        elif (found := re.match(r"    #(?: via)?\s+(\S+)", line)) and found[1] != "via":
            vias.setdefault(normal(current.name), set()).add(name_of(found[1]))
    for name, dependents in vias.items():
        for dependent in dependents & packages.keys():
            packages[dependent].needs.add(name)
    return packages


def needed_by(subject: Package, packages: dict[str, Package]) -> list[Package]:
    """The packages that `subject` requires, and those that these require. flash-attn is not locked: users build it."""
    found: dict[str, Package] = {}
    waiting = sorted(subject.needs)
    while waiting:
        name = waiting.pop()
        if name in packages and name not in found:
            found[name] = packages[name]
            waiting += sorted(packages[name].needs)
    return list(found.values())


# -- an image ---------------------------------------------------------------------------------------------------------


def of_image(tag: str, status: Path, release: Path) -> dict[str, Any]:
    """The packages of the running interpreter, Python itself, and Debian's packages."""
    name, _, version = tag.partition(":")
    subject = Package(name, version, f"pkg:oci/{name}?tag={version}", licence=LICENSE)
    python = Package("python", platform.python_version(), f"pkg:generic/python@{platform.python_version()}")
    installed = list(of_environment())
    subject.needs = {normal(package.name) for package in installed}
    return bom(subject, "container", [*installed, python, *of_debian(status, release)])


def of_environment() -> Iterator[Package]:
    for found in importlib.metadata.distributions():
        package = Package.of_pypi(found.metadata["Name"], found.version)
        package.licence = found.metadata.get("License-Expression") or LICENSE * (normal(package.name) in OWN)
        required = [line for line in found.requires or () if "extra ==" not in line or normal(package.name) in OWN]
        package.needs = {name_of(line) for line in required} - {normal(package.name)}
        yield package


def of_debian(status: Path, release: Path) -> Iterator[Package]:
    """The installed packages of dpkg's status file; none on other systems."""
    if not status.exists():
        return
    facts = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    distro = f"{facts.get('ID', 'debian')}-{facts.get('VERSION_ID', '')}".replace('"', "")
    for block in status.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.+)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, architecture = (fields[key] for key in ("Package", "Version", "Architecture"))
            escaped = version.replace("+", "%2B").replace(":", "%3A")
            purl = f"pkg:deb/debian/{name.replace('+', '%2B')}@{escaped}?arch={architecture}&distro={distro}"
            yield Package(name, version, purl)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("wheel", "image"))
    parser.add_argument("name", help="name of the wheel, or name:tag of the image")
    parser.add_argument("--dpkg-status", type=Path, default=DPKG_STATUS, help="for tests")
    parser.add_argument("--os-release", type=Path, default=OS_RELEASE, help="for tests")
    args = parser.parse_args()
    is_wheel = args.kind == "wheel"
    made = of_wheel(args.name) if is_wheel else of_image(args.name, args.dpkg_status, args.os_release)
    json.dump(made, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
