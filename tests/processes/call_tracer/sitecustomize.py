"""Lists the modules of the product that a process enters between two SIGUSR1. Python imports this file at its start.

QUIRE_TRACED is the root of the product, QUIRE_TRACE_OUT a folder: `PID.on` appears when the process records, `PID.txt`
has its modules.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT, OUT = os.environ["QUIRE_TRACED"] + "/", Path(os.environ["QUIRE_TRACE_OUT"])
NOT_THE_PRODUCT = (f"{ROOT}.venv/", f"{ROOT}tests/")
entered: set[str] = set()
is_on = False


def record(frame: FrameType, event: str, argument: object) -> None:
    name = frame.f_code.co_filename
    if is_on and event == "call" and name.startswith(ROOT) and not name.startswith(NOT_THE_PRODUCT):
        entered.add(name.removeprefix(ROOT))


def toggle(*_: object) -> None:
    global is_on
    is_on = not is_on
    own = OUT / str(os.getpid())
    if is_on:
        entered.clear()
        sys.setprofile(record)  # not before: it would slow down the imports of the main thread
        own.with_suffix(".on").touch()
    else:
        sys.setprofile(None)
        own.with_suffix(".part").write_text("\n".join(sorted(entered)))
        own.with_suffix(".part").rename(own.with_suffix(".txt"))


threading.setprofile(record)
signal.signal(signal.SIGUSR1, toggle)
