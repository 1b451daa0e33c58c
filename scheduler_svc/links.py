"""Interfaces of the step loop to its two kinds of peers. No method blocks or raises."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.deltas import Deltas
from scheduler_svc.core.features.adapters import AdapterSwap
from step_protocol.messages import StepBatch
from svc_common.errors import QuireError


class WorkerLink(Protocol):
    """One lease of one worker. A new lease of the same worker is a new link, so late answers belong to the old link."""

    @property
    def worker_id(self) -> str: ...

    @property
    def worker_epoch(self) -> int: ...

    @property
    def address(self) -> str: ...

    def send(self, batch: StepBatch) -> None:
        """Queue a step for the worker. A failure is reported with `StepLoop.worker_lost`."""

    def swap_adapter(self, swap: AdapterSwap) -> None:
        """Make an adapter resident. The end is reported with `StepLoop.adapter_swapped`."""

    def close(self, reason: str) -> None:
        """End the lease, because the worker is drained, broke the protocol or was refused."""


class GatewayLink(Protocol):
    """Sends replies and deltas to one gateway."""

    def reply(self, handle: int, error: QuireError | None) -> None:
        """Reply to one Submit: queued (None) or refused."""

    def deliver(self, deltas: Deltas) -> None:
        """Send new tokens and finishes of this gateway's requests. They may be merged with later ones."""
