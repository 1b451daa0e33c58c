"""`quire adapter load`, `quire adapter unload`, `quire adapter list`."""

from __future__ import annotations

import argparse

from quire_cli.connection import connect
from quire_cli.output import count, table, to_json

SHORT_DIGEST = 12


def load(args: argparse.Namespace) -> int:
    with connect(args) as client:
        adapter = client.load_adapter(args.name, args.path, model=args.model)
    if args.json:
        print(to_json(adapter))
    else:
        print(f"{adapter.name} is loaded on {count(adapter.num_workers, 'worker')}, digest {adapter.digest}")
    return 0


def unload(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.unload_adapter(args.name, model=args.model)
    print(to_json({"unloaded": args.name}) if args.json else f"{args.name} is unloaded")
    return 0


def show(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.adapters(model=args.model)
    if args.json:
        print(to_json({"adapters": found}))
    elif found:
        headers = ("adapter", "model", "workers", "resident", "digest", "path")
        rows = ((a.name, a.model, a.num_workers, a.num_resident, a.digest[:SHORT_DIGEST], a.path) for a in found)
        print(table(headers, rows))
    else:
        print("no adapter is loaded; `quire adapter load NAME PATH` loads one")
    return 0
