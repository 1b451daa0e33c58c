"""`quire verify` and `quire receipt show`: check and read signed records of answers (docs/receipts.md)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from quire_cli.installation import install_command, is_installed
from quire_cli.output import complain, read_stdin, to_json
from request_fields.receipts import Receipt, ReceiptError, parse_receipt, public_key_bytes


def verify(args: argparse.Namespace) -> int:
    """Run the worker's check, which loads the model. 0: confirmed, 1: refuted, 2: not readable, 3: undecided."""
    if not is_installed("worker_svc"):
        complain(f"quire verify computes the answer again, which needs the worker: {install_command('worker')}")
        return 2
    command = [sys.executable, "-P", "-m", "worker_svc.receipts.verify", str(args.receipt), "--model", str(args.model)]
    for flag in ("adapter", "public_key", "first", "last"):
        value = getattr(args, flag)
        if value is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    return subprocess.run(command, check=False).returncode


def show(args: argparse.Namespace) -> int:
    """Print what receipts say, and whether their signatures are valid."""
    try:
        text = read_stdin() if str(args.receipt) == "-" else args.receipt.read_text("utf-8")
        public_key = None if args.public_key is None else public_key_bytes(args.public_key.read_bytes())
        receipts = [parse_receipt(line) for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, ReceiptError) as error:
        complain(f"{args.receipt}: {error}")
        return 2
    if not receipts:
        complain(f"{args.receipt}: there is no receipt in it")
        return 2
    return max(_show(receipt, public_key, as_json=args.json) for receipt in receipts)


def _show(receipt: Receipt, public_key: bytes | None, *, as_json: bool) -> int:
    try:
        receipt.check(public_key)
        problem = ""
    except ReceiptError as error:
        problem = str(error)
    claimed = {"num_claimed_tokens": receipt.payload.get("num_claimed_tokens")}
    facts = {"signature": problem or "valid", **claimed, "key": receipt.key_id, **receipt.payload}
    if as_json:
        print(to_json(facts))
    else:
        for name, value in facts.items():
            print(f"{name:24} {value if isinstance(value, str | int | float) else json.dumps(value)}")
    return 1 if problem else 0
