"""Child processes that end when the test process ends, even if it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Linux signals the child when its parent dies (PR_SET_PDEATHSIG = 1), and exec keeps the setting. The signal is
# SIGKILL (9), because a stopped process handles no other.
LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_child(command: list[str], log_path: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start `command` in its own session, so that Ctrl-C signals only the test process; append its output to the log.

    Call it from the main thread: the kernel sends the signal when the calling thread ends.
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
