"""One seed, one run: a whole cluster around the real scheduler core, in one thread, with faults on purpose.

    python -m tests.sim.simulation 1234          run seed 1234; on failure print what led to it
    python -m tests.sim.simulation 0 2000        run seeds 0 to 1999

Everything random comes from the seed. The simulation plays gateways (they keep every delivered token, as the real ones
do), workers (`SymbolicWorker`), the network between them and the operator; `check_invariants` follows every event.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import NeverFitsError, QueueFullError
from scheduler_svc.core.messages import Deltas, Finished, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, StopCondition
from tests.sim.oracle import Expected, expected_output
from tests.sim.symbolic_worker import Chains, SymbolicWorker, Violation

NUM_OWNERS = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """What one seed chose for the whole run."""

    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_requests: int
    is_lazy: bool  # workers execute when their answer is read, not when the step arrives
    eagerness: float  # chance that `schedule` follows an event
    fault_rate: float
    abort_rate: float


@dataclass(slots=True)
class Request:
    """A gateway's journal of one request: what it asked, what it got, what it must get."""

    request_id: str
    prompt: list[int]
    seed: int
    n: int
    stop: StopCondition
    root_key: bytes
    owner: int
    handle: int
    priority: int
    expected: list[Expected]
    delivered: list[list[int]]
    finished: list[FinishReason | None]
    ended_by_us: set[int] = field(default_factory=set)  # samples that we aborted or stopped

    @property
    def is_done(self) -> bool:
        return all(reason is not None for reason in self.finished)

    @property
    def size(self) -> int:
        return len(self.prompt) + self.stop.max_tokens


class Simulation:
    """A cluster with one scheduler. `run` raises Violation (or whatever the core raises) if anything is wrong."""

    def __init__(self, seed: int, *, make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.now = 0.0
        self.setup = self._choose_setup()
        self.chains = Chains(b"sim", self.setup.block_size)
        self.requests: dict[str, Request] = {}
        self.open: dict[str, Request] = {}
        self.by_handle: dict[tuple[int, int], Request] = {}
        self.workers: dict[str, SymbolicWorker] = {}
        self.published: dict[str, set[bytes]] = {}
        self.adopted: set[bytes] = set()
        self.failed_requests: set[str] = set()
        self.num_steps = self.num_events = self.num_tokens = self.num_preemptions = self.num_cached = 0
        self.trace: list[tuple[Any, ...]] = []
        self._num_arrived = self._next_epoch = 0
        self._has_seen_worker = False
        self._prefixes = [self._random_tokens(self.setup.max_model_len) for _ in range(2)]
        self._config = self._choose_config()
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler(self._config)

    # -- choices ------------------------------------------------------------------------------------------------------

    def _choose_setup(self) -> Setup:
        rng = self.rng
        block_size = rng.choice((1, 2, 2, 3, 4, 4, 4, 8, 16))
        eos = {0} if rng.random() < 0.7 else {0, 1}
        return Setup(
            block_size=block_size,
            max_model_len=rng.randint(2, 6) * block_size + rng.randint(4, 30),
            vocab_size=rng.choice((6, 16, 40, 200)),
            eos_token_ids=frozenset(eos) if rng.random() < 0.9 else frozenset(),
            num_requests=rng.randint(3, 12),
            is_lazy=rng.random() < 0.5,
            eagerness=rng.choice((1.0, 0.9, 0.6)),
            fault_rate=rng.choice((0.0, 0.0, 0.01, 0.04)),
            abort_rate=rng.choice((0.0, 0.01, 0.05)),
        )

    def _choose_config(self) -> SchedulerConfig:
        rng = self.rng
        return SchedulerConfig(
            max_waiting=rng.choice((1024, 1024, 1024, 3)),
            watermark=rng.choice((0.0, 0.01, 0.1)),
            aging_s=rng.choice((0.05, 2.0)),
            max_bypass=rng.choice((1, 16)),
            placement_alpha=rng.choice((0.0, 3.0)),
            max_pending_prefill_steps=rng.choice((1, 2)),
            expected_output_tokens=rng.choice((1, 8, 256)),
            eos_token_ids=self.setup.eos_token_ids,
            root_salt=b"sim",
        )

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.setup.vocab_size) for _ in range(count)]

    def _choose_capacity(self, worker_id: str) -> WorkerCapacity:
        rng, s = self.rng, self.setup
        longest = -(-s.max_model_len // s.block_size)
        num_blocks = rng.choice((rng.randint(2, longest), longest, longest + rng.randint(0, longest), 6 * longest))
        max_num_seqs = rng.randint(1, 8)
        self._next_epoch += 1
        return WorkerCapacity(
            worker_id=worker_id,
            worker_epoch=self._next_epoch,
            num_blocks=num_blocks,
            block_size=s.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 5, 20, 100)),
            max_model_len=s.max_model_len,
            pipeline_depth=rng.randint(1, 3),
        )

    def _choose_prompt(self) -> list[int]:
        """Shared beginnings, whole repetitions and continued conversations are common; so are strangers."""
        rng, limit = self.rng, self.setup.max_model_len
        kind = rng.random()
        if kind < 0.5:
            prefix = rng.choice(self._prefixes)
            prompt = prefix[: rng.randint(0, limit)] + self._random_tokens(rng.randint(0, 4))
        elif kind < 0.8 and self.requests:
            earlier = rng.choice(list(self.requests.values()))
            prompt = earlier.prompt + rng.choice(earlier.delivered)[: rng.choice((0, 100))]
        else:
            prompt = self._random_tokens(rng.randint(1, limit))
        return prompt[: limit - rng.randint(0, limit // 2)] or [1]

    def _choose_stop(self, prompt_len: int) -> StopCondition:
        rng = self.rng
        room = self.setup.max_model_len - prompt_len
        max_tokens = rng.choice((0, 1, room, rng.randint(0, max(room, 0)), rng.randint(0, max(room, 0))))
        if rng.random() < 0.03:
            max_tokens = room + 1
        num_stop = rng.choice((0, 0, 1, 2))
        stop_ids = frozenset(rng.randrange(self.setup.vocab_size) for _ in range(num_stop))
        return StopCondition(max_tokens, stop_ids, ignore_eos=rng.random() < 0.4)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Chaos until every request has arrived, then calm until everything has ended; then look for leaks."""
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            self._join()
        while self._num_arrived < self.setup.num_requests:
            self._event()
        for _ in range(self.rng.randint(0, 40)):
            self._event()
        self._settle()
        self._check_end()

    def _event(self) -> None:
        self.num_events += 1
        self.now += self.rng.random() * 0.1
        self._choose_event()()
        self._check()
        if self.rng.random() < self.setup.eagerness:
            self._schedule()

    def _choose_event(self) -> Callable[[], None]:
        rng, s = self.rng, self.setup
        kind = rng.random()
        if kind < 0.18 and self._num_arrived < s.num_requests:
            return self._arrive
        kind = rng.random()
        if kind < s.fault_rate:
            return rng.choice((self._lose, self._reconnect, self._drain, self._restart_scheduler, self._join))
        kind = rng.random()
        if kind < s.fault_rate:
            return self._break_a_row
        kind = rng.random()
        if kind < s.abort_rate:
            return rng.choice((self._abort, self._stop_sample))
        if kind > 0.99 or not self.workers:
            return self._join
        return self._answer

    def _schedule(self) -> int:
        batches = self.scheduler.schedule(self.now)
        for batch in batches:
            worker = self.workers[batch.worker_id]
            self.trace.append(("send", batch))
            if worker.is_draining and any(opened.fork_of_row is None for opened in batch.opens):
                raise Violation(f"worker {batch.worker_id} drains and gets a new row")
            worker.send(batch)
            self.num_steps += 1
        self._check()
        return len(batches)

    def _check(self) -> None:
        self.scheduler.check_invariants()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        self._num_arrived += 1
        prompt = self._choose_prompt()
        stop = self._choose_stop(len(prompt))
        root_key, n = rng.choice((b"", b"", b"tenant")), rng.choice((1, 1, 1, 2, 3, 4))
        seed = rng.choice((7, rng.randrange(1 << 32)))
        expected = [
            expected_output(prompt, root_key, seed, i, stop, self.setup.eos_token_ids, self.setup.vocab_size)
            for i in range(n)
        ]
        request = Request(
            request_id=f"r{self._num_arrived}",
            prompt=prompt,
            seed=seed,
            n=n,
            stop=stop,
            root_key=root_key,
            owner=rng.randrange(NUM_OWNERS),
            handle=self._num_arrived,
            priority=rng.choice((0, 0, 0, -1, 1, 5)),
            expected=expected,
            delivered=[[] for _ in range(n)],
            finished=[None] * n,
        )
        if rng.random() < 0.15:  # another scheduler served it until now
            request.delivered = [e.tokens[: rng.randint(0, len(e.tokens))] for e in expected]
        if self._has_seen_worker or request.size <= self.setup.max_model_len:  # gateways know the model's limit
            self._submit(request)

    def _submit(self, request: Request) -> None:
        group = SequenceGroup(
            request_id=request.request_id,
            prompt=np.array(request.prompt, dtype=np.uint32),
            stop=request.stop,
            owner=request.owner,
            handle=request.handle,
            n=request.n,
            priority=request.priority,
            root_key=request.root_key,
            sampling=request.seed,
            outputs=[np.array(tokens, dtype=np.uint32) for tokens in request.delivered],
            finished_samples=frozenset(i for i, reason in enumerate(request.finished) if reason is not None),
        )
        self.trace.append(("submit", group))
        try:
            deltas = self.scheduler.add_group(group, self.now)
        except (NeverFitsError, QueueFullError) as error:
            self._refused(request, error)
            return
        self.requests[request.request_id] = self.open[request.request_id] = request
        self.by_handle[request.owner, request.handle] = request
        self._absorb(deltas)

    def _refused(self, request: Request, error: Exception) -> None:
        self.trace.append(("refused", request.request_id, str(error)))
        if isinstance(error, QueueFullError):
            if self.scheduler.stats().num_waiting < self._config.max_waiting:
                raise Violation(f"refused below the limit: {error}")
        elif self._can_hold(request):
            raise Violation(f"refused although it fits: {error}")
        self.open.pop(request.request_id, None)

    def _can_hold(self, request: Request) -> bool:
        size = request.size
        return any(
            size <= self.setup.max_model_len
            and -(-size // w.capacity.block_size) <= w.capacity.num_blocks
            and request.n <= w.capacity.max_num_seqs
            for w in self.workers.values()
        )

    def _abort(self) -> None:
        if not self.open:
            return
        request = self.rng.choice(list(self.open.values()))
        self.trace.append(("abort", request.request_id))
        request.ended_by_us.update(range(request.n))
        self._absorb(self.scheduler.abort_group(request.request_id, FinishReason.ABORTED, self.now))
        if not request.is_done:
            raise Violation(f"{request.request_id} lives on after an abort")

    def _stop_sample(self) -> None:
        if not self.open:
            return
        request = self.rng.choice(list(self.open.values()))
        sample = self.rng.choice([i for i, reason in enumerate(request.finished) if reason is None])
        self.trace.append(("stop", request.request_id, sample))
        request.ended_by_us.add(sample)
        self._absorb(self.scheduler.finish_sample(request.request_id, sample, FinishReason.STOP, self.now))
        if request.finished[sample] is None:
            raise Violation(f"{request.request_id} sample {sample} lives on after it was stopped")

    def _absorb(self, deltas: Deltas) -> None:
        columns = (deltas.owners, deltas.handles, deltas.sample_indices, deltas.offsets, deltas.token_ids)
        for owner, handle, sample, offset, token in zip(*(c.tolist() for c in columns), strict=True):
            self._receive(self.by_handle[owner, handle], sample, offset, token)
        for finished in deltas.finished:
            self._finish(finished)

    def _receive(self, request: Request, sample: int, offset: int, token: int) -> None:
        delivered, expected = request.delivered[sample], request.expected[sample].tokens
        name = f"{request.request_id} sample {sample}"
        self.num_tokens += 1
        if request.finished[sample] is not None:
            raise Violation(f"{name}: a token after the end")
        if offset != len(delivered):
            raise Violation(f"{name}: token at offset {offset}, {len(delivered)} delivered")
        if offset >= len(expected) or token != expected[offset]:
            raise Violation(f"{name}: token {token} at {offset}, the oracle has {expected[offset : offset + 1]}")
        delivered.append(token)

    def _finish(self, finished: Finished) -> None:
        request, sample = self.requests[finished.group.request_id], finished.sample_index
        name = f"{request.request_id} sample {sample} ({finished.reason.name})"
        if request.finished[sample] is not None:
            raise Violation(f"{name}: finished twice")
        request.finished[sample] = finished.reason
        delivered, expected = request.delivered[sample], request.expected[sample]
        if finished.num_output_tokens != len(delivered):
            raise Violation(f"{name}: tells {finished.num_output_tokens} tokens, delivered {len(delivered)}")
        if finished.reason is FinishReason.ERROR:
            if request.request_id not in self.failed_requests:
                raise Violation(f"{name}: {finished.message}")
        elif (
            sample not in request.ended_by_us
            and Expected(delivered, finished.reason, finished.stop_token_id) != expected
        ):
            raise Violation(f"{name}: {delivered} (stop {finished.stop_token_id}), the oracle has {expected}")
        if not 0 <= finished.num_cached_tokens <= len(request.prompt):
            raise Violation(f"{name}: {finished.num_cached_tokens} cached tokens of {len(request.prompt)}")
        self.num_cached += finished.num_cached_tokens
        self.num_preemptions += finished.num_preemptions
        if request.is_done:
            self.open.pop(request.request_id, None)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        busy = [worker for worker in self.workers.values() if worker.queue]
        if not busy:
            return
        worker = self.rng.choice(busy)
        output = worker.answer()
        self.trace.append(("answer", output))
        self._absorb(self.scheduler.update(output, self.now))
        self._follow_prefixes()

    def _join(self) -> None:
        """A new worker, or a restarted one under its old name."""
        gone = [f"w{i}" for i in range(3) if f"w{i}" not in self.workers]
        if gone:
            self._add(self._new_worker(self._choose_capacity(gone[0])))

    def _new_worker(self, capacity: WorkerCapacity) -> SymbolicWorker:
        first_step = self.rng.choice((1, 1, 100))
        return SymbolicWorker(
            capacity, self.chains, self.setup.vocab_size, next_step_id=first_step, is_lazy=self.setup.is_lazy
        )

    def _add(self, worker: SymbolicWorker) -> None:
        c = worker.capacity
        blocks = worker.list_blocks()
        self.trace.append(("join", c, len(blocks), worker.next_step_id))
        self.workers[c.worker_id] = worker
        self._has_seen_worker = True
        worker.failed_requests = self.failed_requests
        self.published.setdefault(c.worker_id, set())
        self.adopted.update(block.digest for block in blocks)
        self.scheduler.add_worker(c, self.now, blocks, next_step_id=worker.next_step_id)
        self._follow_prefixes()

    def _remove(self, worker_id: str) -> SymbolicWorker:
        self.trace.append(("remove", worker_id))
        self.scheduler.remove_worker(worker_id, self.now)
        worker = self.workers.pop(worker_id)
        self._follow_prefixes()
        if self.published.pop(worker_id):
            raise Violation(f"worker {worker_id} is gone and still published")
        return worker

    def _random_worker(self) -> str | None:
        return self.rng.choice(list(self.workers)) if self.workers else None

    def _lose(self) -> None:
        name = self._random_worker()
        if name is None:
            return
        worker = self._remove(name)
        if worker.queue:  # an answer that was on the wire when the worker was given up
            self._absorb(self.scheduler.update(worker.answer(), self.now))

    def _reconnect(self) -> None:
        """The connection broke, the process did not: rows are gone, committed blocks are adopted."""
        name = self._random_worker()
        if name is None:
            return
        worker = self._remove(name)
        worker.lease()
        self._add(worker)

    def _drain(self) -> None:
        name = self._random_worker()
        if name is None:
            return
        self.trace.append(("drain", name))
        self.workers[name].is_draining = True
        self.scheduler.drain_worker(name)

    def _break_a_row(self) -> None:
        name = self._random_worker()
        if name is not None:
            self.workers[name].fail_next = self.rng.choice(("nan", "lost"))

    def _restart_scheduler(self) -> None:
        """kill -9: the gateways submit again what they have, the new scheduler adopts the pools."""
        self.trace.append(("restart",))
        self.scheduler = self._make_scheduler(self._config)
        self.published.clear()
        workers, self.workers = list(self.workers.values()), {}
        open_requests, self.open = list(self.open.values()), {}
        self.rng.shuffle(open_requests)
        for worker in workers:
            worker.lease()
            self._add(worker)
        for request in open_requests:
            self._submit(request)

    def _follow_prefixes(self) -> None:
        """Apply prefix events like an index would, and doubt them."""
        events = self.scheduler.take_prefix_events()
        for event in events:
            held = self.published[event.worker_id]
            if event.is_cached == (event.digest in held):
                raise Violation(f"worker {event.worker_id}: told twice that a prefix is cached={event.is_cached}")
            if event.is_cached:
                held.add(event.digest)
                continue
            held.remove(event.digest)
            self._check_eviction(event.worker_id, event.digest, held)
        for event in events:
            if event.is_cached and event.digest in self.published[event.worker_id]:
                self._check_published(event.worker_id, event.worker_epoch, event.digest)

    def _check_eviction(self, worker_id: str, digest: bytes, held: set[bytes]) -> None:
        """A head that goes before its tail leaves the tail in the pool where no prompt can reach it."""
        worker = self.workers.get(worker_id)
        if worker is None or digest in worker.duplicates or digest in self.adopted:
            return
        if any(self.chains.parent.get(other) == digest for other in held):
            raise Violation(f"worker {worker_id} evicts a block before the blocks that continue it")

    def _check_published(self, worker_id: str, worker_epoch: int, digest: bytes) -> None:
        worker = self.workers[worker_id]
        if worker_epoch != worker.capacity.worker_epoch:
            raise Violation(f"worker {worker_id}: an event of epoch {worker_epoch}")
        holders = [block for block, content in enumerate(worker.content) if content == digest]
        if not any(worker.fill_step[block] <= worker.num_acked for block in holders):
            raise Violation(f"worker {worker_id}: published a prefix that no acknowledged step has computed")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """No more chaos: whatever is open must end within a bounded number of steps."""
        self._provide_room()
        work = sum(request.size * request.n for request in self.open.values())
        bound = self.num_steps + 200 + 20 * work
        idle = 0
        while self.scheduler.has_work or any(worker.queue for worker in self.workers.values()):
            self.now += self.rng.random()
            sent = self._schedule()
            idle = 0 if sent or any(worker.queue for worker in self.workers.values()) else idle + 1
            if idle > 3:
                raise Violation(f"nothing moves: {[r.request_id for r in self.open.values()]} are open")
            if self.num_steps > bound:
                raise Violation(f"no end after {self.num_steps} steps")
            self._answer()
            self._check()
        while self._schedule():
            while any(worker.queue for worker in self.workers.values()):
                self._answer()
        self._follow_prefixes()

    def _provide_room(self) -> None:
        """A worker that can hold everything, as an operator would start; those that drain leave once they are empty."""
        c = self._choose_capacity("ample")
        longest = -(-c.max_model_len // c.block_size)
        ample = WorkerCapacity(
            "ample", c.worker_epoch, longest, c.block_size, 4, max(4, c.max_num_batched_tokens), c.max_model_len, 2
        )
        if self.open and not all(self._can_hold_now(request) for request in self.open.values()):
            self._add(self._new_worker(ample))

    def _can_hold_now(self, request: Request) -> bool:
        return any(
            not w.is_draining
            and -(-request.size // w.capacity.block_size) <= w.capacity.num_blocks
            and request.n <= w.capacity.max_num_seqs
            for w in self.workers.values()
        )

    def _check_end(self) -> None:
        """Everything has ended exactly once and nothing is left behind, here or on the workers."""
        stats = self.scheduler.stats()
        if stats.num_waiting or stats.num_running:
            raise Violation(f"idle, with {stats.num_waiting} waiting and {stats.num_running} running")
        unfinished = [name for name, request in self.requests.items() if not request.is_done and name in self.open]
        if unfinished:
            raise Violation(f"{unfinished} never finished")
        for worker in stats.workers:
            total = self.workers[worker.worker_id].capacity.num_blocks
            if worker.blocks_used or worker.rows_used or worker.blocks_free + worker.blocks_cached != total:
                raise Violation(f"worker {worker.worker_id} leaks: {worker}")
        for name, fake in self.workers.items():
            self._check_worker_end(name, fake)

    def _check_worker_end(self, name: str, worker: SymbolicWorker) -> None:
        if worker.is_open.any() or worker.refs.any():
            raise Violation(f"worker {name} was never told to close rows {np.flatnonzero(worker.is_open).tolist()}")
        if not self.published[name] <= set(worker.committed.values()):
            raise Violation(f"worker {name}: prefixes are published that it was never told to commit")
        for block in worker.list_blocks():
            if worker.content[block.block_id] != block.digest:
                raise Violation(f"worker {name}: committed block {block.block_id} holds something else")

    # -- for people ---------------------------------------------------------------------------------------------------

    def transcript(self, last: int = 40) -> str:
        """The last events in words."""
        lines = [f"seed {self.seed}: {self.setup}", f"config: {self._config}"]
        lines += [_describe(entry) for entry in self.trace[-last:]]
        return "\n".join(lines)


def _describe(entry: tuple[Any, ...]) -> str:
    kind, *rest = entry
    if kind == "send":
        return f"send    {_describe_batch(rest[0])}"
    if kind == "submit":
        g = rest[0]
        return (
            f"submit  {g.request_id} prompt {len(g.prompt)} n {g.n} priority {g.priority} {g.stop} "
            f"outputs {[len(o) for o in g.outputs]} finished {sorted(g.finished_samples)}"
        )
    if kind == "answer":
        o = rest[0]
        pairs = dict(zip(o.rows.tolist(), o.token_ids.tolist(), strict=True))
        return f"answer  {o.worker_id} step {o.step_id} {pairs} failures {[f.row for f in o.failures]}"
    return f"{kind:7} " + " ".join(map(str, rest))


def _describe_batch(b: Any) -> str:
    parts = [f"{b.worker_id} step {b.step_id}"]
    if len(b.close_rows):
        parts.append(f"close {b.close_rows.tolist()}")
    for o in b.opens:
        parts.append(
            f"open {o.row}={o.group.request_id}.{o.sample_index} tokens {len(o.token_ids)} computed "
            f"{o.num_computed_tokens} table {o.block_table.tolist()}"
            + (f" fork of {o.fork_of_row}" if o.fork_of_row is not None else "")
        )
    changes = list(zip(b.table_rows.tolist(), b.table_indices.tolist(), b.table_blocks.tolist(), strict=True))
    if changes:
        parts.append(f"table {changes}")
    if len(b.copy_src):
        parts.append(f"copy {list(zip(b.copy_src.tolist(), b.copy_dst.tolist(), strict=True))}")
    if len(b.commit_blocks):
        parts.append(f"commit {b.commit_blocks.tolist()}")
    computed = zip(b.rows.tolist(), b.context_lens.tolist(), b.query_lens.tolist(), b.sample_mask.tolist(), strict=True)
    parts.append("rows " + " ".join(f"{r}:{c}+{q}{'*' if m else ''}" for r, c, q, m in computed))
    if len(b.fork_rows):
        parts.append(f"forks {list(zip(b.fork_rows.tolist(), b.fork_parents.tolist(), strict=True))}")
    return "; ".join(parts)


def run_seed(seed: int, make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler) -> Simulation:
    """Run one seed. A failure carries the seed, how to run it again, and the last events."""
    simulation = Simulation(seed, make_scheduler=make_scheduler)
    try:
        simulation.run()
    except Exception as error:
        error.add_note(simulation.transcript())
        error.add_note(f"seed {seed}: run it again with `python -m tests.sim.simulation {seed}`")
        raise
    return simulation


def main(first: int, last: int) -> None:
    """Run seeds first to last - 1 and tell what they covered."""
    start = time.perf_counter()
    totals = dict.fromkeys(("num_events", "num_steps", "num_tokens", "num_preemptions", "num_cached"), 0)
    for seed in range(first, last):
        simulation = run_seed(seed)
        for name in totals:
            totals[name] += getattr(simulation, name)
    print(f"{last - first} seeds in {time.perf_counter() - start:.1f} s: {totals}")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]] or [0, 2000]
    main(arguments[0], arguments[1] if len(arguments) > 1 else arguments[0] + 1)
