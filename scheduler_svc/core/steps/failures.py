"""Whom a failed row takes with it: rows that read, or were to read, what it should have computed."""

from __future__ import annotations

from scheduler_svc.core.steps.step_plan import InFlightStep
from scheduler_svc.core.steps.worker_books import WorkerBooks


def rows_tainted_by(worker: WorkerBooks, failed: set[int], step: InFlightStep) -> list[int]:
    """Rows to compute again after these rows failed in this step: they read what a failed row was to compute.

    A failed row is among them if another one's failure explains its own. What a failed row was to fill is
    forgotten, and so is what rows that ended since were to fill: nobody can say what they read.
    """
    bad, flights = set(failed), (step, *worker.in_flight)
    while True:
        lost = {
            block: None if _has_ended(worker, row, f) else row
            for f in flights
            for row, fills in f.fills
            if row in bad or _has_ended(worker, row, f)
            for block, _ in fills
        }
        heirs = {
            child
            for f in flights
            for child, parent in f.forks
            if (parent in bad or _has_ended(worker, parent, f)) and not _has_ended(worker, child, f)
        }
        tainted = {row for row in worker.rows.active().tolist() if row in heirs or _reads(worker, row, lost)}
        if tainted <= bad:
            break
        bad |= tainted
    worker.pool.forget(list(lost))
    return sorted(tainted)


def _reads(worker: WorkerBooks, row: int, lost: dict[int, int | None]) -> bool:
    """One of the lost blocks is in the row's table, and it is not the one that was to fill it."""
    return any(lost.get(block, row) != row for block in worker.rows.blocks(row))


def _has_ended(worker: WorkerBooks, row: int, step: InFlightStep) -> bool:
    return bool(step.generation[row] != worker.rows.generation[row])
