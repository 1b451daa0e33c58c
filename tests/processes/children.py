"""Child processes that end with the test that started them, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Linux ends the child when its parent dies (PR_SET_PDEATHSIG = 1); the setting survives exec. SIGKILL, because a
# stopped process would not hear anything else.
LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_child(command: list[str], log_path: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, so that Ctrl-C reaches only us; it appends to its log.

    Call it from the main thread: the kernel takes the end of the calling thread for the end of the parent.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *command]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
