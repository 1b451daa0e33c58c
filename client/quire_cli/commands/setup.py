"""`quire key`, `quire cert`, `quire fetch`, `quire completion`: files and keys that a deployment or a shell needs."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from pathlib import Path

from quire_cli.output import complain, read_stdin, show
from quire_cli.stack.local_trust import digest_line

PREFIX = "qk-"
OWNER = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,63}")  # a gateway ignores files whose name begins with a dot
MIN_KEY_CHARS = 16
COMMIT = re.compile(r"[0-9a-f]{40}")
LOCAL = ("localhost", "127.0.0.1", "::1")


def key(args: argparse.Namespace) -> int:
    """Make an API key, or the digest of one for the folder of --api-keys."""
    return _new_key(args, args.owner, args.dir) if args.action == "new" else _hash(args)


def _new_key(args: argparse.Namespace, owner: str | None, folder: Path | None) -> int:
    if owner is None or not OWNER.fullmatch(owner):
        complain(f"the owner is {owner!r}; give 1 to 64 of the characters A-Z a-z 0-9 . _ : -, the first not a dot")
        return 2
    new = PREFIX + secrets.token_urlsafe(32)
    line = digest_line(new)
    if folder is not None and (problem := _add(folder / owner, line)):
        complain(problem)
        return 1
    show(args, {"owner": owner, "key": new, "line": line}, f"key   {new}\nline  {line}")
    if not args.json:
        added = f"the line was added to {folder and folder / owner}"
        stored = added if folder else f"add the line to the file {owner} of --api-keys"
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
    given = read_stdin().strip()
    if len(given) < MIN_KEY_CHARS or given != "".join(given.split()):
        complain(f"stdin has no key: give one key of at least {MIN_KEY_CHARS} characters, without spaces")
        return 2
    return show(args, {"line": digest_line(given)}, digest_line(given))


def cert(args: argparse.Namespace) -> int:
    """Make or renew all certificates. The authority is made only if the folder has none."""
    from quire_cli.certificate_authority import Authority, AuthorityError, issue_all, write

    for worker_id in args.worker_id:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,63}", worker_id):
            complain(f"--worker-id {worker_id!r} cannot be part of a DNS name; use A-Z a-z 0-9 . -")
            return 2
    try:
        args.dir.mkdir(parents=True, exist_ok=True)
        has_authority = (args.dir / "ca.crt").exists() or (args.dir / "ca.key").exists()
        authority = Authority.load(args.dir) if has_authority else Authority.create()
        if not has_authority:
            write(args.dir / "ca", authority.pair)
        issue_all(authority, args.dir, hosts=args.host or LOCAL, worker_ids=args.worker_id, days=args.days)
    except (AuthorityError, OSError, ValueError) as error:
        complain(f"cannot write certificates to {args.dir}: {error}")
        return 1
    made = "renewed with the CA in" if has_authority else "made with a new CA in"
    print(f"certificates {made} {args.dir}, valid for {args.days:g} days")
    print("each service needs ca.crt and the .crt and .key of its role; keep ca.key elsewhere (docs/trust.md)")
    return 0


def fetch(args: argparse.Namespace) -> int:
    """Print the folder of the model, DIR/models--ORG--NAME/snapshots/COMMIT. If it is complete, nothing is downloaded.

    Several processes may run it at once in a shared folder: huggingface_hub locks each file.
    """
    from hub_models.find import HubError, find_model, parse_name

    model = parse_name(args.model)
    if model is None or not COMMIT.fullmatch(model.revision):
        complain(f"{args.model!r} is not pinned: write ORG/NAME@COMMIT with the 40 hexadecimal digits of a commit")
        return 2
    os.environ["HF_HUB_CACHE"] = str(args.to)
    try:
        print(find_model(model, say=lambda line: print(line, flush=True), check_config=lambda folder: None))
    except HubError as error:
        complain(str(error))
        return 1
    return 0


def completion(args: argparse.Namespace) -> int:
    """Print a script that completes commands and flags."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["quire"], shell=args.shell))
    return 0
