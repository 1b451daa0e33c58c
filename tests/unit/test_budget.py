"""scripts/budget.py fails for a planted violation of each of its rules, and its limits move only as they should."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/budget.py"
BUDGET = """\
whole = { lines = 4, modules = 3 }
allowance = { lines = 0, modules = 0 }
registries = ["*/service.py"]
[rooms]
"core" = { lines = 4, modules = 3, comments = 0 }
[tests]
"tests" = { lines = 1, modules = 1, comments = 0 }
[features]
"beams" = 'beam'
[imports]
"core/queue.py" = 1
[spine]
code = 1
named = 1
words = 'beam'
[spine.files]
core = ["core/rows.py"]
"""
FILES = {
    "core/rows.py": "",
    "core/queue.py": "from core.beams import a\n\n",
    "core/beams.py": "a = 1\nb = 2\n",
    "tests/test_queue.py": "c = 3\n",
}
PLANTED = [
    ("core/queue.py", "from core.beams import a\n\n\n", "core: 5 lines, limit 4"),
    ("core/sub/more.py", "", "core: 4 modules, limit 3"),
    ("tests/test_beams.py", "", "tests: 2 modules, limit 1"),
    ("kv/blocks.py", "", "kv/blocks.py: in no room"),
    ("core/queue.py", "from core.beams import a\n# of the block\n", "core/queue.py:2: # of the block"),
    ("core/queue.py", "from core.beams import a\nb = 2  # what it is\n", "core/queue.py:2: # what it is"),
    ("core/beams.py", '"""As many as fit."""\na = b = 1\n', 'core/beams.py:1: """As many as fit."""'),
    ("core/rows.py", '"""Rows."""\nimport a\nb = 1\nc = 2\n', "the spine: 2 lines of code, limit 1"),
    ("core/rows.py", "beams = 1\nbeams = 2\n", "the spine: 2 lines of named, limit 1"),
    ("core/queue.py", "from core.beams import a, b\n", "core/queue.py: imports 2 names from features, limit 1"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    write(tmp_path, "budget.toml", BUDGET)
    for name, text in FILES.items():
        write(tmp_path, name, text)
    return tmp_path


def write(tree: Path, name: str, text: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(text)


def run(tree: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), "--root", str(tree), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_tree_within_its_limits_passes(tree: Path) -> None:
    assert run(tree) == (0, "")


@pytest.mark.parametrize(("name", "text", "message"), PLANTED)
def test_a_planted_violation_fails(tree: Path, name: str, text: str, message: str) -> None:
    write(tree, name, text)
    status, output = run(tree)
    assert status == 1
    assert message in output
    assert "budget.py --lower" in output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/service.py", "from core.beams import a, b\n"),  # a registry
        ("core/beams.py", "a = 1  # number of beams\n# The first line,\n# as long as it is\n"),
    ],
)
def test_what_the_rules_do_not_mean_passes(tree: Path, name: str, text: str) -> None:
    write(tree, "budget.toml", BUDGET.replace("lines = 0, modules = 0", "lines = 1, modules = 1"))
    write(tree, name, text)
    assert run(tree) == (0, "")


def test_limits_follow_a_removal_and_rise_only_by_set(tree: Path) -> None:
    write(tree, "core/beams.py", "a = 1\n")
    write(tree, "core/queue.py", "\n")
    write(tree, "tests/test_queue.py", "\n\n")
    assert run(tree, "--lower") == (0, "")
    lowered = tomllib.loads((tree / "budget.toml").read_text())
    assert lowered["whole"] == {"lines": 2, "modules": 3}
    assert lowered["rooms"]["core"]["lines"] == 2
    assert lowered["tests"]["tests"]["lines"] == 1
    assert lowered["imports"] == {}
    assert lowered["spine"]["code"] == lowered["spine"]["named"] == 0
    assert run(tree)[0] == 1
    assert run(tree, "--set") == (0, "")
    assert run(tree) == (0, "")
