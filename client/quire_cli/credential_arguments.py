"""The flags of `quire key` and `quire cert`."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire_cli.values import positive

KEY_EXAMPLES = """\
examples:
  quire key new team-a                       a key, and the line for the file team-a in the folder of --api-keys
  quire key new team-a --dir keys            also adds the line to keys/team-a
  quire key hash < old-key.txt               the line of a key that exists
"""

CERT_EXAMPLES = """\
examples:
  quire cert certs --host llm.example.com    a CA, a certificate per role, and one for the gateways' public port
  quire cert certs --host llm.example.com    again: new certificates of the same CA, without a restart of services
  quire cert certs --worker-id w-1 --worker-id w-2   also certificates that name a worker's id
"""


def add_key_flags(key: argparse.ArgumentParser) -> None:
    key.add_argument(
        "action", choices=("new", "hash"), help="new: make a key; hash: print the line of a key from stdin"
    )
    key.add_argument("owner", nargs="?", metavar="OWNER", help="owner of the new key: its tenant, and the file's name")
    key.add_argument(
        "--dir", type=Path, metavar="DIR", help="add the line to DIR/OWNER; DIR is the folder of --api-keys"
    )
    key.add_argument("--json", action="store_true", help="one JSON line")


def add_cert_flags(cert: argparse.ArgumentParser) -> None:
    cert.add_argument("dir", type=Path, metavar="DIR", help="folder to write; its CA is used again if it has one")
    cert.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        default=[],
        help="DNS name or IP address of the gateways, for clients (default: localhost and 127.0.0.1)",
    )
    cert.add_argument(
        "--worker-id", action="append", metavar="ID", default=[], help="also a certificate for this worker"
    )
    cert.add_argument("--days", type=positive, default=90.0, metavar="N", help="days until they expire (default 90)")
