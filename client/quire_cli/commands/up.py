"""`quire up` and `quire serve`: the whole stack as local processes. Its output is lines of text or of JSON."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_client.connection.channel import DEFAULT_TARGET

from quire_cli.commands.stacks import RunningStack, is_serving
from quire_cli.output import complain, write
from quire_cli.stack.plan import Plan, SetupError, make_log_dir, make_plan, writing_to
from quire_cli.stack.supervisor import Service, Stack, StartFailedError

DEFAULT_TARGETS = (DEFAULT_TARGET, "127.0.0.1:50051")
SAMPLE_QUESTION = "What does os.path.join do?"


class JsonReporter:
    """One JSON line per event on stdout."""

    def note(self, text: str) -> None:
        self._line("model", message=text)

    def begin(self, plan: Plan) -> None:
        self._line("starting", model=plan.model, log_dir=str(plan.log_dir))

    def report(self, event: str, service: str, facts: dict[str, Any]) -> None:
        self._line(event, service=service, **facts)

    def serving(self, plan: Plan, facts: dict[str, Any]) -> None:
        self._line("serving", **facts)

    def draining(self) -> None:
        self._line("draining")

    def failed(self, error: StartFailedError, log_dir: Path) -> None:
        self._line("failed", service=error.name, message=str(error), log_tail=error.tail)

    def end(self) -> None:
        self._line("end")

    def _line(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), flush=True)


class TextReporter:
    """One line per event. On a terminal, the last line shows the percentage of the weights that is loaded."""

    def __init__(self) -> None:
        self._is_tty = sys.stdout.isatty()
        self._loading: dict[str, int] = {}
        self._printed: dict[str, int] = {}
        self._is_serving = False
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        self._line(f"model      {text}")

    def begin(self, plan: Plan) -> None:
        for note in (*plan.notes, f"logs       {plan.log_dir}"):
            self._line(note)
        self._line(f"starting   {', '.join(spec.name for spec in plan.specs)}")

    def report(self, event: str, service: str, facts: dict[str, Any]) -> None:
        handlers: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "progress": self._progress,
            "step": lambda name, facts: self._line(f"{name:<10} {facts['step']}"),
            "waiting": lambda name, facts: self._line(
                f"{name:<10} still starting: {''.join(facts['log_tail']) or '...'}"
            ),
            "ready": self._ready,
            "died": self._died,
            "stopped": lambda name, _: self._line(f"{name:<10} stopped"),
            "killed": lambda name, _: self._line(f"{name:<10} did not stop in time; killed"),
        }
        if event in handlers:
            handlers[event](service, facts)

    def serving(self, plan: Plan, facts: dict[str, Any]) -> None:
        self._is_serving = True
        target = "" if plan.target in DEFAULT_TARGETS else f" --target {plan.target}"
        target += f" --tls-ca {plan.trust.ca}" if plan.trust.ca else ""
        target += " --api-key KEY" if plan.trust.has_keys else ""
        question = SAMPLE_QUESTION if plan.model == "demo" else "Hello!"
        self._line(f"\nServing {plan.model} on {plan.target}. In another terminal:")
        self._line(f'  quire chat "{question}"{target}')
        if not plan.trust.has_keys:  # else for operators only, at --admin-listen
            self._line(f"  quire status{target}")
        for url in plan.http_urls:
            self._line(f"OpenAI-compatible HTTP API: {url}")
        self._line("Ctrl-C drains and stops.\n")

    def draining(self) -> None:
        self._line("\ndraining: running requests finish first; Ctrl-C again stops immediately")

    def failed(self, error: StartFailedError, log_dir: Path) -> None:
        self._clear()
        complain(f"{error}. The last lines of {log_dir / error.name}.log:" if error.tail else str(error))
        for line in error.tail:
            print(f"  {line}", file=sys.stderr)

    def end(self) -> None:
        self._line("all services stopped")

    def _progress(self, service: str, facts: dict[str, Any]) -> None:
        percent = int(facts["percent"])
        self._loading[service] = percent
        if self._is_tty:
            self._show_loading()
        elif percent // 25 > self._printed.get(service, 0) // 25:
            self._printed[service] = percent
            self._line(f"{service:<10} loading weights: {percent} %")

    def _ready(self, service: str, facts: dict[str, Any]) -> None:
        self._loading.pop(service, None)
        again = "ready again" if self._is_serving else "ready"
        self._line(f"{service:<10} {again:<8} {facts['address']:<22} {facts['seconds']:.1f} s")
        self._show_loading()

    def _died(self, service: str, facts: dict[str, Any]) -> None:
        self._line(f"{service:<10} {facts['how']}; restarting in {facts['restart_in_s']:.1f} s. Last log lines:")
        for line in facts["log_tail"]:
            self._line(f"           | {line}")

    def _show_loading(self) -> None:
        if self._is_tty and self._loading:
            parts = ", ".join(f"{name} {percent} %" for name, percent in sorted(self._loading.items()))
            sys.stdout.write(f"\r\x1b[Kloading weights: {parts}")
            sys.stdout.flush()

    def _line(self, text: str) -> None:
        self._clear()
        print(text, flush=True)

    def _clear(self) -> None:
        if self._is_tty:
            sys.stdout.write("\r\x1b[K")


Reporter = JsonReporter | TextReporter


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
