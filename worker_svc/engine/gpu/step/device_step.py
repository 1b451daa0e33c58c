"""A step on its way to the device and back. Parts take part in it as in the steps of step.py:

    before     the step is checked: asks for hidden states, or for an end of the forward pass at the logits
    process    the forward pass is launched: changes the logits of S tokens
    sampled    the sampler is launched: tokens int32 [S], on the device
    launched   the step is launched: launches what comes after it
    reads      the step has ended: what the hooks before have launched is in host memory; any thread

A step without graphs ends at its logits, or is computed from hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from step_protocol.columns import I64, Bools
from step_protocol.messages import StepBatch, StepOutput
from worker_svc.engine.backend import SnapshotColumns
from worker_svc.engine.gpu.step.step_buffer import NO_SNAPSHOTS, StepColumns
from worker_svc.engine.step import CheckedStep, RowErrors

Head = Callable[[torch.Tensor], torch.Tensor]  # makes logits of hidden states [n, dim]


@dataclass(slots=True)
class StepResults:
    """The answer of a step that has ended, as far as it is read."""

    rows: I64  # [S]
    is_token: Bools  # [S]
    is_bad: Bools  # [S] tokens of rows that fail
    output: StepOutput
    errors: RowErrors

    @property
    def is_good(self) -> Bools:
        return self.is_token & ~self.is_bad


@dataclass(slots=True)
class DeviceStep:
    """What the parts of a step add to it."""

    batch: StepBatch
    plan: CheckedStep
    errors: RowErrors
    parts: Sequence[DevicePart]
    ends_at_logits: bool = False
    # Tokens whose hidden states are needed, and what reads these
    states: list[tuple[I64, Callable[[torch.Tensor, Head], None]]] = field(default_factory=list)
    reads: list[Callable[[StepResults], None]] = field(default_factory=list)  # in this order
    snapshots: SnapshotColumns = NO_SNAPSHOTS


@dataclass(slots=True)
class DeviceLogits:
    """The logits of a step that ends at them."""

    values: torch.Tensor  # [S, this rank's part of the vocabulary]
    columns: StepColumns
    kept: torch.Tensor  # int32 [S] rows of the samples that become tokens, once they are sampled


class DevicePart:
    """What one feature does in a step of a device; see `StepPart`. The defaults do nothing."""

    in_use: Any = True

    def before(self, step: DeviceStep) -> None: ...

    def process(self, step: DeviceStep, logits: DeviceLogits) -> None: ...

    def sampled(self, step: DeviceStep, logits: DeviceLogits, tokens: torch.Tensor) -> None: ...

    def launched(self, step: DeviceStep) -> None: ...
