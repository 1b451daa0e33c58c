"""What requests cost: the time that their workers compute, and the blocks that they hold.

The time of a step (`forward_us`) is divided among its rows by the tokens that each of them computes. A row that was closed
after the step was sent pays nothing; the others pay for it, and if there are none, nobody does (`unattributed_us`). So

    sum over requests + unattributed_us = sum of forward_us of all answered steps

Blocks x seconds are measured when a message of steps is answered: each row pays for the blocks that it holds, for the time
since the answer before, or since the step was sent. A block that several rows share is paid by each of them.

In steady decode a step adds two columns and nothing per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import InFlightStep
from step_protocol.columns import Bools

MAX_TENANTS = 1000  # with totals of their own
OTHER_TENANTS = "other"


@dataclass(slots=True)
class Cost:
    """Microseconds of computation, and blocks x seconds."""

    processor_us: float = 0.0
    block_s: float = 0.0

    def add(self, processor_us: float, block_s: float) -> None:
        self.processor_us += processor_us
        self.block_s += block_s


@dataclass(slots=True)
class Costs:
    """The totals of one core."""

    processor_us: float = 0.0  # of all answered steps
    unattributed_us: float = 0.0  # of steps whose rows had all ended
    tenants: dict[str, Cost] = field(default_factory=dict)  # of sequences that have ended

    def add_step(self, table: RowTable, step: InFlightStep, forward_us: int, is_open: Bools | None) -> None:
        """Divide the time of an answered step. `is_open`: see `WorkerState.commit_fills`."""
        self.processor_us += forward_us
        if step.run is not None and is_open is None:
            table.processor_us += step.run.in_run * (forward_us / len(step.rows))
            return
        rows, shares = step.rows.astype(np.int64), step.query_lens.astype(np.float64)
        if is_open is not None:
            shares *= is_open[rows]
        total = float(shares.sum())
        if not total:
            self.unattributed_us += forward_us
            return
        table.processor_us[rows] += shares * (forward_us / total)

    def end(self, seq: Sequence) -> None:
        """Charge the tenant of a sequence that has ended."""
        tenant = seq.group.tenant_id
        if tenant not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        self.tenants.setdefault(tenant, Cost()).add(seq.processor_us, seq.block_s)


def add_block_time(table: RowTable, seconds: float) -> None:
    """Charge all rows for the blocks that they held during this time. The values of unused rows have no meaning."""
    held = table.num_blocks if table.blocks_before is None else table.num_blocks - table.first_block
    table.block_s += held * seconds
