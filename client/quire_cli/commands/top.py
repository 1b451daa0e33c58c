"""`quire top`: the load of all schedulers and workers behind a gateway, live, in a terminal or as text."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from types import ModuleType
from typing import Any

from quire_client.connection.channel import DEFAULT_TARGET
from quire_client.errors import QuireError
from quire_client.sync.client import Client
from quire_client.types import Status

from quire_cli.commands.status import OPERATORS_ONLY
from quire_cli.commands.top_screen import SPARK_WIDTH, Look, RateMeter, Rates, View, screen
from quire_cli.connection import connect
from quire_cli.output import complain

TEXT_WIDTH = 80
TEXT_HEIGHT = 60
QUIT_KEYS = (ord("q"), ord("Q"), 27)  # 27: Escape


class Watch:
    """Reads the status repeatedly. A failed read keeps the last status and is shown as a problem."""

    def __init__(self, client: Client, target: str, timeout_s: float | None) -> None:
        self._client = client
        self._target = target
        self._timeout_s = timeout_s
        self._meter = RateMeter()
        self._history: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._status = Status((), 0)
        self._rates = Rates()

    def first(self) -> View:
        """The first view. Raises QuireError."""
        self._take(self._client.status(timeout_s=self._timeout_s))
        return self._view("")

    @property
    def is_summary(self) -> bool:
        return self._status.is_summary

    def next(self) -> View:
        try:
            self._take(self._client.status(timeout_s=self._timeout_s))
        except QuireError as error:
            return self._view(error.message.replace("\n", " "))
        return self._view("")

    def _take(self, status: Status) -> None:
        self._status, self._rates = status, self._meter.add(status, time.monotonic())
        self._history.append(self._rates.output_tokens_per_s)

    def _view(self, problem: str) -> View:
        clock = time.strftime("%H:%M:%S")
        return View(self._target, clock, self._status, self._rates, tuple(self._history), problem)


def top(args: argparse.Namespace) -> int:
    """Run until q or Ctrl-C, or for --count views."""
    with connect(args) as client:
        target = args.target or os.environ.get("QUIRE_TARGET") or DEFAULT_TARGET
        watch = Watch(client, target, args.timeout_s)
        view = watch.first()
        if watch.is_summary:
            complain(OPERATORS_ONLY)
            return 1
        curses = None if args.text or args.count else usable_curses()
        if curses is None:
            return print_views(watch, view, args)
        return int(curses.wrapper(run_screen, curses, watch, view, args.interval_s))


def usable_curses() -> ModuleType | None:
    """The module curses if this terminal can be used with it, else None."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        import curses
    except ImportError:  # Windows
        return None
    try:
        curses.setupterm()
    except curses.error:  # terminfo does not know this terminal
        return None
    return curses


def print_views(watch: Watch, view: View, args: argparse.Namespace) -> int:
    """Print one view per interval as plain text."""
    is_unicode = "utf" in (sys.stdout.encoding or "").lower()
    left = args.count
    while True:
        for line in screen(view, TEXT_WIDTH, TEXT_HEIGHT, is_unicode=is_unicode):
            print(line.text.rstrip())
        print(flush=True)
        left -= 1
        if left == 0:
            return 0
        time.sleep(args.interval_s)
        view = watch.next()


def run_screen(window: Any, curses: ModuleType, watch: Watch, view: View, interval_s: float) -> int:
    """Draw one view per interval until a key quits."""
    looks = _looks(curses)
    curses.curs_set(0)
    is_unicode = "utf" in (sys.stdout.encoding or "").lower()
    while True:
        due = time.monotonic() + interval_s
        _draw(window, curses, view, looks, is_unicode=is_unicode)
        while (left := due - time.monotonic()) > 0:
            window.timeout(max(1, int(1000 * left)))
            key = window.getch()
            if key in QUIT_KEYS:
                return 0
            if key == curses.KEY_RESIZE:
                _draw(window, curses, view, looks, is_unicode=is_unicode)
        view = watch.next()


def _looks(curses: ModuleType) -> dict[Look, int]:
    looks = {Look.PLAIN: 0, Look.TITLE: curses.A_BOLD, Look.HEAD: curses.A_REVERSE, Look.BAD: curses.A_BOLD}
    if curses.has_colors() and not os.environ.get("NO_COLOR"):
        curses.use_default_colors()
        curses.init_pair(1, curses.COLOR_RED, -1)
        looks[Look.BAD] = curses.color_pair(1)
    return looks


def _draw(window: Any, curses: ModuleType, view: View, looks: dict[Look, int], *, is_unicode: bool) -> None:
    height, width = window.getmaxyx()
    window.erase()
    for y, line in enumerate(screen(view, width, height, is_unicode=is_unicode)):
        text = line.text.ljust(width) if line.look is Look.HEAD else line.text
        try:
            # The last cell of the screen cannot be written without scrolling.
            window.addnstr(y, 0, text, width - (y == height - 1), looks[line.look])
        except curses.error:
            continue  # the terminal has become smaller meanwhile
    window.refresh()
