"""`quire cert DIR`: the certificates of a deployment without an own certificate authority."""

from __future__ import annotations

import argparse
import re

from quire_cli.certificate_authority import Authority, AuthorityError, issue_all, write
from quire_cli.output import complain

LOCAL = ("localhost", "127.0.0.1", "::1")


def run(args: argparse.Namespace) -> int:
    """Make or renew all certificates. The authority is made only if the folder has none."""
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
