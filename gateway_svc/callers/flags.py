"""Flags about the callers of the gateway: credentials, limits, isolation."""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway_svc.callers.api_keys import ApiKeys
from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.callers.caller import CallersError
from svc_common import config

MIN_PRIORITY = -1000  # lower limit of the request field
ISOLATIONS = ("none", "tenant")


def add_caller_flags(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    group = parser.add_argument_group("identity of clients (docs/keys.md)")
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="DIR",
        help="folder of accepted API keys: a file per owner, a key per line as sha256:HEX or in plaintext, read again "
        "when a file changes. Health and reflection need no key. The owner is the tenant of its requests, and only its "
        "keys abort or resume them. Unset: no API key is needed, and any client that knows the id of a request can end "
        "it",
    )
    group.add_argument(
        "--isolation",
        choices=ISOLATIONS,
        help="tenant: requests of different tenants share no cached prefixes, so that no tenant can detect the prompts "
        "of another; all gateways of a model need the same value. none: they share. Unset: tenant with --api-keys, "
        "else none",
    )
    group.add_argument(
        "--key-limits",
        type=Path,
        metavar="FILE",
        help="TOML file with limits per owner (docs/limits.md): rates of requests and tokens, open streams, models, "
        "priorities; read again when it changes. With --redis they apply to all gateways together, else to each "
        "gateway process",
    )
    group.add_argument(
        "--min-priority",
        type=config.in_range(int, MIN_PRIORITY, -MIN_PRIORITY),
        metavar="N",
        help="lowest priority that a request may have; a lower number runs first. Unset: 0 with --api-keys, else -1000",
    )


def identifies_callers(args: argparse.Namespace) -> bool:
    """Whether requests have owners."""
    return args.api_keys is not None


def make_authenticator(args: argparse.Namespace) -> Authenticator | None:
    """The check of credentials; None: all clients are served. Raises CallersError."""
    return None if args.api_keys is None else Authenticator(ApiKeys(args.api_keys))


def isolates_tenants(args: argparse.Namespace) -> bool:
    """Whether tenants share no cached prefixes. By default they share none, because clients do not trust each other.

    Raises CallersError.
    """
    if args.isolation == "tenant" and not identifies_callers(args):
        raise CallersError("--isolation tenant needs --api-keys: without keys, clients choose their tenant themselves")
    return identifies_callers(args) if args.isolation is None else bool(args.isolation == "tenant")


def min_priority(args: argparse.Namespace) -> int:
    """The lowest priority of a request. By default 0 if requests have owners, because these do not trust each other."""
    if args.min_priority is not None:
        return int(args.min_priority)
    return 0 if identifies_callers(args) else MIN_PRIORITY
