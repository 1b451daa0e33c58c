"""`quire up` and `quire serve`: the whole stack as local processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from quire_cli.output import complain
from quire_cli.stack.plan import Plan, SetupError, make_plan
from quire_cli.stack.reporters import JsonReporter, Reporter, TextReporter
from quire_cli.stack.supervisor import Service, Stack, StartFailedError


def run(args: argparse.Namespace) -> int:
    reporter = JsonReporter() if args.json else TextReporter()
    try:
        plan = make_plan(args, reporter.note)
        return asyncio.run(_serve(plan, args, reporter))
    except (SetupError, OSError) as error:
        complain(str(error))
        return 1
    finally:
        if args.ready_file:
            Path(args.ready_file).unlink(missing_ok=True)


async def _serve(plan: Plan, args: argparse.Namespace, reporter: Reporter) -> int:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stack = Stack(plan.specs, plan.log_dir, reporter.report)
    reporter.begin(plan)
    running = asyncio.create_task(stack.run())
    try:
        if await _ready_before(stack, running, stopping):
            _announce(plan, stack, args.ready_file, reporter)
            await _either(running, stopping)
        if running.done():
            running.result()  # raises the exception that ended it
        reporter.draining()
        await stack.stop(args.drain_timeout_s, hurry)
        await running
    except StartFailedError as error:
        reporter.failed(error, plan.log_dir)
        return 1
    finally:
        plan.trust.delete()
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
    services = [_service_facts(service) for service in stack.services]
    facts = {
        "target": plan.target,
        "http": list(plan.http_urls),
        "model": plan.model,
        "log_dir": str(plan.log_dir),
        "services": services,
    }
    if plan.trust.ca is not None:
        facts["tls_ca"] = str(plan.trust.ca)
    if ready_file:
        scratch = Path(f"{ready_file}.{os.getpid()}")
        scratch.write_text(json.dumps(facts))
        scratch.replace(ready_file)  # atomic: a reader never sees a partial file
    reporter.serving(plan, facts)


def _service_facts(service: Service) -> dict[str, Any]:
    spec = service.spec
    facts = {"name": spec.name, "address": spec.address, "pid": service.pid, "log": str(service.log_path)}
    return facts | ({"metrics": f"http://{spec.metrics}/metrics"} if spec.metrics else {})
