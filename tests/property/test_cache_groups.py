"""The real core with real engines of models whose layers have different windows: after any disturbance, the tokens are
those of transformers, and of a run alone in a pool whose blocks hold all layers.

Prompts of several windows share prefixes and arrive at random; chunks of several windows, batch mates, samples, small
pools that preempt, hits, drafts on one of two workers, and workers that are killed or whose pools a new scheduler
adopts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.messages import CachedBlock, Deltas
from scheduler_svc.core.policy import TierKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from scheduler_svc.workers.wire import capacity_from_proto, step_batch_to_proto
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_from_proto
from tests.invariants import check_scheduler
from tests.moved_blocks import MovedBlocks
from tests.speculating import GivenDrafts, NoTimes
from tests.unit.engine.driver import Driver, seeded, u32
from tests.unit.engine.models import load_reference, make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.drafts import RowDrafts
from worker_svc.wire import capacity_to_proto

BLOCK, MAX_LEN, MAX_TOKENS, NUM_REQUESTS = 16, 320, 20, 6
MODELS = {"gpt_oss": {"intermediate_size": 64, "num_hidden_layers": 4}, "gemma3": {}, "llama4": {}}


@pytest.fixture(
    scope="module", params=[name if name == "gemma3" else pytest.param(name, marks=pytest.mark.deep) for name in MODELS]
)
def model_dir(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("groups"), request.param, **MODELS[request.param])


def load(folder: Path, **settings) -> ModelRunner:
    fields = {"max_num_seqs": 3, "block_size": BLOCK, "threads": 1, "max_model_len": MAX_LEN} | settings
    return ModelRunner(EngineConfig(folder, "float32", **fields))


@cache
def one_pool(folder: Path) -> Driver:
    """An engine whose blocks hold all layers."""
    return Driver(load(folder, num_blocks=MAX_LEN // BLOCK))


@cache
def alone(folder: Path, prompt: tuple[int, ...], seed: int | None, sample: int) -> list[int]:
    """The output of a sample that runs alone, in a pool whose blocks hold all layers."""
    driver = one_pool(folder)
    driver.open(0, list(prompt), seeded(seed), sample_index=sample)
    driver.prefill(0)
    driver.decode([0], MAX_TOKENS - 1)
    return driver.close(0).output


class Worker:
    """One engine. It computes a step when its answer is read."""

    def __init__(
        self,
        folder: Path,
        name: str,
        epoch: int,
        rng: Random,
        backend: str,
        expected: dict[bytes, list[int]],
        tier: dict[bytes, bytes] | None = None,
    ) -> None:
        """The worker b has drafts, of which some are right."""
        self.name = name
        num_blocks, num_tokens = rng.choice((34, 40, 70)), rng.choice((5, 40, 90))
        num_blocks = max(num_blocks, 40) if num_tokens == 90 else num_blocks  # a smaller pool has one group
        sizes = {"num_blocks": num_blocks, "max_num_batched_tokens": num_tokens}
        drafts = {"speculate": "suffix"} if name == "b" else {}
        self.runner = load(folder, has_groups=True, backend=backend, **sizes, **drafts)
        if self.runner._drafts is not None:
            self.runner._drafts._proposer = GivenDrafts(self.runner._rows, expected, 0.7)
            self.runner._drafts._times = NoTimes()
        assert len(self.runner.info.groups) == 1
        self.depth = rng.choice((1, 2))
        self.capacity = capacity_from_proto(
            scheduler_pb2.RegisterRequest(
                worker_id=name,
                worker_epoch=epoch,
                capacity=capacity_to_proto(self.runner.info, bundle_digest=b"", pipeline_depth=self.depth),
            )
        )
        self.moved = MovedBlocks(self.runner, {} if tier is None else tier)
        if tier is not None:
            self.capacity = replace(self.capacity, movement=self.moved.movement)
        self.queue: deque[StepBatch] = deque()
        self.next_step_id = 1

    def answer(self, step: StepBatch) -> StepOutput:
        message = step_batch_to_proto(step, worker_pb2.Fence())
        output = self.runner.execute(batch_from_proto(message))
        output.worker_id, self.next_step_id = self.name, step.step_id + 1
        assert output.errors == []
        return output

    def listed(self) -> list[CachedBlock]:
        return [
            CachedBlock(block, digest, tokens)
            for blocks, digests, of_blocks in self.runner.committed_blocks()
            for block, digest, tokens in zip(blocks.tolist(), digests, of_blocks, strict=True)
        ]


class Run:
    """One random run."""

    def __init__(self, folder: Path, seed: int, backend: str = "cpu", *, has_moves: bool = False) -> None:
        self.folder, self.rng, self.now, self.backend = folder, Random(seed), 0.0, backend
        self.make_scheduler()
        self.has_moves = has_moves
        self.tiers: dict[str, dict[bytes, bytes]] = {}
        self.moves: list[BlockMove] = []
        self.num_moved = Counter[bool]()  # moves with blocks of windows; True: from tiers
        self.workers: dict[str, Worker] = {}
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.drafts: list[RowDrafts] = []
        self.expected: dict[bytes, list[int]] = {}  # outputs of first samples, by their prompt
        self.num_started = self.num_cached = self.num_preemptions = 0
        prefix = [self.rng.randrange(3, 200) for _ in range(14 * BLOCK)]
        self.prefixes = [prefix, prefix[: 9 * BLOCK + 3], []]
        for name in ("a", "b"):
            self.start(name)

    def make_scheduler(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(aging_s=0.1, root_salt=b"groups"))

    def start(self, name: str) -> None:
        self.num_started += 1
        tier, started = self.tiers.setdefault(name, {}) if self.has_moves else None, self.num_started
        self.workers[name] = worker = Worker(self.folder, name, started, self.rng, self.backend, self.expected, tier)
        self.add(worker)
        self.drafts += [] if worker.runner._drafts is None else [worker.runner._drafts]

    def add(self, worker: Worker, blocks: Sequence[CachedBlock] = ()) -> None:
        self.scheduler.add_worker(worker.capacity, blocks, worker.next_step_id)
        self.scheduler.moves.change_tiers(worker.name, dict.fromkeys(self.tiers.get(worker.name, ()), TierKind.DISK))

    def kill(self, name: str) -> None:
        self.scheduler.remove_worker(name)
        self.moves = [move for move in self.moves if move.worker_id != name]
        self.start(name)

    def restart_scheduler(self) -> None:
        """Another scheduler adopts the pools, and gets the open requests with their tokens."""
        self.count()
        self.make_scheduler()
        self.moves = []
        for worker in self.workers.values():
            worker.queue.clear()
            worker.runner.reset_rows()
            self.add(worker, worker.listed())
        for group in self.groups:
            outputs = [self.outputs.get((group.handle, sample), []) for sample in range(group.n)]
            if any(len(output) < MAX_TOKENS for output in outputs):
                self.submit_group(group.prompt, group.handle, group.n, group.options.sampling, outputs)

    def count(self) -> None:
        self.num_preemptions += self.scheduler.stats().counts.num_preemptions
        self.num_cached += self.scheduler.stats().counts.prefix_cache_hits

    def submit(self) -> None:
        rng, number = self.rng, len(self.groups)
        prompt = rng.choice(self.prefixes) + [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))]
        sampling = types_pb2.SamplingParams(temperature=1.0, seed=number)
        self.expected[u32(*prompt).tobytes()] = alone(self.folder, tuple(prompt), number, 0)
        self.groups.append(self.submit_group(u32(*prompt), number, rng.choice((1, 1, 2)), sampling, ()))

    def submit_group(self, prompt, number, n, sampling, outputs) -> SequenceGroup:
        group = SequenceGroup(
            f"r{number}", prompt, StopCondition(MAX_TOKENS, ignore_eos=True), handle=number, n=n,
            priority=number % 2, options=worker_pb2.RowOpen(sampling=sampling),
            outputs=[u32(*output) for output in outputs],
            finished_samples=frozenset(i for i, output in enumerate(outputs) if len(output) == MAX_TOKENS),
        )  # fmt: skip
        self.take(self.scheduler.add_group(group, self.now))
        return group

    def take(self, deltas: Deltas) -> None:
        columns = (deltas.handles, deltas.sample_indices, deltas.token_ids)
        for handle, sample, token in zip(*(column.tolist() for column in columns), strict=True):
            self.outputs.setdefault((handle, sample), []).append(token)

    def event(self) -> None:
        rng = self.rng
        self.now += 0.01
        if len(self.groups) < NUM_REQUESTS and rng.random() < 0.1:
            self.submit()
        if rng.random() < 0.006:
            self.kill(rng.choice(list(self.workers)))
        if rng.random() < 0.006:
            self.restart_scheduler()
        if self.has_moves and rng.random() < 0.01:
            self.scheduler.drain_worker(rng.choice(list(self.workers)))
        for batch in self.scheduler.schedule(self.now):
            self.workers[batch.worker_id].queue.append(batch)
        self.moves += self.scheduler.moves.take_moves()
        if self.moves and rng.random() < 0.3:
            self.end_move()
        check_scheduler(self.scheduler)
        busy = [worker for worker in self.workers.values() if worker.queue]
        if busy:
            worker = rng.choice(busy)
            step = worker.queue.popleft()
            self.take(self.scheduler.update(worker.answer(step), self.now))
            if self.has_moves:
                stored = worker.moved.store(step)
                self.scheduler.moves.change_tiers(worker.name, dict.fromkeys(stored, TierKind.DISK))
        elif self.has_moves and all(worker.is_draining for worker in self.scheduler._workers.values()):
            self.kill(rng.choice(list(self.workers)))

    def end_move(self) -> None:
        """The oldest move, if the steps that were in flight have run."""
        move, target = self.moves[0], self.workers[self.moves[0].worker_id]
        if target.next_step_id <= move.after_step_id:
            return
        del self.moves[0]
        source = None if move.source is None else self.workers[move.source.worker_id]
        if source is not None and source.capacity.worker_epoch != move.source.worker_epoch:
            source = None
        count = target.moved.fetch(move, None if source is None else source.moved)
        self.num_moved[move.source is None] += count == move.num_items and bool(move.extras)
        self.scheduler.end_move(move.move_id, count, 0.001, self.now)

    def run(self) -> None:
        while len(self.groups) < NUM_REQUESTS or self.scheduler.has_work:
            self.event()
        self.count()
        for group in self.groups:
            for sample in range(group.n):
                expected = alone(self.folder, tuple(group.prompt.tolist()), group.options.sampling.seed, sample)
                assert self.outputs[group.handle, sample] == expected, f"{group.request_id} sample {sample}"
        for worker in self.scheduler._workers.values():
            assert [part.pool.num_used for part in worker.parts_of_all if isinstance(part, WindowGroup)] == [0]


def test_tokens_are_those_of_undisturbed_runs(model_dir):
    run = Run(model_dir, 0)
    run.run()
    assert run.num_preemptions
    assert run.num_cached
    assert sum(drafts.counts.accepted.sum() for drafts in run.drafts) > 5


def test_tokens_after_moves_are_those_of_undisturbed_runs(model_dir):
    num_moved = Counter[bool]()
    for seed in range(2):
        run = Run(model_dir, seed, has_moves=True)
        run.run()
        num_moved += run.num_moved
    assert min(num_moved[True], num_moved[False]) > 0, num_moved


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_tokens_are_those_of_undisturbed_runs_with_more_seeds(model_dir, seed, backend):
    Run(model_dir, seed, backend, has_moves=bool(seed % 2)).run()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_several_windows_match_transformers(tmp_path, name, backend):
    """One long prompt, then a hit on its first windows, greedily."""
    folder = make_model(tmp_path, name, **MODELS[name])
    worker, reference = Worker(folder, "a", 1, Random(2), backend, {}), load_reference(folder)
    scheduler = Scheduler(SchedulerConfig(root_salt=b"groups"))
    scheduler.add_worker(worker.capacity)
    rng = Random(1)
    prompt = [rng.randrange(3, 200) for _ in range(130)]
    for number, tokens in enumerate((prompt, prompt[:100] + prompt[:5])):
        stop, greedy = StopCondition(4, ignore_eos=True), types_pb2.SamplingParams(temperature=0.0)
        scheduler.add_group(
            SequenceGroup(f"r{number}", u32(*tokens), stop, handle=number, options=worker_pb2.RowOpen(sampling=greedy)),
            0.0,
        )
        output: list[int] = []
        while scheduler.has_work:
            for batch in scheduler.schedule(0.0):
                output += scheduler.update(worker.answer(batch), 0.0).token_ids.tolist()
        with torch.no_grad():
            logits = reference(torch.tensor([tokens + output])).logits[0]
        assert output == logits[len(tokens) - 1 : -1].argmax(-1).tolist()
    assert scheduler.stats().counts.prefix_cache_hits == 96
