"""Snapshots of the states of recurrent layers, from which rows that open later may start."""

from __future__ import annotations

from dataclasses import dataclass

from step_protocol.columns import U32, Columns


@dataclass(frozen=True, slots=True)
class TakenSnapshots(Columns):
    """Snapshots that a step takes."""

    FIELDS = ("snapshot_rows", "snapshot_positions", "snapshot_slots")

    rows: U32  # [N] rows whose states are kept
    positions: U32  # [N] tokens of the row that the state includes, the last one in this step
    slots: U32  # [N] where the state is kept
