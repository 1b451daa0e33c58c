"""The TLS flags."""

from __future__ import annotations

import argparse
import dataclasses

from quire_client.tls import Tls, resolve_tls

FLAG_OF = {"ca_file": "tls_ca", "cert_file": "tls_cert", "key_file": "tls_key", "server_name": "tls_server_name"}


def tls_option(args: argparse.Namespace) -> Tls | None:
    """The TLS settings of flags and environment; flags take precedence."""
    given = {field: getattr(args, flag) for field, flag in FLAG_OF.items() if getattr(args, flag)}
    if not given:
        return resolve_tls(args.tls)
    return dataclasses.replace(resolve_tls(True) or Tls(), **given)
