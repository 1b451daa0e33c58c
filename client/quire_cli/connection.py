"""Opens the client of a command from its flags: target, credentials, TLS."""

from __future__ import annotations

import argparse
import dataclasses

from quire_client.connection.channel import Tls, resolve_tls
from quire_client.sync import Client

CONNECT_TIMEOUT_S = 2.0
FLAG_OF = {"ca_file": "tls_ca", "cert_file": "tls_cert", "key_file": "tls_key", "server_name": "tls_server_name"}


def tls_option(args: argparse.Namespace) -> Tls | None:
    """The TLS settings of flags and environment; flags take precedence."""
    given = {field: getattr(args, flag) for field, flag in FLAG_OF.items() if getattr(args, flag)}
    if not given:
        return resolve_tls(args.tls)
    return dataclasses.replace(resolve_tls(True) or Tls(), **given)


def connect(args: argparse.Namespace) -> Client:
    """A client for the gateways in --target. Fails fast because a user is waiting."""
    limits = {} if args.timeout_s is None else {"timeout_s": args.timeout_s}
    wait_s = min(CONNECT_TIMEOUT_S, args.timeout_s or CONNECT_TIMEOUT_S)
    return Client.connect(args.target, tls=tls_option(args), api_key=args.api_key, connect_timeout_s=wait_s, **limits)
