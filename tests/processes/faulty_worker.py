"""quire-worker with a device that fails once. Steps are launched ahead of their results, as on a GPU.

python -m tests.processes.faulty_worker --fault launch --executor sim ...    (other flags: quire-worker)
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable

from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError, RowErrorCode
from worker_svc import service
from worker_svc.engine.runner import Runner

FAULTS = ("launch", "result", "nan", "memory", "hang")
STEPS_BEFORE = 30
CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


class HangingStep:
    """A launched step whose result never comes."""

    def result(self) -> StepOutput:
        threading.Event().wait()
        raise RuntimeError("unreachable")


class Launched:
    """A launched step. `result` returns its output or raises its error."""

    def __init__(self, output: StepOutput, error: Exception | None) -> None:
        self._output = output
        self._error = error

    def result(self) -> StepOutput:
        if self._error is not None:
            raise self._error
        return self._output


class FaultyDevice(Runner):
    """A runner of simulated steps that fails once, at step STEPS_BEFORE."""

    launches = True

    def __init__(self, runner: Runner, fault: str) -> None:
        self._runner = runner
        self._fault = fault
        self._num_steps = 0
        self.info = runner.info
        self.adapters = runner.adapters
        self.execute = runner.execute
        self.committed_blocks = runner.committed_blocks
        self.forget_prefixes = runner.forget_prefixes
        self.movable_blocks = runner.movable_blocks
        self.reset_rows = runner.reset_rows
        self.rows_used = runner.rows_used

    def launch(self, batch: StepBatch) -> Launched | HangingStep:
        self._num_steps += bool(len(batch.rows))
        is_due = self._num_steps == STEPS_BEFORE and bool(len(batch.rows))
        if is_due and self._fault == "launch":
            raise RuntimeError(CUDA_ERROR)
        output = self._runner.execute(batch)
        if not is_due:
            return Launched(output, None)
        self._num_steps += 1
        if self._fault == "hang":
            return HangingStep()
        if self._fault == "result":
            return Launched(output, RuntimeError(CUDA_ERROR))
        if self._fault == "nan":
            return Launched(_without(output, 1, RowErrorCode.NAN), None)
        return Launched(_without(output, len(output.rows), RowErrorCode.INTERNAL), None)


def _without(output: StepOutput, count: int, code: RowErrorCode) -> StepOutput:
    """Fail the first rows, as a runner reports NaN logits or a step that ran out of memory."""
    errors = [RowError(int(row), "planted", code) for row in output.rows[:count]]
    return StepOutput(output.step_id, output.rows[count:], output.token_ids[count:], errors, output.forward_us)


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    own, others = parser.parse_known_args()
    make: Callable[..., Runner] = service.make_runner
    service.make_runner = lambda *args: FaultyDevice(make(*args), own.fault)
    service.main(others)


if __name__ == "__main__":
    main()
