"""The two kinds of peers that the step loop talks to, as it sees them. Nothing here blocks or raises."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.messages import Deltas, StepBatch
from svc_common.errors import QuireError


class WorkerLink(Protocol):
    """One lease of one worker. A new lease of the same worker is a new link, so late answers name the old one."""

    @property
    def worker_id(self) -> str: ...

    @property
    def worker_epoch(self) -> int: ...

    @property
    def address(self) -> str: ...

    def send(self, batch: StepBatch) -> None:
        """Queue a step for the worker. `StepLoop.worker_lost` reports a failure."""

    def close(self, reason: str) -> None:
        """End the lease: the worker is drained, broke the protocol or does not fit."""


class GatewayLink(Protocol):
    """The way back to one gateway."""

    def reply(self, handle: int, error: QuireError | None) -> None:
        """One Submit was queued (None) or refused."""

    def deliver(self, deltas: Deltas) -> None:
        """New tokens and finishes of this gateway's requests. They may be merged with later ones."""
