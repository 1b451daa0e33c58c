"""Starts services from a process that has imported their modules, because imports are nearly all the work of a start.

    test process -> nursery -> fork -> fork -> service

The first fork ends at once, and the test process, as the subreaper, becomes the parent of the service. So a service is
waited for, killed and measured like any other child. It ends when the test process ends, even if that is killed.

Processes of one nursery have the same hash seed. Those of `quire up`, of the pods in tests/chart and of the tests in
tests/unit start as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.processes.children import start_child

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.02
ADOPTED_WITHIN_S = 60.0


SERVICES = ("gateway_svc.service", "scheduler_svc.service", "worker_svc.service")
# Workers with a model. Other services are smaller without torch.
ENGINE = ("torch", "worker_svc.service", "worker_svc.engine.model_runner")


class Forked:
    """A service that a nursery has started: what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, command: list[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._command = command

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_service(
    command: list[str], log_path: Path, *, uses_torch: bool, **variables: str
) -> Forked | subprocess.Popen[bytes]:
    """Like `start_child`, but forks a process for `[sys.executable, "-m", MODULE, ...]`."""
    if sys.platform != "linux" or command[1] != "-m":
        return start_child(command, log_path, **variables)
    request = {"words": command[2:], "log": str(log_path), "variables": dict(os.environ) | variables}
    return Forked(_nursery(ENGINE if uses_torch else SERVICES).start(request), command)


class Nursery:
    """The process that has imported some modules. It is started by the first service of a test process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.processes.nursery", str(os.getpid()), *modules],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.close)

    def start(self, request: Mapping[str, object]) -> int:
        """The process id of a new service."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # only now: orphans of services are not children of the test
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def _nursery(modules: tuple[str, ...]) -> Nursery:
    return Nursery(modules)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def main() -> None:
    """Read a request per line, and print the process id of the service."""
    parent = int(sys.argv[1])
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for module in SERVICES:
        sys.modules.pop(module, None)  # a service runs it as __main__
    while line := sys.stdin.readline():
        request = json.loads(line)
        reader, writer = os.pipe()
        if middle := os.fork():
            os.close(writer)
            os.waitpid(middle, 0)
            with os.fdopen(reader) as pids:
                print(pids.read(), flush=True)
            continue
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        _become(request, parent)
        return


def _become(request: dict[str, object], parent: int) -> None:
    os.setsid()
    deadline = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.001)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    with open(os.devnull) as nothing, open(str(request["log"]), "ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    variables, words = request["variables"], request["words"]
    assert isinstance(variables, dict)
    assert isinstance(words, list)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
