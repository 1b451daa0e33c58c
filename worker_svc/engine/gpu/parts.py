"""The features of the GPU engine, in the order in which a step calls them: the one place that lists them."""

from __future__ import annotations

from collections.abc import Callable

from step_protocol.features import TakenSnapshots
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.compute import StepCompute
from worker_svc.engine.gpu.step.device_step import DeviceLogits, DevicePart, DeviceStep
from worker_svc.engine.gpu.step.logprobs import DeviceCandidates, DevicePromptScores, DeviceSampledScores
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.states import RowStates
from worker_svc.engine.rows.tables import RowTables
from worker_svc.engine.sampling.grammars import RowGrammars
from worker_svc.engine.sampling.masking import apply_masks


def device_parts(
    compute: StepCompute, rows: OpenRows, tables: RowTables, group: Group, settle: Callable[[], None]
) -> list[DevicePart]:
    """`settle` makes the tokens of earlier steps known."""
    masks = [] if tables.grammars is None else [DeviceMasks(tables.grammars, rows.vocab_size, group, settle)]
    states = [] if tables.states is None else [DeviceStates(tables.states, settle)]
    return [
        *states,
        DevicePromptScores(tables.logprobs, compute.scorer),
        compute.pooling.serve(tables.pooling, rows.prompt_lens),
        DeviceSampledScores(tables.logprobs, compute.scorer),
        DeviceCandidates(tables.beams, compute.scorer),
        compute.processing,
        *masks,
    ]


class DeviceStates(DevicePart):
    """Keeps the positions of the rows' states, and takes their snapshots."""

    def __init__(self, states: RowStates, settle: Callable[[], None]) -> None:
        self._states, self._settle = states, settle

    def before(self, step: DeviceStep) -> None:
        if step.batch.part(TakenSnapshots) is not None:
            self._settle()  # the identity of a snapshot is made of its tokens
        step.snapshots = self._states.snapshots(step.batch, step.plan)

    def launched(self, step: DeviceStep) -> None:
        self._states.end(step.batch, step.plan, step.errors)


class DeviceMasks(DevicePart):
    """Lets each row sample what its grammar allows."""

    def __init__(self, grammars: RowGrammars, vocab_size: int, group: Group, settle: Callable[[], None]) -> None:
        self._grammars, self.in_use, self._settle = grammars, grammars.in_use, settle
        self._group, self._first_id = group, group.vocab_part(vocab_size).start

    def before(self, step: DeviceStep) -> None:
        step.ends_at_logits |= self._grammars.has_any(step.plan.sampling_rows, step.plan.sampled_positions)

    def process(self, step: DeviceStep, logits: DeviceLogits) -> None:
        """While the device computes the forward pass. It needs the tokens of all earlier steps."""
        rows, positions = step.plan.sampling_rows, step.plan.sampled_positions
        if not self._grammars.has_any(rows, positions):
            return
        self._settle()
        pending = self._grammars.start(rows, positions)
        if pending is None:
            return
        masks = pending.result()
        step.errors.add_all(masks.errors(rows))
        apply_masks(
            logits.values, masks, self._grammars.eos_token_ids, has_rules=True, first_id=self._first_id,
            max_over_ranks=self._group.all_reduce_max,
        )  # fmt: skip
