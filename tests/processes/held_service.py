"""A gateway or scheduler whose event loop is held for HELD_S by each SIGUSR1, with Python's lock.

python -m tests.processes.held_service --listen HOST:PORT --service gateway ...    (other flags: those of the service)
"""

from __future__ import annotations

import argparse
import ctypes
import signal
from typing import Any

import gateway_svc.service
import scheduler_svc.service

HELD_S = 6
MAINS = {"gateway": gateway_svc.service.main, "scheduler": scheduler_svc.service.main}


def hold(*_: Any) -> None:
    ctypes.PyDLL(None).sleep(HELD_S)  # PyDLL keeps the lock, so no thread of Python runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--service", choices=MAINS, required=True)
    args, flags = parser.parse_known_args()
    signal.signal(signal.SIGUSR1, hold)
    MAINS[args.service](flags)
