"""`quire up` and `quire serve`: the whole stack as local processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire_cli.output import complain, write
from quire_cli.stack.plan import Plan, SetupError, make_log_dir, make_plan, writing_to
from quire_cli.stack.reporters import JsonReporter, Reporter, TextReporter
from quire_cli.stack.running import RunningStack, is_serving
from quire_cli.stack.supervisor import Service, Stack, StartFailedError

POLL_S = 0.1


def run(args: argparse.Namespace) -> int:
    try:
        return _detach(args) if args.detach else _run(args)
    except SetupError as error:
        complain(str(error))
        return 1


def _run(args: argparse.Namespace) -> int:
    reporter = JsonReporter() if args.json else TextReporter()
    if args.ready_file:
        with writing_to("ready-file", Path(args.ready_file)):
            tempfile.TemporaryFile(dir=Path(args.ready_file).parent).close()
    try:
        plan = make_plan(args, reporter.note)
        return asyncio.run(_serve(plan, args, reporter))
    finally:
        if args.ready_file:
            Path(args.ready_file).unlink(missing_ok=True)


def _detach(args: argparse.Namespace) -> int:
    """Run the same command in a session of its own, and show its output until it serves or ends."""
    log_dir = make_log_dir(args.log_dir)
    words = [word for word in sys.argv[1:] if word != "--detach"]
    command = [sys.executable, "-P", "-m", "quire_cli", *words, "--log-dir", str(log_dir)]
    with (log_dir / "up.log").open("w+") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with (log_dir / "up.log").open() as shown:
            try:
                while child.poll() is None and not is_serving(child.pid):
                    write(shown.read())
                    time.sleep(POLL_S)
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
            write(shown.read())
    if child.returncode is None:
        print(f"detached (process {child.pid}): `quire ps`, `quire logs`, `quire stop`")
    return child.returncode or 0


async def _serve(plan: Plan, args: argparse.Namespace, reporter: Reporter) -> int:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stack = Stack(plan.specs, plan.log_dir, reporter.report)
    reporter.begin(plan)
    entry = RunningStack(state="starting", **_facts(plan))
    running = asyncio.create_task(stack.run())
    try:
        if await _ready_before(stack, running, stopping):
            _announce(plan, stack, args.ready_file, reporter)
            entry.update(state="serving")
            await _either(running, stopping)
        if running.done():
            running.result()  # raises the exception that ended it
        reporter.draining()
        entry.update(state="draining")
        await stack.stop(args.drain_timeout_s, hurry)
        await running
    except StartFailedError as error:
        reporter.failed(error, plan.log_dir)
        return 1
    finally:
        plan.trust.delete()
        entry.close()
    reporter.end()
    if plan.is_log_dir_temporary:
        shutil.rmtree(plan.log_dir, ignore_errors=True)  # kept after a failure
    return 0


async def _ready_before(stack: Stack, running: asyncio.Task[None], stopping: asyncio.Event) -> bool:
    """Wait until the stack is ready, fails, or a signal arrives. True if it is ready."""
    ready = asyncio.create_task(stack.wait_ready())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([ready, running, stop], return_when=asyncio.FIRST_COMPLETED)
    is_ready = ready.done()
    for task in (ready, stop):
        task.cancel()
    return is_ready


async def _either(running: asyncio.Task[None], stopping: asyncio.Event) -> None:
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()


def _announce(plan: Plan, stack: Stack, ready_file: str | None, reporter: Reporter) -> None:
    facts = _facts(plan) | {"services": [_service_facts(service) for service in stack.services]}
    if plan.trust.ca is not None:
        facts["tls_ca"] = str(plan.trust.ca)
    if ready_file:
        scratch = Path(f"{ready_file}.{os.getpid()}")
        scratch.write_text(json.dumps(facts))
        scratch.replace(ready_file)  # atomic: a reader never sees a partial file
    reporter.serving(plan, facts)


def _facts(plan: Plan) -> dict[str, Any]:
    http = list(plan.http_urls)
    return {"target": plan.target, "http": http, "model": plan.model, "log_dir": str(plan.log_dir)}


def _service_facts(service: Service) -> dict[str, Any]:
    spec = service.spec
    facts = {"name": spec.name, "address": spec.address, "pid": service.pid, "log": str(service.log_path)}
    return facts | ({"metrics": f"http://{spec.metrics}/metrics"} if spec.metrics else {})
