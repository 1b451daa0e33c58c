"""The stacks that a user runs on this machine: a file per `quire up`, for `quire ps`, `quire stop` and `quire logs`.

A process keeps its file locked while it lives, so an entry that a killed process has left is recognised.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


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
