"""`quire ps`, `quire stop`, `quire logs`: the stacks that `quire up` runs on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from quire_cli.output import complain, table, to_json
from quire_cli.stack.running import running

POLL_S = 0.1


def ps(args: argparse.Namespace) -> int:
    stacks = running()
    if args.json:
        print(to_json({"stacks": stacks}))
    elif stacks:
        print(table(("stack", "model", "state", "gateways", "HTTP", "minutes"), map(_row, stacks)))
    else:
        print("no stack runs here; `quire up` starts one")
    return 0


def _row(facts: dict[str, Any]) -> tuple[object, ...]:
    minutes = f"{(time.time() - facts['started']) / 60:.0f}"
    return (facts["pid"], facts["model"], facts["state"], facts["target"], ",".join(facts["http"]), minutes)


def stop(args: argparse.Namespace) -> int:
    """Drain and stop a stack, and wait until it has ended. With --now its services end at once."""
    facts = _chosen(args.stack)
    if facts is None:
        return 1
    pid = facts["pid"]
    for _ in range(2 if args.now else 1):
        os.kill(pid, signal.SIGTERM)
        time.sleep(POLL_S)  # equal signals that arrive together are one
    while any(other["pid"] == pid for other in running()):
        time.sleep(POLL_S)
    print(f"stopped {facts['model']} (process {pid})")
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print the end of a stack's logs with tail(1)."""
    facts = _chosen(args.stack)
    if facts is None:
        return 1
    found = sorted(Path(facts["log_dir"]).glob(f"{args.service}*.log"))
    if not found:
        complain(f"{facts['log_dir']} has no log of {args.service!r}; `quire logs` shows all")
        return 1
    return subprocess.call(["tail", "-n", str(args.lines), *(["-F"] if args.follow else []), "--", *map(str, found)])


def _chosen(name: str) -> dict[str, Any] | None:
    """The stack with this process id or model; without a name the only one."""
    stacks = running()
    found = [facts for facts in stacks if name in ("", str(facts["pid"]), facts["model"])]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{facts['pid']} ({facts['model']})" for facts in stacks) or "none"
    complain(f"{f'no single stack is {name}' if name else 'name one stack'}; running: {names}")
    return None
