"""The real core with real engines of a recurrent model: after every step, the bytes of each row's state are those of
a run that nothing disturbed.

Prompts share prefixes and arrive at random; chunks, batch mates, samples, small pools that preempt, few snapshots,
hits, drafts on one of two workers, and workers that are killed or drained, so that their sequences move. In some runs
blocks and snapshots move too, as records, from tiers that survive their workers and from other workers. One model has
images: hits, snapshots and moves end before, inside and after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest
from quire.internal.v1 import worker_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import FIRST_CONTENT_ID, content_ids
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.features.inputs import Inputs
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.policy import TierKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Features, SequenceGroup, StopCondition
from scheduler_svc.workers.wire import step_batch_to_proto
from step_protocol.columns import u32_from_bytes
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_from_proto
from tests.carried import to_proto
from tests.moved_blocks import MovedBlocks
from tests.speculating import GivenDrafts, NoTimes
from tests.unit.engine.driver import Driver, seeded, u32
from tests.unit.engine.models import RECURRENT, make_model
from tests.unit.engine.test_engine_recurrent import BLOCK, load_small, state_of
from tests.unit.engine.vision_models import Picture, make_image, make_vision_model
from worker_svc.engine.rows.states import RowStates

MAX_TOKENS = 20
NUM_REQUESTS = 7


SIZES = ((3, 5), (3, 5), (2, 4))  # sizes of images, in tokens


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ("qwen3_5", "bamba") else pytest.mark.deep) for name in RECURRENT],
)
def model_dir(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("states"), request.param)


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("images"), "qwen3_5")


@cache
def images() -> dict[tuple[int, ...], Picture]:
    """By their content ids."""
    found = [Picture(0, make_image(2 * height, 2 * width, seed)) for seed, (height, width) in enumerate(SIZES)]
    ids = [content_ids(one.carried.digest, one.span.length) for one in found]
    return {tuple(u32_from_bytes(column, "ids").tolist()): one for column, one in zip(ids, found, strict=True)}


def pictures_in(prompt: Sequence[int]) -> list[Picture]:
    """The images of a prompt with content ids."""
    return [
        Picture(start, one.pixels)
        for start in range(len(prompt))
        for ids, one in images().items()
        if tuple(prompt[start : start + len(ids)]) == ids
    ]


def features_of(pictures: Sequence[Picture]) -> Features:
    if not pictures:
        return Features()
    items, spans = [to_proto(one.carried) for one in pictures], [one.span for one in pictures]
    return Features(Inputs(items, sum(len(one.data) for one in items), [(span.start, 9) for span in spans]))


def options_of(pictures: Sequence[Picture], seed: int) -> worker_pb2.RowOpen:
    spans = u32(*(value for one in pictures for value in (one.span.start, one.span.height, one.span.width)))
    sampling = types_pb2.SamplingParams(temperature=1.0, seed=seed)
    return worker_pb2.RowOpen(sampling=sampling, images=spans.tobytes())


@cache
def undisturbed(folder: Path, prompt: tuple[int, ...], seed: int, sample: int) -> tuple[list[int], dict[int, bytes]]:
    """The output of a sample that runs alone, one token per step, and its state after each position."""
    driver, found = Driver(load_small(folder)), pictures_in(prompt)
    inputs, spans = tuple(one.carried for one in found), tuple(one.span for one in found)
    driver.open(0, list(prompt), seeded(seed), sample_index=sample, inputs=inputs, images=spans)
    states = {}
    while len(driver.rows[0].output) < MAX_TOKENS:
        driver.step({0: 1})
        states[driver.rows[0].computed] = state_of(driver, 0)
    return driver.rows[0].output, states


class Worker:
    """One engine. It computes a step when its answer is read."""

    def __init__(
        self,
        folder: Path,
        name: str,
        epoch: int,
        rng: Random,
        expected: dict[bytes, list[int]],
        tier: dict[bytes, bytes] | None,
    ) -> None:
        """The worker b has drafts, of which some are right."""
        self.folder, self.name = folder, name
        sizes = {"num_blocks": rng.choice((9, 14, 40)), "max_num_batched_tokens": rng.choice((5, 16, 60))}
        drafts = {"speculate": "suffix", "max_drafts": 3} if name == "b" else {}
        self.runner = load_small(folder, max_model_len=9 * BLOCK, **sizes, **drafts)
        if self.runner._drafts is not None:
            self.runner._drafts._proposer = GivenDrafts(self.runner._rows, expected, 0.7)
            self.runner._drafts._times = NoTimes()
        info, self.moved = self.runner.info, MovedBlocks(self.runner, {} if tier is None else tier)
        self.capacity = WorkerCapacity(
            name, epoch, info.num_blocks, BLOCK, info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len,
            vocab_size=info.vocab_size, num_snapshots=info.num_snapshots, snapshot_tokens=rng.choice((1, 1000)),
            movement=None if tier is None else self.moved.movement,
        )  # fmt: skip
        self.num_steps = 0
        self.queue: deque[StepBatch] = deque()
        self.sample_of: dict[int, tuple[SequenceGroup, int]] = {}  # by row

    def answer(self, step: StepBatch) -> StepOutput:
        message = step_batch_to_proto(step, worker_pb2.Fence())
        output = self.runner.execute(batch_from_proto(message))
        output.worker_id = self.name
        assert output.errors == []
        self.num_steps = step.step_id
        self.sample_of |= {opened.row: (opened.group, opened.sample_index) for opened in step.opens}
        for row in step.rows.tolist():
            end = int(self.runner._tables.states.positions[row])
            group, sample = self.sample_of[row]
            _, states = undisturbed(self.folder, tuple(group.prompt.tolist()), group.options.sampling.seed, sample)
            found = self.runner._pool.states.slots[row].numpy().tobytes()
            assert found == states[end], f"row {row} after {end} tokens of {group.request_id}"
        return output


class Run:
    """One random run."""

    def __init__(self, folder: Path, seed: int, *, has_moves: bool = False, has_images: bool = False) -> None:
        self.folder, self.rng, self.now = folder, Random(seed), 0.0
        self.scheduler = Scheduler(SchedulerConfig(aging_s=0.1, root_salt=b"states"))
        self.workers: dict[str, Worker] = {}
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.expected: dict[bytes, list[int]] = {}  # outputs of first samples, by their prompt
        self.num_open = self.num_started = 0
        self.has_moves = has_moves
        self.tiers: dict[str, dict[bytes, bytes]] = {}
        self.moves: list[tuple[BlockMove, Worker]] = []
        self.num_moved = {True: 0, False: 0}  # snapshots from tiers, and from other workers
        self.num_images_moved = {True: 0, False: 0}  # the same, of those with blocks that have positions of images
        prefix = [self.rng.randrange(3, 200) for _ in range(4 * BLOCK)]
        self.prefixes = [prefix, prefix[: 2 * BLOCK + 3], []]
        if has_images:
            first, other, small = map(list, images())
            self.prefixes += [prefix[:5] + ids + prefix[20:22] + small + prefix[:2] for ids in (first, other)]
            self.prefixes += [prefix[:3] + small, prefix[:5] + first]
        for name in ("a", "b"):
            self.start(name)

    def start(self, name: str) -> None:
        self.num_started += 1
        tier = self.tiers.setdefault(name, {}) if self.has_moves else None
        self.workers[name] = worker = Worker(self.folder, name, self.num_started, self.rng, self.expected, tier)
        self.scheduler.add_worker(worker.capacity)
        self.scheduler.moves.change_tiers(name, dict.fromkeys(tier or (), TierKind.DISK))

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
            options=options_of(pictures_in(prompt), number), features=features_of(pictures_in(prompt)),
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
        if self.has_moves and rng.random() < 0.01:
            self.scheduler.drain_worker(rng.choice(list(self.workers)))
        for batch in self.scheduler.schedule(self.now):
            self.workers[batch.worker_id].queue.append(batch)
        self.moves += [(move, self.workers[move.worker_id]) for move in self.scheduler.moves.take_moves()]
        if self.moves and rng.random() < 0.3:
            self.end_move()
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
        """The oldest move, if the steps that were in flight have run. A process that was killed gets nothing."""
        move, target = self.moves[0]
        is_dead = target is not self.workers[move.worker_id]
        if target.num_steps < move.after_step_id and not is_dead:
            return
        del self.moves[0]
        source = None if move.source is None else self.workers[move.source.worker_id]
        if source is not None and move.source is not None and source.capacity.worker_epoch != move.source.worker_epoch:
            source = None
        count = 0 if is_dead else target.moved.fetch(move, None if source is None else source.moved)
        is_whole = count == move.num_items and bool(move.extras)
        self.num_moved[move.source is None] += is_whole
        self.num_images_moved[move.source is None] += is_whole and move.token_blocks.max(initial=0) >= FIRST_CONTENT_ID
        self.scheduler.end_move(move.move_id, count, 0.001, self.now)

    def run(self) -> None:
        while len(self.groups) < NUM_REQUESTS or self.scheduler.has_work:
            self.event()
        for group in self.groups:
            for sample in range(group.n):
                tokens, _ = undisturbed(self.folder, tuple(group.prompt.tolist()), group.options.sampling.seed, sample)
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
    settle = RowStates.sampled

    def keep(self, step, logits, found):
        with monkeypatch.context() as patch:
            patch.setattr(self._pool, "copy", lambda sources, targets: None)
            settle(self, step, logits, found)

    monkeypatch.setattr(RowStates, "sampled", keep)
    with pytest.raises(AssertionError, match=r"row \d+ after"):
        Run(model_dir, 0).run()


def test_states_that_moved_are_those_of_undisturbed_runs(model_dir):
    num_moved = {True: 0, False: 0}
    for seed in range(2):
        run = Run(model_dir, seed, has_moves=True)
        run.run()
        num_moved = {is_tier: count + run.num_moved[is_tier] for is_tier, count in num_moved.items()}
    assert all(num_moved.values()), num_moved


MOVED = {0: True, 3: False}  # seeds that move images, from a tier (True) or from another worker


@pytest.mark.parametrize("seed", [*MOVED, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(4, 40))])
def test_states_after_images_are_those_of_undisturbed_runs(vision_dir, seed):
    run = Run(vision_dir, seed, has_moves=True, has_images=True)
    run.run()
    assert seed not in MOVED or run.num_images_moved[MOVED[seed]], run.num_images_moved


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 130))
def test_states_are_those_of_undisturbed_runs_with_more_seeds(model_dir, seed):
    Run(model_dir, seed, has_moves=bool(seed % 2)).run()
