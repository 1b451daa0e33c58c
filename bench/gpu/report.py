"""Results of the GPU benchmark, and the timing of kernels."""

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

REPEATS = 20
COLUMNS = (
    ("ms", "{:.4f}"),
    ("gb_s", "{:.0f}"),
    ("of_bandwidth", "{:.0%}"),
    ("tflops", "{:.1f}"),
    ("of_matmul", "{:.0%}"),
)


class OutOfTimeError(Exception):
    """The time of a section is over. Its rows so far are kept."""


class Report:
    """Collects and prints rows, and relates them to the measured ceilings of the device. It does not initialize the
    device, so that forked processes can."""

    def __init__(self, *, is_smoke: bool, scratch: Path | None = None) -> None:
        self.is_smoke = is_smoke
        self.out = Path()  # for other files than the table
        self.scratch = scratch or Path(tempfile.gettempdir())  # files that sections share
        self.ends_at = math.inf  # by the monotonic clock
        self.tell: Callable[[dict[str, Any]], None] = lambda row: None
        self.device = torch.device("cpu" if is_smoke else "cuda")
        self.dtype = torch.float32 if is_smoke else torch.bfloat16
        self.tolerance = 1e-5 if is_smoke else 8e-3  # against float32 references
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self.done: list[str] = []  # sections that need not run again
        self.cuts: list[str] = []  # sections that ran out of time, once for each time
        self.section = ""
        self.was_cut = False  # whether the section left out rows for lack of time
        self.bandwidth = self.tflops = float("nan")  # bytes/s and FLOP/s, of this run
        self.seconds = 0.0  # sum over all commands
        self.started = time.monotonic()

    def begin(self, section: str) -> None:
        """Starts a section: its rows of an earlier command are removed."""
        self.section, self.was_cut = section, False
        self.rows = [row for row in self.rows if row["by"] != section]

    def message(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """The message that a section's process sends with every row."""
        return row, self.figures, self.bandwidth, self.tflops, self.was_cut

    def receive(self, message: tuple[Any, ...]) -> dict[str, Any]:
        """Takes over such a message; returns the row."""
        row, self.figures, self.bandwidth, self.tflops, self.was_cut = message
        return dict(row)

    @property
    def failed(self) -> list[str]:
        return [f"{row['section']}: {row['name']}" for row in self.rows if row["ok"] is False]

    def row(
        self,
        section: str,
        name: str,
        *,
        ok: bool | None = None,
        ms: float | None = None,
        num_bytes: float = 0,
        flop: float = 0,
        note: str = "",
    ) -> None:
        """Adds a row; bytes and FLOP are also reported as fractions of the device's ceilings. Raises OutOfTimeError
        afterwards if the time of the section is over."""
        found = {"section": section, "name": name, "ok": ok, "ms": ms, "note": note, "by": self.section or section}
        if ms and num_bytes:
            found |= {"gb_s": num_bytes / ms / 1e6, "of_bandwidth": num_bytes / ms * 1e3 / self.bandwidth}
        if ms and flop:
            found |= {"tflops": flop / ms / 1e9, "of_matmul": flop / ms * 1e3 / self.tflops}
        self.rows.append(found)
        verdict = {None: "", True: "ok", False: "FAIL"}[ok]
        time_text = f"{ms:10.4f} ms" if ms else " " * 13
        extra = " ".join(
            f"{key} {found[key]:.3g}" for key in ("gb_s", "of_bandwidth", "tflops", "of_matmul") if key in found
        )
        elapsed = time.monotonic() - self.started
        print(f"{elapsed:6.1f} s {section:18s} {name:44s} {verdict:5s}{time_text} {extra} {note}", flush=True)
        self.tell(found)
        if self.seconds_left() < 0:
            raise OutOfTimeError

    def seconds_left(self) -> float:
        """Seconds until the end of the section."""
        return self.ends_at - time.monotonic()

    def time_ms(self, calls: Sequence[Callable[[], object]], repeats: int = REPEATS) -> float:
        """Milliseconds per call: the median of replays of a graph of all calls. Calls should use different memory, so
        that the L2 cache does not serve them."""
        if self.is_smoke:
            started = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - started) * 1e3
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(calls))
        return statistics.median(times)

    def synchronize(self) -> None:
        if not self.is_smoke:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Frees memory of the previous section."""
        gc.collect()
        if not self.is_smoke:
            torch.cuda.empty_cache()

    def summary(self) -> dict[str, Any]:
        return {**self.figures, "failed": self.failed, "num_rows": len(self.rows), "seconds": self.seconds}

    def write(self, folder: Path, name: str) -> None:
        """Writes NAME.json with everything and NAME.md with the table. A file is never seen half-written."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"summary": self.summary(), "rows": self.rows, "figures": self.figures, "done": self.done,
                 "cuts": self.cuts, "bandwidth": self.bandwidth, "tflops": self.tflops}  # fmt: skip
        lines = ["| section | what | | ms | GB/s | of copy | TFLOP/s | of matmul | note |", "|" + " --- |" * 9]
        for row in self.rows:
            cells = [row["section"], row["name"], {None: "", True: "ok", False: "**FAIL**"}[row["ok"]]]
            cells += [_number(row.get(key), text) for key, text in COLUMNS]
            lines.append("| " + " | ".join([*cells, row["note"]]) + " |")
        for suffix, text in ((".json", json.dumps(state, indent=1)), (".md", "\n".join(lines) + "\n")):
            unfinished = folder / f"{name}{suffix}.new"
            unfinished.write_text(text)
            unfinished.replace(folder / f"{name}{suffix}")

    def restore(self, file: Path) -> None:
        """Continues from the results of an earlier command, if there are any."""
        if not file.exists():
            return
        state = json.loads(file.read_text())
        self.rows, self.figures = state["rows"], state["figures"]
        self.done, self.cuts = state["done"], state["cuts"]
        self.bandwidth, self.tflops = state["bandwidth"], state["tflops"]
        self.seconds = state["summary"]["seconds"]


def _number(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN counts as infinite."""
    found, expected = found.float(), expected.float()
    error = ((found - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")
