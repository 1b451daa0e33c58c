"""`quire route set`, `quire route rm`, `quire route list`."""

from __future__ import annotations

import argparse
from operator import itemgetter

from quire_cli.connection import connect
from quire_cli.output import table, to_json


def put(args: argparse.Namespace) -> int:
    return _set(args, dict(args.targets) or {args.name: 1}, args.shadow)


def remove(args: argparse.Namespace) -> int:
    return _set(args, {}, "")


def _set(args: argparse.Namespace, targets: dict[str, int], shadow: str) -> int:
    with connect(args) as client:
        client.set_route(args.name, targets, shadow=shadow)
    words = f"stands for {' and '.join(targets)}" if targets else "is no route any more"
    print(to_json({"name": args.name, "targets": targets, "shadow": shadow}) if args.json else f"{args.name} {words}")
    return 0


def show(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.routes()
    if args.json:
        print(to_json({"routes": found}))
        return 0
    rows = ((route.name, *pair) for route in found for pair in route.targets.items())
    shadows = ((route.name, route.shadow, "shadow") for route in found if route.shadow)
    print(table(("name", "target", "weight"), sorted((*rows, *shadows), key=itemgetter(0))))
    return 0
