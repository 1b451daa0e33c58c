"""constraints-dev.txt covers every requirement of the development environment. If this fails, run `make lock`."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def pins():
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    return {pin.name: pin.specifier for pin in map(Requirement, (line for line in lines if not line.startswith("#")))}


def requirements(extra, project):
    """The requirements of an extra, including those of the extras that it names."""
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement
        for inner in requirement.extras if requirement.name == project["name"] else ():
            yield from requirements(inner, project)


def test_every_requirement_is_locked_to_a_version_that_fits_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*requirements("dev", settings["project"]), *map(Requirement, settings["project"]["dependencies"])]
    needed += map(Requirement, settings["build-system"]["requires"])
    locked = pins()
    for requirement in needed:
        if requirement.name == "torch":
            continue  # chosen by scripts/install_torch
        (pin,) = locked[requirement.name]
        assert requirement.specifier.contains(pin.version), f"{requirement} is locked to {pin.version}"


def test_nothing_that_torch_chooses_is_locked():
    assert not [name for name in pins() if name == "torch" or name.startswith(("nvidia-", "cuda-"))]
