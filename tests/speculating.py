"""The scheduler's core, the worker protocol and an engine in one thread, for tests of speculation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2

from request_fields.fields import StopCondition
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import NO_FEATURES, Features, SequenceGroup
from scheduler_svc.workers.wire import step_batch_to_proto
from step_protocol.proto import batch_from_proto, output_from_proto, output_to_proto
from step_protocol.types import CacheGroup
from tests.invariants import check_scheduler
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.draft_len import StepTimes
from worker_svc.engine.speculation.drafts import RowDrafts
from worker_svc.engine.step_runner import StepRunner


class GivenDrafts:
    """Proposes what tests say: `expected` has the whole output of a request, by its prompt. Some drafts are wrong."""

    name = "given"
    draft_s = 0.0

    def __init__(self, rows: OpenRows, expected: dict[bytes, list[int]], right: float, seed: int = 1) -> None:
        self._rows, self._expected, self._right = rows, expected, right
        self._rng = np.random.default_rng(seed)

    def propose(self, rows: np.ndarray, counts: np.ndarray) -> list[list[int]]:
        return [self._propose(row, most) for row, most in zip(rows.tolist(), counts.tolist(), strict=True)]

    def _propose(self, row: int, most: int) -> list[int]:
        prompt, output = self._rows.history(row)
        known = self._expected.get(prompt.tobytes(), [])
        found = known[len(output) : len(output) + most]
        found += self._rng.integers(0, 200, most - len(found)).tolist()
        return [id_ if self._rng.random() < self._right else int(self._rng.integers(0, 200)) for id_ in found]

    def close(self, row: int) -> None: ...


class NoTimes(StepTimes):
    """Further tokens and drafts take no time, so how much is drafted does not depend on the speed of a machine."""

    def observe(self, num_tokens: int, seconds: float) -> None: ...

    def is_stale(self, num_rows: int) -> bool:
        return False

    def of_rows(self, num_rows: int) -> float:
        return math.inf

    def token_cost(self, num_rows: int) -> float:
        return 0.0


def speculate(runner: StepRunner, expected: dict[bytes, list[int]], right: float, most: int = 4) -> RowDrafts:
    """Let a runner that has no drafts compute these, in each step."""
    runner._rows._parts = [part for part in runner._rows._parts if not isinstance(part, RowDrafts)]
    drafts = RowDrafts(runner._rows, most, lambda rows: GivenDrafts(rows, expected, right), runner._tables)
    drafts._times = NoTimes()
    runner._drafts = drafts
    return drafts


@dataclass
class Answer:
    """A gateway's tokens of one sample."""

    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    logprobs: list[tuple[float, ...]] = field(default_factory=list)


class System:
    """One scheduler and one worker. `depth` messages are in flight."""

    def __init__(self, runner: StepRunner, depth: int = 2, **config: Any) -> None:
        info = runner.info
        self.runner, self.depth = runner, depth
        self.num_steps = 0
        self.scheduler = Scheduler(SchedulerConfig(eos_token_ids=frozenset(info.eos_token_ids), **config))
        self.scheduler.add_worker(
            WorkerCapacity(
                "w", 1, info.num_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens,
                info.max_model_len, pipeline_depth=depth, vocab_size=info.vocab_size, num_snapshots=info.num_snapshots,
                snapshot_tokens=info.snapshot_tokens,
                groups=tuple(CacheGroup(one.attention_window, one.num_blocks) for one in info.groups),
            )
        )  # fmt: skip
        runner.reset_rows()
        self._handles = itertools.count()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._step_ids = itertools.count(1)

    def add(
        self,
        prompt: list[int],
        stop: StopCondition,
        n: int = 1,
        options: Mapping[str, Any] | None = None,
        features: Features = NO_FEATURES,
        **sampling: Any,
    ) -> int:
        handle = next(self._handles)
        self.scheduler.add_group(
            SequenceGroup(
                request_id=f"r{handle}", prompt=np.array(prompt, np.uint32), stop=stop, owner=0, handle=handle, n=n,
                options=worker_pb2.RowOpen(sampling=types_pb2.SamplingParams(**sampling), **options or {}),
                features=features,
            ),
            0.0,
        )  # fmt: skip
        self._answers |= {(handle, sample): Answer() for sample in range(n)}
        return handle

    def run(self) -> dict[tuple[int, int], Answer]:
        """Run until all requests have ended. Answers are read as late as the pipeline allows."""
        waiting: list[Any] = []
        for _ in range(100_000):
            for batch in self.scheduler.schedule(0.0):
                waiting += [self._execute(step) for step in (batch, *batch.then)]
            check_scheduler(self.scheduler)
            if not waiting:
                return self._answers
            self._update(output_from_proto(self._answered(waiting.pop(0))))
        raise AssertionError("the requests did not end")

    def _execute(self, batch: Any) -> Any:
        """The output of a step, or the step that a runner has launched."""
        self.num_steps += 1
        message = step_batch_to_proto(batch, worker_pb2.Fence())
        sent = batch_from_proto(worker_pb2.StepBatch.FromString(message.SerializeToString()))
        return self.runner.launch(sent) if self.runner.launches else self.runner.execute(sent)

    def _answered(self, step: Any) -> worker_pb2.StepOutput:
        output = step.result() if hasattr(step, "result") else step
        message = output_to_proto(output, worker_epoch=1, queue_us=0)
        assert not message.errors, message.errors
        return worker_pb2.StepOutput.FromString(message.SerializeToString())

    def _update(self, output: Any) -> None:
        output.worker_id = "w"
        deltas = self.scheduler.update(output, 0.0)
        columns = deltas.handles, deltas.sample_indices, deltas.offsets, deltas.token_ids
        start = 0
        for i, (handle, sample, offset, token) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            answer = self._answers[handle, sample]
            assert offset == len(answer.token_ids)
            assert not answer.reason
            answer.token_ids.append(token)
            if deltas.logprobs is not None and (count := int(deltas.logprobs.lens[i])):
                end = start + count
                answer.logprobs.append((*deltas.logprobs.logprobs[start:end], *deltas.logprobs.token_ids[start:end]))
                start = end
        for finished in deltas.finished:
            self._answers[finished.group.handle, finished.sample_index].reason = finished.reason.name
