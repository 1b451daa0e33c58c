"""No leak after thousands of random lifecycles on the core: no block, row, group, digest or counter is left over.

Requests arrive, run, are aborted in every state, stopped, preempted, moved, taken over, refused and resumed with a
Continuation. Workers join, drain, fail rows and are lost. After every 1,000 lifecycles everything ends, and the state
must be that of an empty scheduler. The workers compute nothing: symbolic_worker.py is for that.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import numpy as np
import pytest

from prefix_index.index import PrefixChanges
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import NeverFitsError, QueueFullError, SchedulerError
from scheduler_svc.core.messages import CachedBlock, Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, StopCondition
from scheduler_svc.core.stats import worker_stats
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError
from tests.invariants import check_scheduler, check_share

LIFECYCLES_PER_PART = 10_000
NUM_PARTS, NUM_DEEP_PARTS = 1, 100
CHECK_EVERY = 1000
BLOCK_SIZE, MAX_LEN, VOCAB = 4, 64, 50
MAX_OPEN = 60


class Worker:
    """Answers steps in order with random tokens. Remembers committed blocks for a scheduler that adopts its pool."""

    def __init__(self, capacity: WorkerCapacity, rng: Random) -> None:
        self.capacity = capacity
        self.queue: deque[StepBatch] = deque()
        self.committed: dict[int, CachedBlock] = {}
        self._rng = rng

    def answer(self, fails: bool) -> StepOutput:
        batch = self.queue.popleft()
        rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows)).astype(np.uint32)
        failures = []
        if fails and len(rows):
            failures = [RowError(int(rows[0]), "as asked")]
            rows = rows[1:]
        tokens = np.array([self._rng.randrange(VOCAB) for _ in rows], dtype=np.uint32)
        return StepOutput(batch.step_id, rows, tokens, failures, worker_id=batch.worker_id)


class Life:
    """The core with random requests, workers and faults."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.core = Scheduler(
            SchedulerConfig(max_waiting=40, eos_token_ids=frozenset({0}), expected_output_tokens=4, aging_s=0.2)
        )
        self.workers: dict[str, Worker] = {}
        self.open: dict[str, SequenceGroup] = {}
        self.published: set[tuple[str, int, bytes]] = set()
        self.num_ended = 0
        self.met: Counter[str] = Counter()
        self._num_groups = self._num_lives = 0
        self._prefix = self._tokens(20)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    # -- events -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        rng = self.rng
        self.now += 0.01
        if len(self.workers) < 2 or rng.random() < 0.0005:
            self._join()
        for _ in range(rng.randint(0, 8)):
            if len(self.open) < MAX_OPEN:
                self._arrive()
        if self.open and rng.random() < 0.5:
            self._end_one()
        if rng.random() < 0.01:
            self._shake_workers()
        self._step()

    def _arrive(self) -> None:
        rng = self.rng
        self._num_groups += 1
        prompt = np.array((self._prefix[: rng.choice((0, 9, 20))] + self._tokens(rng.randint(1, 9))), dtype=np.uint32)
        n, max_tokens = rng.choice((1, 1, 1, 2, 3)), rng.choice((0, 1, 3, 6, 20) if rng.random() < 0.98 else (MAX_LEN,))
        name = f"r{self._num_groups}"
        takes_over = bool(self.open) and rng.random() < 0.05
        if takes_over:
            name = rng.choice(list(self.open))
        is_continued = takes_over or rng.random() < 0.1
        done = frozenset({0}) if is_continued and n > 1 and rng.random() < 0.3 else frozenset()
        group = SequenceGroup(
            name,
            prompt,
            StopCondition(max_tokens, frozenset(self._tokens(1)), ignore_eos=rng.random() < 0.5),
            n=n,
            handle=self._num_groups,
            priority=rng.choice((0, 0, 0, -1, 3)),
            outputs=[np.array(self._tokens(min(max_tokens, rng.randint(0, 3))), dtype=np.uint32) for _ in range(n)]
            if is_continued
            else (),
            finished_samples=done,
            takes_over=takes_over,
            tenant_id=rng.choice(("", "a", "b")),
            timeout_s=rng.choice((None, None, None, 0.5)),
        )
        try:
            deltas = self.core.add_group(group, self.now)
        except SchedulerError as error:
            self.num_ended += 1
            self.met[type(error).__name__] += 1
            return
        self.met["taken over"] += takes_over
        self._absorb(deltas)
        if any(not seq.is_finished for seq in group.sequences):
            self.open[name] = group

    def _end_one(self) -> None:
        rng, name = self.rng, self.rng.choice(list(self.open))
        if rng.random() < 0.6:
            self.met["aborted"] += 1
            self._absorb(self.core.abort_group(name, FinishReason.ABORTED))
        else:
            self._absorb(self.core.finish_sample(name, rng.randrange(3), FinishReason.STOP))

    def _shake_workers(self) -> None:
        rng, worker = self.rng, self.rng.choice(list(self.workers.values()))
        name = worker.capacity.worker_id
        kind = rng.choice(("lost", "reconnected", "drained", "drained"))
        self.met[kind] += 1
        if kind == "drained":
            self.core.drain_worker(name)
            return
        self._leave(worker)
        if kind == "reconnected":
            self._add(Worker(worker.capacity, rng), worker.committed)

    def _leave(self, worker: Worker) -> None:
        del self.workers[worker.capacity.worker_id]
        self.core.remove_worker(worker.capacity.worker_id)

    def _join(self) -> None:
        rng = self.rng
        free = [name for name in ("w0", "w1", "w2") if name not in self.workers]
        if not free:
            return
        self._num_lives += 1
        rows = rng.choice((4, 16, 32))
        capacity = WorkerCapacity(
            free[0], self._num_lives, rng.choice((24, 100, 400)), BLOCK_SIZE, rows, rows + rng.choice((8, 64)), MAX_LEN
        )
        self._add(Worker(capacity, rng), {})

    def _add(self, worker: Worker, committed: dict[int, CachedBlock]) -> None:
        self.workers[worker.capacity.worker_id] = worker
        worker.committed = dict(committed)
        self.core.add_worker(worker.capacity, list(committed.values()))

    def _step(self) -> None:
        for batch in self.core.schedule(self.now):
            worker = self.workers[batch.worker_id]
            worker.queue.append(batch)
            self._record_commits(worker, batch)
        busy = [worker for worker in self.workers.values() if worker.queue]
        if busy:
            self._answer(self.rng.choice(busy))
        self._absorb(self.core.take_expired())
        self._publish(self.core.take_prefix_events())

    def _answer(self, worker: Worker) -> None:
        output = worker.answer(fails=self.rng.random() < 0.12)
        self.met["failed"] += bool(output.errors)
        self._absorb(self.core.update(output, self.now))
        stats = self.core.stats()
        state = next(w for w in stats.workers if w.worker_id == worker.capacity.worker_id)
        if self.core._workers[state.worker_id].is_draining and not state.rows_used and not state.steps_in_flight:
            self._leave(worker)

    def _record_commits(self, worker: Worker, batch: StepBatch) -> None:
        """The blocks that a pool would list: in the order of commits, until a row names them for new content."""
        for opened in batch.opens:
            for block in opened.block_table[opened.num_computed_tokens // BLOCK_SIZE :].tolist():
                worker.committed.pop(block, None)
        for block in batch.table_blocks.tolist():
            worker.committed.pop(block, None)
        pool = self.core._workers[batch.worker_id].pool
        for block, digest in zip(batch.commit_blocks.tolist(), batch.commit_digests, strict=True):
            worker.committed.pop(block, None)
            worker.committed[block] = CachedBlock(block, digest, pool._tokens[block].copy())

    def _absorb(self, deltas: Deltas) -> None:
        for finished in deltas.finished:
            group = finished.group
            self.met[finished.reason.name] += 1
            self.met["preempted"] += finished.num_preemptions > 0
            self.met["cached"] += finished.num_cached_tokens > 0
            if all(seq.is_finished for seq in group.sequences):
                self.num_ended += 1
                if self.open.get(group.request_id) is group:
                    del self.open[group.request_id]

    def _publish(self, changes: list[PrefixChanges]) -> None:
        for holder, digest, is_cached in ((c.holder, *block) for c in changes for block in c.blocks):
            entry = (*holder, digest)
            if is_cached:
                assert entry not in self.published, "a prefix was announced twice"
                self.published.add(entry)
            else:
                self.published.remove(entry)

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Run without new requests until all open requests end. No state may be left over."""
        for _ in range(20_000):
            if not self.core.has_work and not any(worker.queue for worker in self.workers.values()):
                break
            self.now += 0.01
            if not any(not state.is_draining for state in self.core._workers.values()):
                self._join()
            self._step()
        self._step()
        self._check_empty()

    def _check_empty(self) -> None:
        core = self.core
        check_scheduler(core)
        load = core.load()
        assert (load.num_waiting, load.num_running, load.pending_tokens) == (0, 0, 0), f"left over: {load}"
        groups = core._requests.groups
        assert not groups, f"groups are left over: {list(groups)}"
        assert not self.open, f"requests without an end: {list(self.open)}"
        assert core._waiting.expected_tokens == 0, f"an empty queue counts {core._waiting.expected_tokens} tokens"
        check_share(core._share, Counter())
        for state in core._workers.values():
            stats = worker_stats(state)
            assert stats.blocks_used == 0, f"blocks leak on {stats}"
            assert stats.rows_used == 0, f"rows leak on {stats}"
            assert not state.pool.refs.any(), f"references leak on {stats}"
            assert state.num_reserved_rows == 0, f"{state.num_reserved_rows} rows stay reserved on {stats}"
        held = {(*change.holder, digest) for change in core.cached_prefixes() for digest, _ in change.blocks}
        assert held == self.published, "announced prefixes and cached blocks have drifted apart"


DEEP_PARTS = [pytest.param(part, marks=pytest.mark.deep) for part in range(NUM_PARTS, NUM_DEEP_PARTS)]


@pytest.mark.parametrize("part", [*range(NUM_PARTS), *DEEP_PARTS])
def test_nothing_leaks(part: int) -> None:
    life = Life(part)
    while life.num_ended < LIFECYCLES_PER_PART:
        target = min(life.num_ended + CHECK_EVERY, LIFECYCLES_PER_PART)
        while life.num_ended < target:
            life.tick()
        life.settle()
    wanted = {"EOS", "STOP", "LENGTH", "ABORTED", "ERROR", "aborted", "taken over", "preempted", "cached", "failed"}
    wanted |= {"drained", NeverFitsError.__name__, QueueFullError.__name__}
    met = {name for name, count in life.met.items() if count}
    assert wanted <= met
    assert met & {"lost", "reconnected"}  # too rare for both to occur in every part
