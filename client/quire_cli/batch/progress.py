"""The progress of a batch on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import shutil
import sys
import time

from quire_cli.batch.run import Counts

LINE_INTERVAL_S = 10.0
BAR_WIDTH = 24


class Progress:
    """Shows the counts of a run. `num_before`: requests that an earlier run has answered."""

    def __init__(self, num_before: int) -> None:
        self._num_before = num_before
        self._is_tty = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown_at = self._started
        self._has_warned = False

    def show(self, counts: Counts) -> None:
        now = time.monotonic()
        if self._is_tty:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{self.text(counts, now - self._started)[:width]}")
            sys.stderr.flush()
        elif counts.num_retries and not self._has_warned:
            self._has_warned = True
            print(f"no answer yet, trying again: {counts.last_error}", file=sys.stderr, flush=True)
        elif now - self._shown_at >= LINE_INTERVAL_S:
            self._shown_at = now
            print(self.text(counts, now - self._started), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._is_tty:
            sys.stderr.write("\r\x1b[K")

    def text(self, counts: Counts, elapsed_s: float) -> str:
        """One line: done of total, rates, remaining time, errors."""
        total = self._num_before + counts.num_total
        done = self._num_before + counts.num_answered
        parts = [f"{done}/{total} {_bar(done / total)} {100 * done // total} %"]
        if counts.num_answered and elapsed_s > 0:
            rate = counts.num_answered / elapsed_s
            remaining_s = (counts.num_total - counts.num_answered) / rate
            parts.append(f"{rate:.1f} requests/s, {counts.output_tokens / elapsed_s:.0f} tokens/s")
            parts.append(f"{_duration(remaining_s)} left")
        if counts.num_errors:
            parts.append(f"{counts.num_errors} error{'s' if counts.num_errors > 1 else ''}")
        if counts.num_retries:
            parts.append(f"{counts.num_retries} retr{'ies' if counts.num_retries > 1 else 'y'}: {counts.last_error}")
        return ", ".join(parts)


def _bar(fraction: float) -> str:
    filled = int(BAR_WIDTH * fraction)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
