"""What requests cost: the time that their workers compute, and the blocks that they hold.

The time of a step (`forward_us`) is divided among its rows by the tokens that each of them computes. A row that was
closed after the step was sent pays nothing: the others pay for it. If there are none, the time is unattributed. So

    sum over requests + unattributed_us = sum of forward_us of all answered steps

Blocks x seconds: the time from a row's opening to its end, times the mean of the blocks that it held then. A block that
several rows share is paid by each of them.

In steady decode a step adds one number for all rows of the run (`owed_us`). It is added to their column when the run
changes or a row ends.
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
            if step.run is not table.paying_run:
                table.pay()
                table.paying_run = step.run
            table.owed_us += forward_us / len(step.rows)
            return
        rows = step.rows.astype(np.int64)
        shares = step.query_lens if is_open is None else step.query_lens * is_open[rows]
        if total := int(shares.sum()):
            table.processor_us[rows] += shares * (forward_us / total)
        else:
            self.unattributed_us += forward_us

    def end(self, seq: Sequence) -> None:
        """Charge the tenant of a sequence that has ended."""
        cost = self.tenants.get(seq.group.tenant_id)
        if cost is None:
            name = seq.group.tenant_id if len(self.tenants) < MAX_TENANTS else OTHER_TENANTS
            cost = self.tenants.setdefault(name, Cost())
        cost.processor_us += seq.processor_us
        cost.block_s += seq.block_s
