"""`quire replay`: compute the turns of a replay log again, and name the first one that differs (docs/replay.md)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from quire_client.errors import QuireError
from quire_client.replay import Entry, ReplayedTurns, ReplayError, changed_facts, difference, read_log
from quire_client.sync import Client

from quire_cli.connection import connect
from quire_cli.output import complain, describe, to_json

EQUAL, DIFFERS, NOT_COMPUTED = 0, 1, 2


def run(args: argparse.Namespace) -> int:
    """0: all turns are equal, 1: one differs, 2: the log cannot be read or a turn cannot be computed."""
    try:
        entries = read_log(args.log)
        if args.against is not None:
            return _compare(args, entries, iter(read_log(args.against)))
        with connect(args) as client:
            return _compare(args, entries, _computed(client, args.model, entries))
    except (QuireError, ReplayError, OSError) as error:
        complain(describe(error) if isinstance(error, QuireError) else str(error))
        return NOT_COMPUTED


def _computed(client: Client, model: str, entries: Sequence[Entry]) -> Iterator[Entry]:
    turns = ReplayedTurns(entries)
    for number, old in enumerate(entries, 1):
        try:
            request = turns.request_of(old)
            request.model = model or request.model
            new = client.replay(request)
        except (QuireError, ReplayError) as error:
            reason = describe(error) if isinstance(error, QuireError) else str(error)
            raise ReplayError(f"turn {number} cannot be computed: {reason}") from None
        turns.restore(old, new)
        yield new


def _compare(args: argparse.Namespace, entries: Sequence[Entry], others: Iterator[Entry]) -> int:
    changed: dict[str, str] = {}
    for number, (old, new) in enumerate(zip_longest(entries, others), 1):
        missing = "the turn is missing" if new is None else "the turn is new"
        found = (missing, {}) if new is None or old is None else difference(old, new)
        if found is not None:
            return _show(args, {"num_turns": len(entries), "turn": number, "differs": found[0], "causes": found[1]})
        changed |= changed_facts(old, new)
    return _show(args, {"num_turns": len(entries), "causes": changed})


def _show(args: argparse.Namespace, found: dict[str, Any]) -> int:
    """Print the result. Returns the exit code."""
    causes = "".join(f"; {name}: {values}" for name, values in found["causes"].items())
    if args.json:
        print(to_json({"is_equal": "turn" not in found, **found}))
    elif "turn" in found:
        print(f"turn {found['turn']} of {found['num_turns']} differs: {found['differs']}{causes}")
    else:
        print(f"{found['num_turns']} turns are equal{causes}")
    return DIFFERS if "turn" in found else EQUAL
