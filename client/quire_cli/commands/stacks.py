"""`quire ps`, `quire stop`, `quire logs`: the stacks that `quire up` runs on this machine."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from quire_cli.output import complain, show, table


def folder() -> Path:
    """The folder of the files, below $XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "quire" / "stacks"


class RunningStack:
    """The entry of this process's stack. Without a folder that can be written, the stack runs without one."""

    def __init__(self, **facts: Any) -> None:
        self._facts = {"pid": os.getpid(), "started": time.time(), **facts}
        self._path = folder() / f"{os.getpid()}.json"
        self._file: TextIO | None = None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self.update()

    def update(self, **facts: Any) -> None:
        """Change facts of the entry."""
        self._facts |= facts
        if self._file is None:
            return
        with suppress(OSError):
            self._file.seek(0)
            self._file.write(json.dumps(self._facts))
            self._file.truncate()
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):
                self._file.close()


def running() -> list[dict[str, Any]]:
    """The facts of the running stacks, oldest first. Removes the entries of processes that were killed."""
    found = [facts for path in folder().glob("*.json") if (facts := _facts(path))]
    return sorted(found, key=lambda facts: facts["started"])


def is_serving(pid: int) -> bool:
    """Whether the stack of this process is ready."""
    return any(facts["pid"] == pid and facts["state"] == "serving" for facts in running())


def _facts(path: Path) -> dict[str, Any] | None:
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                facts: dict[str, Any] = json.load(file)
                return facts
        path.unlink(missing_ok=True)  # no process holds the lock
    except (OSError, ValueError):
        return None  # it has ended, or is being written
    return None


POLL_S = 0.1


def ps(args: argparse.Namespace) -> int:
    stacks = running()
    headers = ("stack", "model", "state", "gateways", "HTTP", "minutes")
    none = "no stack runs here; `quire up` starts one"
    return show(args, {"stacks": stacks}, table(headers, map(_row, stacks)) if stacks else none)


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
