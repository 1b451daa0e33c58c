#!/usr/bin/env python3
"""Compares the tree with budget.toml and says what to do where it has grown.

    scripts/budget.py           fail if a room, the comments or the imports of features exceed their limits
    scripts/budget.py --lower   lower each limit in budget.toml to the number of today
    scripts/budget.py --set     write the numbers of today, higher ones too (the commit says why)

A file counts in the row with the longest prefix of its path. Rows under [tests] are outside the sum of production.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".proto", ".js", ".css", ".html")
NOT_COUNTED = ("deploy/", "docs/", "packaging/")
NO_MODULES = ("__init__.py", "__main__.py")
DEPENDENT = re.compile(r"(of|that|those|what|as|so|than)\b", re.IGNORECASE)
CANDIDATE = re.compile(rf'(#\s*|"""){DEPENDENT.pattern}', re.IGNORECASE)  # spares most files a parser
DIRECTIVE = re.compile(r"#\s*(fmt|type|noqa|mypy|ruff|pragma)\b")
REMEDY = """
A limit is a ratchet: after a removal run scripts/budget.py --lower. A higher limit is written by hand, in a commit that
says what the lines give and what was removed elsewhere (CONTRIBUTING.md, "The budget")."""


@dataclass
class Room:
    """Numbers of a row of budget.toml."""

    lines: int = 0
    modules: int = 0
    comments: int = 0  # number of comments that cannot be read alone
    places: list[str] = field(default_factory=list)  # file:line of each of these comments

    def limits(self) -> dict[str, int]:
        return {"lines": self.lines, "modules": self.modules, "comments": self.comments}


def source_files(root: Path) -> list[str]:
    """Files of the working tree that git tracks or would add."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [name for name in sorted(set(names)) if name.endswith(SUFFIXES) and not name.startswith(NOT_COUNTED)]
    return [name for name in names if (root / name).is_file()]


def room_of(name: str, rooms: list[str]) -> str | None:
    return max((room for room in rooms if name.startswith(f"{room}/")), key=len, default=None)


def measure(root: Path, files: list[str], rooms: list[str]) -> tuple[dict[str, Room], list[str]]:
    """The numbers of each room, and the files that are in none."""
    found, homeless = {room: Room() for room in rooms}, []
    for name in files:
        room = room_of(name, rooms)
        if room is None:
            homeless.append(name)
            continue
        numbers, text = found[room], (root / name).read_text(encoding="utf-8", errors="replace")
        numbers.lines += text.count("\n")
        if name.endswith(".py"):
            numbers.modules += not name.endswith(NO_MODULES)
            if CANDIDATE.search(text):
                numbers.places += [f"{name}:{line}: {comment}" for line, comment in dependent_comments(text)]
            numbers.comments = len(numbers.places)
    return found, homeless


def dependent_comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of one line whose first word refers to a sentence that is not there."""
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        row, column = token.start
        is_whole_line = not token.line[:column].strip()
        continues = is_whole_line and previous == row - 1
        previous = row
        if not continues and DEPENDENT.match(token.string.lstrip("# ")):
            yield row, token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and "\n" not in docstring and DEPENDENT.match(docstring):
                yield node.body[0].lineno, f'"""{docstring}"""'


def feature_imports(root: Path, files: list[str], features: dict[str, str]) -> Counter[str]:
    """Names that each file outside the features imports from a feature's modules."""
    modules = {_module(name): name for name in files if name.endswith(".py")}
    pattern = re.compile("|".join(features.values()))
    is_feature = {name: bool(pattern.search(name)) for name in files}
    found: Counter[str] = Counter()
    for name in modules.values():
        if is_feature[name] or name.endswith("__init__.py"):
            continue
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    source = modules.get(f"{node.module}.{alias.name}") or modules.get(node.module)
                    found[name] += bool(source and source != name and is_feature[source])
    return +found


def _module(name: str) -> str:
    return name[:-3].replace("/", ".").removesuffix(".__init__").removeprefix("client.")


def code_lines(text: str) -> list[str]:
    """Lines without imports, docstrings, comments and blanks."""
    lines = text.splitlines()
    left_out = {row for row, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        is_scope = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_scope and ast.get_docstring(node):
            left_out.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return [line for row, line in enumerate(lines, 1) if row not in left_out]


def measure_spine(root: Path, spine: dict[str, Any]) -> dict[str, int]:
    """Lines of code of the spine, and those that name a feature."""
    names = [name for group in spine["files"].values() for name in group]
    code = [line for name in names for line in code_lines((root / name).read_text(encoding="utf-8"))]
    words = re.compile(spine["words"], re.IGNORECASE)
    return {"code": len(code), "named": sum(bool(words.search(line)) for line in code)}


@dataclass
class Tree:
    """The measured numbers that budget.toml limits."""

    production: dict[str, Room]
    tests: dict[str, Room]
    homeless: list[str]
    imports: Counter[str]
    spine: dict[str, int]

    def whole(self) -> dict[str, int]:
        rooms = self.production.values()
        return {"lines": sum(room.lines for room in rooms), "modules": sum(room.modules for room in rooms)}


def measure_tree(root: Path, budget: dict[str, Any]) -> Tree:
    files = source_files(root)
    rooms, homeless = measure(root, files, [*budget["rooms"], *budget["tests"]])
    production = [name for name in files if room_of(name, [*rooms]) in budget["rooms"]]
    return Tree(
        {room: rooms[room] for room in budget["rooms"]},
        {room: rooms[room] for room in budget["tests"]},
        homeless,
        feature_imports(root, production, budget["features"]),
        measure_spine(root, budget["spine"]),
    )


def excesses(tree: Tree, budget: dict[str, Any]) -> Iterator[str]:
    """A sentence for each limit that is exceeded."""
    allowance = budget["allowance"]
    for name in tree.homeless:
        yield f"{name}: in no room of budget.toml; add a row for its folder"
    for room, numbers in (tree.production | tree.tests).items():
        limits = (budget["rooms"] | budget["tests"])[room]
        for kind, count in numbers.limits().items():
            limit = limits[kind] + allowance.get(kind, 0)
            if count > limit:
                yield f"{room}: {count} {kind}, limit {limit}{_listed(kind, numbers)}"
    for kind, count in tree.whole().items():
        limit = budget["whole"][kind] + allowance[kind]
        if count > limit:
            yield f"the whole tree: {count} {kind}, limit {limit}"
    for kind, count in tree.spine.items():
        if count > budget["spine"][kind]:
            yield f"the spine: {count} lines of {kind}, limit {budget['spine'][kind]}; let the feature register a hook"
    for name, count in sorted(tree.imports.items()):
        limit = budget["imports"].get(name, 0)
        if count > limit and not any(fnmatch.fnmatch(name, p) for p in budget["registries"]):
            yield (
                f"{name}: imports {count} names from features, limit {limit}; let the feature register a "
                "hook; a file that has moved: rename its row under [imports]; one that only builds features: registries"
            )


def _listed(kind: str, numbers: Room) -> str:
    if kind != "comments":
        return ""
    return "; begin each with a noun or a verb, so that it can be read alone:\n  " + "\n  ".join(numbers.places)


def rewritten(text: str, tree: Tree, budget: dict[str, Any], *, raises: bool) -> str:
    """budget.toml with the numbers of today; without `raises` only where they are lower."""

    def new(old: int, count: int) -> int:
        return count if raises else min(old, count)

    lines = []
    rows: dict[str, dict[str, int]] = {name: room.limits() for name, room in (tree.production | tree.tests).items()}
    rows["whole"] = tree.whole()
    for line in text.splitlines():
        key, _, value = line.partition(" = ")
        name = key.strip('"')
        if name in rows and value.startswith("{"):
            old = tomllib.loads(f"row = {value}")["row"]
            values = ", ".join(f"{kind} = {new(limit, rows[name][kind])}" for kind, limit in old.items())
            line = f"{key} = {{ {values} }}"
        elif name in tree.spine:
            line = f"{key} = {new(int(value), tree.spine[name])}"
        elif name in budget["imports"]:
            line = f"{key} = {new(int(value), tree.imports[name])}"
        if not line.endswith(" = 0") or name in tree.spine:
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--lower", action="store_true", help="lower the limits to the numbers of today")
    parser.add_argument("--set", action="store_true", help="write the numbers of today")
    args = parser.parse_args()
    path = args.root / "budget.toml"
    text = path.read_text()
    budget = tomllib.loads(text)
    tree = measure_tree(args.root, budget)
    if args.lower or args.set:
        path.write_text(rewritten(text, tree, budget, raises=args.set))
        return 0
    found = [*excesses(tree, budget)]
    if found:
        print("The tree exceeds budget.toml:", *found, REMEDY, sep="\n", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
