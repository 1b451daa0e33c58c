"""`quire key new OWNER` and `quire key hash`: API keys, and their digests for the folder of --api-keys."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from pathlib import Path

from quire_cli.output import complain, read_stdin, to_json
from quire_cli.stack.local_trust import digest_line

PREFIX = "qk-"
OWNER = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,63}")  # a gateway ignores files whose name begins with a dot
MIN_KEY_CHARS = 16


def run(args: argparse.Namespace) -> int:
    return _new(args.owner, args.dir, is_json=args.json) if args.action == "new" else _hash(args)


def _new(owner: str | None, folder: Path | None, *, is_json: bool) -> int:
    if owner is None or not OWNER.fullmatch(owner):
        complain(f"the owner is {owner!r}; give 1 to 64 of the characters A-Z a-z 0-9 . _ : -, the first not a dot")
        return 2
    key = PREFIX + secrets.token_urlsafe(32)
    line = digest_line(key)
    if folder is not None and (problem := _add(folder / owner, line)):
        complain(problem)
        return 1
    if is_json:
        print(to_json({"owner": owner, "key": key, "line": line}))
        return 0
    print(f"key   {key}")
    print(f"line  {line}")
    stored = f"the line was added to {folder / owner}" if folder else f"add the line to the file {owner} of --api-keys"
    print(f"[give the key to the client: it is not stored and not shown again; {stored}]", file=sys.stderr)
    return 0


def _add(path: Path, line: str) -> str:
    """Append the line to the owner's file. Returns why that failed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
            text = file.read()
            file.write("\n" * bool(text and not text.endswith("\n")) + f"{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
    return ""


def _hash(args: argparse.Namespace) -> int:
    if args.owner or args.dir:
        complain("`quire key hash` reads a key from stdin and takes no owner and no --dir")
        return 2
    key = read_stdin().strip()
    if len(key) < MIN_KEY_CHARS or key != "".join(key.split()):
        complain(f"stdin has no key: give one key of at least {MIN_KEY_CHARS} characters, without spaces")
        return 2
    print(to_json({"line": digest_line(key)}) if args.json else digest_line(key))
    return 0
