"""The output of `quire up`: lines of text or of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_client.connection.channel import DEFAULT_TARGET

from quire_cli.output import complain
from quire_cli.stack.plan import Plan
from quire_cli.stack.supervisor import StartFailedError

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
