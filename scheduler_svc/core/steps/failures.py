"""The rows that a failed row affects: rows that read, or would have read, blocks that it failed to fill."""

from __future__ import annotations

from typing import NamedTuple

from scheduler_svc.core.steps.step_plan import InFlightStep
from scheduler_svc.core.steps.worker_books import WorkerBooks


class Taint(NamedTuple):
    """The rows and blocks that cannot be trusted after rows failed."""

    rows: list[int]  # must be computed again, because they read blocks of failed rows
    blocks: list[int]  # have unknown content, so their digests must be removed


def taint_of(worker: WorkerBooks, failed: set[int], step: InFlightStep) -> Taint:
    """The rows and blocks that are tainted by the failure of these rows in this step.

    A failed row is tainted itself if the failure of another row explains its failure. The tainted blocks are the blocks
    that failed rows were to fill, and the blocks that rows filled which have ended since: these may have read anything.
    """
    bad, steps = set(failed), (step, *worker.in_flight)
    while True:
        lost = _lost_blocks(bad, steps)
        forked = _forks_of(bad, steps)
        tainted = {row for row in worker.rows.active().tolist() if row in forked or _reads(worker, row, lost)}
        if tainted <= bad:
            return Taint(sorted(tainted), list(lost))
        bad |= tainted


def _lost_blocks(bad: set[int], steps: tuple[InFlightStep, ...]) -> dict[int, int | None]:
    """The blocks that bad and ended rows would have filled, each with its row, or None if the row has ended."""
    return {
        block: None if row in step.closed else row
        for step in steps
        for row, fills in step.fills
        if row in bad or row in step.closed
        for block, _ in fills
    }


def _forks_of(bad: set[int], steps: tuple[InFlightStep, ...]) -> set[int]:
    """Live rows that forked from a bad or ended row."""
    return {
        child
        for step in steps
        for child, parent in step.forks
        if (parent in bad or parent in step.closed) and child not in step.closed
    }


def _reads(worker: WorkerBooks, row: int, lost: dict[int, int | None]) -> bool:
    """Whether the row's table has a lost block that another row was to fill. Freed entries count too: the row may have
    read their blocks. If they are blocks of other rows now, the row is computed again without need.
    """
    r = worker.rows
    return any(lost.get(block, row) != row for block in r.table[row, : r.num_blocks[row]].tolist())
