"""The real core with real engines of a recurrent model: after every step, the bytes of each row's state are those of
a run that nothing disturbed.

Prompts share prefixes and arrive at random; chunks, batch mates, samples, small pools that preempt, few snapshots,
hits, drafts on one of two workers, and workers that are killed, so that their sequences move.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from random import Random

import pytest
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from scheduler_svc.workers.wire import step_batch_to_proto
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_from_proto
from tests.speculating import GivenDrafts, NoTimes
from tests.unit.engine.driver import Driver, seeded, u32
from tests.unit.engine.models import RECURRENT, make_model
from tests.unit.engine.test_engine_recurrent import BLOCK, load_small, state_of
from worker_svc.engine.rows.states import RowStates

MAX_TOKENS = 20
NUM_REQUESTS = 7


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ("qwen3_5", "bamba") else pytest.mark.deep) for name in RECURRENT],
)
def model_dir(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("states"), request.param)


@cache
def undisturbed(folder: Path, prompt: tuple[int, ...], seed: int, sample: int) -> tuple[list[int], dict[int, bytes]]:
    """The output of a sample that runs alone, one token per step, and its state after each position."""
    driver = Driver(load_small(folder))
    driver.open(0, list(prompt), seeded(seed), sample_index=sample)
    states = {}
    while len(driver.rows[0].output) < MAX_TOKENS:
        driver.step({0: 1})
        states[driver.rows[0].computed] = state_of(driver, 0)
    return driver.rows[0].output, states


class Worker:
    """One engine. It computes a step when its answer is read."""

    def __init__(self, folder: Path, name: str, epoch: int, rng: Random, expected: dict[bytes, list[int]]) -> None:
        """The worker b has drafts, of which some are right."""
        self.folder, self.name = folder, name
        sizes = {"num_blocks": rng.choice((9, 14, 40)), "max_num_batched_tokens": rng.choice((5, 16, 60))}
        drafts = {"speculate": "suffix", "max_drafts": 3} if name == "b" else {}
        self.runner = load_small(folder, max_model_len=9 * BLOCK, **sizes, **drafts)
        if self.runner._drafts is not None:
            self.runner._drafts._proposer = GivenDrafts(self.runner._rows, expected, 0.7)
            self.runner._drafts._times = NoTimes()
        info = self.runner.info
        self.capacity = WorkerCapacity(
            name, epoch, info.num_blocks, BLOCK, info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len,
            vocab_size=info.vocab_size, num_snapshots=info.num_snapshots, snapshot_tokens=rng.choice((1, 1000)),
        )  # fmt: skip
        self.queue: deque[StepBatch] = deque()
        self.sample_of: dict[int, tuple[SequenceGroup, int]] = {}  # by row

    def answer(self, step: StepBatch) -> StepOutput:
        message = step_batch_to_proto(step, worker_pb2.Fence())
        output = self.runner.execute(batch_from_proto(message))
        output.worker_id = self.name
        assert output.errors == []
        self.sample_of |= {opened.row: (opened.group, opened.sample_index) for opened in step.opens}
        for row in step.rows.tolist():
            end = int(self.runner._rows.states.positions[row])
            group, sample = self.sample_of[row]
            _, states = undisturbed(self.folder, tuple(group.prompt.tolist()), group.sampling.seed, sample)
            found = self.runner._pool.states.slots[row].numpy().tobytes()
            assert found == states[end], f"row {row} after {end} tokens of {group.request_id}"
        return output


class Run:
    """One random run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.now = folder, Random(seed), 0.0
        self.scheduler = Scheduler(SchedulerConfig(aging_s=0.1, root_salt=b"states"))
        self.workers: dict[str, Worker] = {}
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.expected: dict[bytes, list[int]] = {}  # outputs of first samples, by their prompt
        self.num_open = self.num_started = 0
        prefix = [self.rng.randrange(3, 200) for _ in range(4 * BLOCK)]
        self.prefixes = [prefix, prefix[: 2 * BLOCK + 3], []]
        for name in ("a", "b"):
            self.start(name)

    def start(self, name: str) -> None:
        self.num_started += 1
        self.workers[name] = worker = Worker(self.folder, name, self.num_started, self.rng, self.expected)
        self.scheduler.add_worker(worker.capacity)

    def kill(self, name: str) -> None:
        self.scheduler.remove_worker(name)
        self.start(name)

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes) + [rng.randrange(3, 200) for _ in range(rng.randint(1, 20))]
        number = len(self.groups)
        group = SequenceGroup(
            f"r{number}", u32(*prompt), StopCondition(MAX_TOKENS, ignore_eos=True), handle=number,
            n=rng.choice((1, 1, 2)), priority=rng.choice((0, 0, 1)),
            sampling=types_pb2.SamplingParams(temperature=1.0, seed=number),
        )  # fmt: skip
        self.groups.append(group)
        self.expected[group.prompt.tobytes()] = undisturbed(self.folder, tuple(prompt), number, 0)[0]
        self.num_open += 1
        self.take(self.scheduler.add_group(group, self.now))

    def take(self, deltas: Deltas) -> None:
        columns = (deltas.handles, deltas.sample_indices, deltas.token_ids)
        for handle, sample, token in zip(*(column.tolist() for column in columns), strict=True):
            self.outputs.setdefault((handle, sample), []).append(token)

    def event(self) -> None:
        rng = self.rng
        self.now += 0.01
        if len(self.groups) < NUM_REQUESTS and rng.random() < 0.2:
            self.submit()
        if rng.random() < 0.01:
            self.kill(rng.choice(list(self.workers)))
        for batch in self.scheduler.schedule(self.now):
            self.workers[batch.worker_id].queue.append(batch)
        busy = [worker for worker in self.workers.values() if worker.queue]
        if busy:
            worker = rng.choice(busy)
            self.take(self.scheduler.update(worker.answer(worker.queue.popleft()), self.now))

    def run(self) -> None:
        while len(self.groups) < NUM_REQUESTS or self.scheduler.has_work:
            self.event()
        for group in self.groups:
            for sample in range(group.n):
                tokens, _ = undisturbed(self.folder, tuple(group.prompt.tolist()), group.sampling.seed, sample)
                assert self.outputs[group.handle, sample] == tokens


def test_states_are_those_of_undisturbed_runs(model_dir):
    run = Run(model_dir, 0)
    run.run()
    counts = run.scheduler.stats().counts
    assert counts.snapshot_hits
    assert counts.snapshots_evicted
    assert counts.num_preemptions
    assert run.workers["b"].runner.draft_counts.accepted.sum() > 5


def test_a_state_that_keeps_wrong_drafts_is_found(model_dir, monkeypatch):
    settle = RowStates.settle_drafts

    def keep(self, plan, is_token):
        with monkeypatch.context() as patch:
            patch.setattr(self._pool, "copy", lambda sources, targets: None)
            settle(self, plan, is_token)

    monkeypatch.setattr(RowStates, "settle_drafts", keep)
    with pytest.raises(AssertionError, match=r"row \d+ after"):
        Run(model_dir, 0).run()


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 130))
def test_states_are_those_of_undisturbed_runs_with_more_seeds(model_dir, seed):
    Run(model_dir, seed).run()
