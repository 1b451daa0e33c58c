"""The scheduler core between gateways that keep journals and symbolic workers that check every step.

A `Cluster` chooses nothing: tests say what happens next (`Simulation` from a seed, the property tests from Hypothesis).
After each call everything that came out of the core has been compared with the oracle and with the protocol; whatever
is wrong raises Violation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from prefix_index.index import Holder
from request_fields.parameters import BeamParams
from request_fields.sizes import blocks_of_row
from scheduler_svc.core.admission.barrier import Hold, HoldMode
from scheduler_svc.core.block_manager import ceil_div
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    NeverFitsError,
    NoWorkerError,
    QueueFullError,
    UnexpectedStepError,
)
from scheduler_svc.core.features.adapters import AdapterSwap, adapter_of
from scheduler_svc.core.features.beams import beam_blocks
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.features.pooled import PooledRequest
from scheduler_svc.core.messages import Deltas, Finished, MigrationReason, RowAssignment, WorkerCapacity
from scheduler_svc.core.policy import TierKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, StopCondition
from step_protocol.columns import EMPTY
from step_protocol.messages import StepOutput
from step_protocol.types import CacheGroup
from tests.builders import make_features
from tests.invariants import check_scheduler
from tests.sim import symbolic_model
from tests.sim.inputs import SimInput, borders_of, inputs_of, without_salt
from tests.sim.oracle import Expected, expected_beams, expected_output
from tests.sim.symbolic_model import pooled_number
from tests.sim.symbolic_worker import Chains, SymbolicWorker, Violation
from tests.sim.tiers import Tier, fetch, is_snapshot_of, record_of, snapshot_record, tier_kinds

ROOT_SALT = b"sim"
DISK_S = 1e9  # time of a read from a slow disk

ADAPTERS = tuple(bytes([number]) * 16 for number in range(1, 5))


@dataclass(slots=True)
class Request:
    """A gateway's journal of one request: its parameters, the expected tokens, the delivered tokens."""

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
    ended_by_us: set[int] = field(default_factory=set)  # samples that the gateway ended
    num_cached: dict[int, int] = field(default_factory=dict)  # per sample, at its first admission
    beams: BeamParams | None = None
    num_encoder_tokens: int = 0
    pooling: str = ""  # last or mean: the request returns a number instead of tokens
    number: float | None = None  # delivered
    inputs: list[SimInput] = field(default_factory=list)  # their content ids are in `prompt`
    adapter: bytes = b""
    conversation: int = 0

    @property
    def is_done(self) -> bool:
        return None not in self.finished

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.stop.max_tokens

    @property
    def num_sequences(self) -> int:
        return self.n if self.beams is None else self.beams.width


class Cluster:
    """One scheduler with its gateways and workers. `now` is the tests' clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
        checks_invariants: bool = True,
    ) -> None:
        self.config = config
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.now = 0.0
        self.chains = Chains(ROOT_SALT, block_size)
        self.requests: dict[str, Request] = {}
        self.open: dict[str, Request] = {}
        self.workers: dict[str, SymbolicWorker] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.num_steps = self.num_tokens = self.num_preemptions = self.num_cached_tokens = self.num_swaps = 0
        self.scheduler = make_scheduler(config)
        self._make_scheduler = make_scheduler
        self._checks_invariants = checks_invariants
        self._by_handle: dict[tuple[int, int], Request] = {}
        self._groups: dict[str, SequenceGroup] = {}  # groups of open requests, those of the scheduler
        self._opened_for: dict[tuple[str, int], tuple[str, int]] = {}  # (worker, row) -> (request, sample)
        self._published: dict[str, set[bytes]] = {}
        self._failed_requests: set[str] = set()
        self._has_seen_worker = False
        self.swaps: list[AdapterSwap] = []  # swaps that workers have not ended
        self.moves: list[BlockMove] = []  # moves of blocks under way
        self.tiers: dict[str, Tier] = {}  # by worker id: they survive the process
        self._forgotten: set[int] = set()  # moves whose source has another lease, in which nothing is held for them
        self.num_moved_blocks = 0
        self.has_slow_disks = False
        self._measured_disks: set[str] = set()  # ids of workers that have read from one since they joined
        self.num_updates = 0  # updates of the weights
        self.num_forgotten = 0  # how often all prefixes were forgotten
        self.after_schedule: Callable[[int], None] = lambda num_steps: None
        self._is_stale: set[int] = set()  # moves that were asked for before all prefixes were forgotten
        self._fetched: dict[int, int] = {}  # moves whose content has arrived, and how much

    def check(self) -> None:
        """The core's own invariants."""
        if self._checks_invariants:
            check_scheduler(self.scheduler)

    # -- requests -----------------------------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: list[int],
        stop: StopCondition,
        *,
        seed: int = 7,
        n: int = 1,
        priority: int = 0,
        root_key: bytes = b"",
        owner: int = 0,
        beams: BeamParams | None = None,
        num_encoder_tokens: int = 0,
        pooling: str = "",
        adapter: bytes = b"",
        conversation: int = 0,
    ) -> Request:
        """A request with the answer of the oracle."""
        eos, model_key = self.config.eos_token_ids, symbolic_model.key(root_key, adapter)
        if beams is None:
            expected = [expected_output(prompt, model_key, seed, i, stop, eos, self.vocab_size) for i in range(n)]
        else:
            n, expected = beams.num_returned, expected_beams(prompt, model_key, beams, stop, eos, self.vocab_size)
        number = len(self.requests) + 1
        return Request(
            request_id=f"r{number}",
            prompt=prompt,
            seed=seed,
            n=n,
            stop=stop,
            root_key=root_key,
            owner=owner,
            handle=number,
            priority=priority,
            expected=expected,
            beams=beams,
            num_encoder_tokens=num_encoder_tokens,
            pooling=pooling,
            inputs=inputs_of(prompt),
            adapter=adapter,
            conversation=conversation,
            delivered=[[] for _ in range(n)],
            finished=[None] * n,
        )

    def submit(self, request: Request) -> None:
        """A gateway submits the request, with the delivered tokens as Continuation. Gateways know max_model_len."""
        self.requests[request.request_id] = request
        if not self._has_seen_worker and request.num_tokens > self.max_model_len:
            return
        group = self._group(request)
        self.trace.append(("submit", group))
        try:
            deltas = self.scheduler.add_group(group, self.now)
        except (NeverFitsError, NoWorkerError, QueueFullError) as error:
            self._check_refusal(request, error)
            return
        self.open[request.request_id] = request
        self._groups[request.request_id] = group
        self._by_handle[request.owner, request.handle] = request
        self._absorb(deltas)

    def _group(self, request: Request) -> SequenceGroup:
        return SequenceGroup(
            request_id=request.request_id,
            prompt=self._sent_ids(request),
            stop=request.stop,
            owner=request.owner,
            handle=request.handle,
            n=request.n,
            priority=request.priority,
            root_key=request.root_key,
            options=request.seed,
            features=make_features(
                beam_params=request.beams,
                num_encoder_tokens=request.num_encoder_tokens,
                pooling=PooledRequest(may_hit=request.pooling == "last") if request.pooling else None,
                inputs=request.inputs,
                num_input_bytes=sum(item.length for item in request.inputs),
                image_work=[(item.start, 1 + 3 * item.length) for item in request.inputs if item.content == 0],
                adapter=request.adapter,
                others=borders_of(request.prompt, self.block_size),
            ),
            conversation=request.conversation,
            outputs=[np.array(tokens, dtype=np.uint32) for tokens in request.delivered],
            finished_samples=frozenset(i for i, reason in enumerate(request.finished) if reason is not None),
        )

    def _sent_ids(self, request: Request) -> np.ndarray:
        """The prompt as the gateway sends it."""
        return np.array(without_salt(request.prompt), dtype=np.uint32)

    def _check_refusal(self, request: Request, error: Exception) -> None:
        self.trace.append(("refused", request.request_id, str(error)))
        self.open.pop(request.request_id, None)
        if isinstance(error, QueueFullError):
            if self.scheduler.stats().num_waiting < self.config.max_waiting:
                raise Violation(f"refused below the limit: {error}")
        elif any(self._can_hold(worker, request) for worker in self.workers.values()):
            raise Violation(f"refused although it fits: {error}")

    def num_blocks_of(self, request: Request, window: int | None, *, shares_prompt: bool = True) -> int:
        """The smallest pool that can run the request."""
        num_blocks = most = ceil_div(request.num_tokens, self.block_size)
        if window is not None:
            most = 1 + ceil_div(window - 1, self.block_size)
        if request.beams is not None:
            width, prompt_len = request.num_sequences, len(request.prompt)
            max_tokens = request.stop.max_tokens
            num_blocks = beam_blocks(prompt_len, max_tokens, width, self.block_size, shares_prompt=shares_prompt)
            most *= width
        return num_blocks if window is None else min(num_blocks, most)

    def _can_hold(self, worker: SymbolicWorker, request: Request) -> bool:
        c = worker.capacity
        shares_prompt = not c.groups and c.num_snapshots is None
        return (
            request.num_tokens <= c.max_model_len
            and request.num_encoder_tokens <= c.max_encoder_tokens
            and request.num_sequences <= c.max_num_seqs
            and self.num_blocks_of(request, c.attention_window, shares_prompt=shares_prompt) <= c.num_blocks
            and all(self._num_rows(request) <= self._max_rows(c, group) for group in c.groups)
        )

    def _num_rows(self, request: Request) -> int:
        return 1 if request.beams is None else request.num_sequences

    def _max_rows(self, capacity: WorkerCapacity, group: CacheGroup) -> int:
        return group.num_blocks // blocks_of_row(group.attention_window, self.block_size, capacity.pipeline_depth)

    def abort(self, request: Request) -> None:
        """The client has cancelled."""
        self.trace.append(("abort", request.request_id))
        request.ended_by_us.update(range(request.n))
        self._absorb(self.scheduler.abort_group(request.request_id, FinishReason.ABORTED))
        if not request.is_done:
            raise Violation(f"{request.request_id} still runs after an abort")

    def stop_sample(self, request: Request, sample: int) -> None:
        """The gateway matched a stop string."""
        self.trace.append(("stop", request.request_id, sample))
        request.ended_by_us.add(sample)
        self._absorb(self.scheduler.finish_sample(request.request_id, sample, FinishReason.STOP))
        if request.finished[sample] is None:
            raise Violation(f"{request.request_id} sample {sample} still runs after it was stopped")

    def talk_nonsense(self) -> None:
        """Calls that are not allowed are refused or ignored, and change nothing."""
        for request in self.open.values():
            self._must_refuse(
                DuplicateRequestError, lambda r=request: self.scheduler.add_group(self._group(r), self.now)
            )
        for worker in self.workers.values():
            step_id = worker.queue[0].batch.step_id + 1 if worker.queue else worker.next_step_id
            output = StepOutput(step_id, EMPTY, EMPTY, worker_id=worker.capacity.worker_id)
            self._must_refuse(UnexpectedStepError, lambda o=output: self.scheduler.update(o, self.now))
            self._must_refuse(ValueError, lambda w=worker: self.scheduler.add_worker(w.capacity))
        for done in [request for request in self.requests.values() if request.is_done]:
            self._absorb(self.scheduler.abort_group(done.request_id, FinishReason.ABORTED))
            self._absorb(self.scheduler.finish_sample(done.request_id, 0, FinishReason.STOP))
        self._absorb(self.scheduler.update(StepOutput(1, EMPTY, EMPTY, worker_id="stranger"), self.now))
        self.scheduler.remove_worker("stranger")
        self.scheduler.drain_worker("stranger")

    def _must_refuse(self, error: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except error:
            return
        raise Violation(f"expected a {error.__name__}")

    # -- steps --------------------------------------------------------------------------------------------------------

    def schedule(self) -> int:
        """Send all steps that the core schedules; returns their number."""
        batches = self.scheduler.schedule(self.now)
        for batch in batches:
            worker = self.workers[batch.worker_id]
            self.trace.append(("send", batch))
            if worker.is_draining and any(_is_new(opened) for opened in batch.opens):
                raise Violation(f"worker {batch.worker_id} is draining and gets a new row")
            for row in batch.close_rows.tolist():
                self._opened_for.pop((batch.worker_id, row), None)
            for opened in batch.opens:
                self._record_cached(batch.worker_id, opened)
                if (adapter := adapter_of(opened.group)) and adapter not in worker.resident:
                    raise Violation(f"row {opened.row} of {batch.worker_id} opens with an adapter that is not resident")
            worker.send(batch)
        self._begin_swaps()
        self._begin_moves()
        self.num_steps += len(batches)
        self.check()
        self._check_rows()
        self.after_schedule(len(batches))
        return len(batches)

    def _begin_swaps(self) -> None:
        for swap in self.scheduler.adapters.take_swaps():
            self.trace.append(("swap", swap))
            worker = self.workers[swap.worker_id]
            worker.resident &= set(swap.kept)
            if len(worker.resident) >= worker.capacity.max_adapters:
                raise Violation(f"worker {swap.worker_id} has no place for the adapter that it must swap in")
            if swap.digest in worker.resident or swap.digest in (s.digest for s in self.swaps_of(worker)):
                raise Violation(f"worker {swap.worker_id} swaps an adapter in twice")
            self.swaps.append(swap)

    def _begin_moves(self) -> None:
        for worker_id, worker in self.workers.items():
            news, worker.newly_committed = worker.newly_committed, []
            movement = worker.capacity.movement
            if movement is None or not movement.has_tier:
                continue
            first = worker.capacity.num_all_blocks
            held = [(block, digest) for block, digest in news if block < first and worker.holds(block, digest)]
            kept = [
                (i - first, digest) for i, digest in news if i >= first and is_snapshot_of(worker, i - first, digest)
            ]
            tier = self.tiers.setdefault(worker_id, {})
            tier.update({digest: record_of(worker, block, digest) for block, digest in held})
            tier.update({digest: snapshot_record(worker, slot, digest) for slot, digest in kept})
            held += kept
            self.scheduler.moves.change_tiers(worker_id, self._kinds(digest for _, digest in held))
        for move in self.scheduler.moves.take_moves():
            self.trace.append(("move", move))
            self.moves.append(move)
            pace = self.scheduler.moves._throughput.prefill.early_per_s  # while it is unknown, blocks are moved
            if pace is not None and self._is_slow(move) and move.worker_id in self._measured_disks:
                raise Violation(f"worker {move.worker_id} reads {move.num_items} blocks from files that take years")

    def ready_moves(self) -> list[BlockMove]:
        """The moves whose blocks their target may write now: the steps that were in flight have run."""
        return [move for move in self.moves if self._may_write(move)]

    def _may_write(self, move: BlockMove) -> bool:
        worker = self.workers.get(move.worker_id)
        return worker is None or worker.next_step_id > move.after_step_id

    def end_move(self, move: BlockMove, limit: int) -> None:
        """A fetch ends with at most this many blocks."""
        self.moves.remove(move)
        count = self._fetched.pop(move.move_id, None)
        if count is None:
            count = self._fetch(move, limit)
        self.trace.append(("moved", move, count))
        self.num_moved_blocks += count
        is_slow = count > 0 and self._is_slow(move)
        if is_slow:
            self._measured_disks.add(move.worker_id)
        self.scheduler.end_move(move.move_id, count, DISK_S if is_slow else 0.01, self.now)
        self._follow_prefixes()

    def _fetch(self, move: BlockMove, limit: int) -> int:
        target = self.workers[move.worker_id]
        if target.is_pool_asleep:
            return 0
        tier, is_held = self.tiers.setdefault(move.worker_id, {}), move.move_id not in self._forgotten | self._is_stale
        count = fetch(move, target, self.workers, tier, limit, is_held=is_held)
        if move.move_id in self._is_stale:
            target.is_forgotten[move.block_ids[:count]] = True
        return count

    def _is_slow(self, move: BlockMove) -> bool:
        """Whether it takes much longer than to compute the tokens."""
        return self.has_slow_disks and move.source is None

    def _kinds(self, digests: Iterable[bytes]) -> dict[bytes, TierKind | None]:
        return dict.fromkeys(digests, TierKind.DISK) if self.has_slow_disks else tier_kinds(digests)

    def swaps_of(self, worker: SymbolicWorker) -> list[AdapterSwap]:
        return [swap for swap in self.swaps if swap.worker_id == worker.capacity.worker_id]

    def end_swap(self, swap: AdapterSwap) -> None:
        """A worker has made an adapter resident."""
        self.swaps.remove(swap)
        self.trace.append(("swapped", swap))
        self.num_swaps += 1
        self.workers[swap.worker_id].resident.add(swap.digest)
        self.scheduler.adapters.end_swap(swap.worker_id, swap.digest, is_resident=True)

    def _check_rows(self) -> None:
        """Every running sequence was opened on its worker: a row that only the books know never gets a token."""
        for name in self.open:
            for seq in self._groups[name].sequences:
                opened_for, _ = self._opened_for.get((seq.worker_id or "", seq.row or 0), (None, 0))
                if seq.worker_id is not None and opened_for != name:
                    raise Violation(f"row {seq.row} of {seq.worker_id} runs {name} and was never opened for it")

    def _record_cached(self, worker_id: str, opened: RowAssignment) -> None:
        """The expected usage.cached_tokens: the hit of the first admission; for a fork, that of its parent."""
        request, sample = self.requests[opened.group.request_id], opened.sample_index
        num_cached = opened.num_computed_tokens
        if opened.fork_of_row is not None:
            _, parent = self._opened_for[worker_id, opened.fork_of_row]
            num_cached = request.num_cached[parent]
        self._opened_for[worker_id, opened.row] = (request.request_id, sample)
        request.num_cached.setdefault(sample, min(num_cached, len(request.prompt)))

    def answer(self, worker: SymbolicWorker) -> None:
        """The worker's oldest step is answered."""
        output = worker.answer()
        self.trace.append(("answer", output))
        self._absorb(self.scheduler.update(output, self.now))
        self._follow_prefixes()

    def busy_workers(self) -> list[SymbolicWorker]:
        """Workers that owe an answer."""
        return [worker for worker in self.workers.values() if worker.queue]

    def _absorb(self, deltas: Deltas) -> None:
        columns = (deltas.owners, deltas.handles, deltas.sample_indices, deltas.offsets, deltas.token_ids)
        for owner, handle, sample, offset, token in zip(*(c.tolist() for c in columns), strict=True):
            self._receive(self._by_handle[owner, handle], sample, offset, token)
        if deltas.pooled is not None:
            columns = deltas.pooled.owners.tolist(), deltas.pooled.handles.tolist(), deltas.pooled.values.tolist()
            for owner, handle, number in zip(*columns, strict=True):
                self._by_handle[owner, handle].number = number
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
        self._check_reason(name, request, finished)
        if finished.num_output_tokens != len(request.delivered[sample]):
            raise Violation(
                f"{name}: reports {finished.num_output_tokens} tokens, delivered {len(request.delivered[sample])}"
            )
        num_cached = request.num_cached.get(sample, finished.num_cached_tokens)
        if finished.num_cached_tokens != num_cached:
            raise Violation(f"{name}: reports {finished.num_cached_tokens} cached tokens, expected {num_cached}")
        self.num_cached_tokens += finished.num_cached_tokens
        self.num_preemptions += finished.num_preemptions
        if request.is_done:
            self.open.pop(request.request_id, None)

    def _check_reason(self, name: str, request: Request, finished: Finished) -> None:
        sample = finished.sample_index
        if finished.reason is FinishReason.ERROR and request.expected[sample].reason is not FinishReason.ERROR:
            if request.request_id not in self._failed_requests:
                raise Violation(f"{name}: {finished.message}")
            return
        if request.pooling and finished.reason is FinishReason.LENGTH:
            expected = pooled_number(
                request.prompt, symbolic_model.key(request.root_key, request.adapter), request.pooling
            )
            if request.number != expected:
                raise Violation(f"{name}: the number {request.number}, the oracle has {expected}")
        got = Expected(request.delivered[sample], finished.reason, finished.stop_token_id)
        if sample not in request.ended_by_us and got != request.expected[sample]:
            raise Violation(f"{name}: {got}, the oracle has {request.expected[sample]}")

    # -- workers ------------------------------------------------------------------------------------------------------

    def join(self, capacity: WorkerCapacity, *, first_step: int = 1, is_lazy: bool = False) -> SymbolicWorker:
        """A worker starts and registers."""
        worker = SymbolicWorker(capacity, self.chains, self.vocab_size, next_step_id=first_step, is_lazy=is_lazy)
        worker.failed_requests = self._failed_requests
        self._add(worker)
        return worker

    def _add(self, worker: SymbolicWorker) -> None:
        c, blocks = worker.capacity, worker.list_blocks()
        self.trace.append(("join", c, f"blocks {len(blocks)}", f"next step {worker.next_step_id}"))
        self.workers[c.worker_id] = worker
        worker.version = self.num_updates
        self._has_seen_worker = True
        self._opened_for = {
            place: opened_for for place, opened_for in self._opened_for.items() if place[0] != c.worker_id
        }
        self._published[c.worker_id] = set()
        self.scheduler.add_worker(c, blocks, next_step_id=worker.next_step_id)
        self.scheduler.adapters.set_loaded(c.worker_id, ADAPTERS if c.max_adapters else ())
        if c.movement is not None and c.movement.has_tier:
            self.scheduler.moves.change_tiers(c.worker_id, self._kinds(self.tiers.get(c.worker_id, ())))
        self._follow_prefixes()

    def lose(self, worker: SymbolicWorker) -> None:
        """The scheduler loses the worker; an answer that was on the wire is ignored."""
        self._remove(worker)
        if worker.queue:
            self._absorb(self.scheduler.update(worker.answer(), self.now))

    def reconnect(self, worker: SymbolicWorker) -> None:
        """The connection breaks but the process survives: its rows end, its committed blocks are adopted."""
        worker.was_reconnected = True
        self._forgotten |= {
            m.move_id for m in self.moves if m.source and m.source.worker_id == worker.capacity.worker_id
        }
        self._remove(worker)
        worker.lease()
        self._add(worker)

    def _remove(self, worker: SymbolicWorker) -> None:
        name = worker.capacity.worker_id
        self.trace.append(("remove", name))
        self.scheduler.remove_worker(name)
        self.swaps = [swap for swap in self.swaps if swap.worker_id != name]
        self.moves = [move for move in self.moves if move.worker_id != name]
        self._measured_disks.discard(name)
        del self.workers[name]
        self._follow_prefixes()
        if self._published.pop(name):
            raise Violation(f"worker {name} was removed, but its prefixes are still published")

    def drain(self, worker: SymbolicWorker) -> None:
        """The worker drains."""
        self.trace.append(("drain", worker.capacity.worker_id))
        worker.is_draining = True
        self.scheduler.drain_worker(worker.capacity.worker_id)

    def update_weights(self, *, keeps_kv: bool) -> None:
        """All workers get other weights between two steps. Running rows are computed again, or keep what they have."""
        self.trace.append(("update", keeps_kv))
        barrier = self.scheduler.barrier
        barrier.hold(Hold("update", HoldMode.KEEP))
        while not barrier.take_reached():
            if self.schedule():
                raise Violation("plans a step behind a closed barrier")
            self.answer(self.busy_workers()[0])
        self.switch_weights(keeps_kv=keeps_kv)
        barrier.release("update")

    def switch_weights(self, *, keeps_kv: bool) -> None:
        """The same while the barrier is reached."""
        self._forget()
        self.num_updates += 1
        for worker in self.workers.values():
            worker.change_weights(self.num_updates)
        salt = b"sim %d" % self.num_updates
        self.config = replace(self.config, root_salt=salt)
        self.chains.change_root(salt)
        self.scheduler.change_weights(salt, keeps_kv=keeps_kv)
        self._follow_prefixes()

    def reset_prefix_cache(self) -> None:
        """No prefix stays cached, in pools and tiers. The barrier is reached."""
        self._forget()
        self.scheduler.forget_prefixes()
        for name, tier in self.tiers.items():
            self.scheduler.moves.change_tiers(name, dict.fromkeys(tier))
            tier.clear()
        for worker in self.workers.values():
            worker.forget_prefixes()
        self._follow_forgotten()

    def sleep(self, rng: Random) -> None:
        """All pools lose their memory. The barrier is reached. Some blocks have arrived before, and the answers that
        say it arrive later.
        """
        for move in self.ready_moves():
            if rng.random() < 0.5:
                self._fetched.setdefault(move.move_id, self._fetch(move, rng.choice((1, move.num_items))))
        self._forget()
        self.scheduler.barrier.retract(MigrationReason.PAUSE)
        self.scheduler.forget_prefixes()
        for worker in self.workers.values():
            worker.free_pool()
        self._follow_forgotten()

    def _forget(self) -> None:
        self.num_forgotten += 1
        self._is_stale = {move.move_id for move in self.moves}

    def restart_scheduler(self, order: Iterable[Request]) -> None:
        """kill -9: a new scheduler adopts the pools, then the gateways submit their open requests, in this order."""
        self.trace.append(("restart",))
        self.scheduler = self._make_scheduler(self.config)
        self.open, workers, self.workers = {}, self.workers, {}
        self.swaps.clear()
        for of_moves in (self.moves, self._fetched, self._forgotten, self._is_stale):
            of_moves.clear()  # the next scheduler numbers moves from the start
        self._measured_disks.clear()
        for request in self.requests.values():
            request.num_cached.clear()
        for worker in workers.values():
            worker.lease()
            self._add(worker)
        for request in order:
            self.submit(request)

    # -- the prefix index ---------------------------------------------------------------------------------------------

    def _follow_forgotten(self) -> None:
        """No prefix is published any more. Blocks in use lose theirs at once, in any order."""
        for change in self.scheduler.take_prefix_events():
            self._published[change.holder.worker_id].difference_update(digest for digest, _ in change.blocks)
        if any(self._published.values()):
            raise Violation("prefixes that were forgotten are still published")

    def _follow_prefixes(self) -> None:
        """Apply prefix events like an index, and check them."""
        changes = self.scheduler.take_prefix_events()
        for change in changes:
            for digest, is_cached in change.blocks:
                self._apply_change(change.holder, digest, is_cached=is_cached)
        for change in changes:
            for digest, is_cached in change.blocks:
                if is_cached and digest in self._published[change.holder.worker_id]:
                    self._check_published(change.holder, digest)

    def _apply_change(self, holder: Holder, digest: bytes, *, is_cached: bool) -> None:
        held, worker = self._published[holder.worker_id], self.workers.get(holder.worker_id)
        if is_cached == (digest in held):
            raise Violation(f"worker {holder.worker_id}: two changes in a row to cached={is_cached} of one prefix")
        if is_cached:
            held.add(digest)
            return
        held.remove(digest)
        if worker is None or digest in worker.duplicates:
            return
        if worker.capacity.attention_window is not None:
            return  # a row frees its first blocks before the others
        if any(self.chains.parent.get(other) == digest for other in held):
            raise Violation(f"worker {holder.worker_id} evicts a block before the blocks that continue it")

    def _check_published(self, holder: Holder, digest: bytes) -> None:
        worker = self.workers[holder.worker_id]
        if holder.worker_epoch != worker.capacity.worker_epoch:
            raise Violation(f"worker {holder.worker_id}: a prefix change of epoch {holder.worker_epoch}")
        blocks = [block for block, content in enumerate(worker.content) if content == digest]
        if not any(worker.fill_step[block] <= worker.num_acked for block in blocks):
            raise Violation(f"worker {holder.worker_id}: published a prefix that no acknowledged step has computed")

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self, choose: Callable[[list[SymbolicWorker]], SymbolicWorker]) -> None:
        """No more requests or faults: all open requests must end within a bounded number of steps."""
        work = sum(request.num_tokens * request.num_sequences for request in self.open.values())
        bound, num_idle = self.num_steps + 200 + 20 * work, 0
        while (
            self.schedule()
            or self.busy_workers()
            or self.scheduler.has_work
            or self.moves
            or self.scheduler.changes_due_at < math.inf
        ):
            self.now += 1.0
            busy = self.busy_workers()
            num_idle = 0 if busy or self.swaps or self.moves else num_idle + 1
            if self.swaps:
                self.end_swap(self.swaps[0])
            if ready := self.ready_moves():
                self.end_move(ready[0], ready[0].num_items)
            if busy:
                self.answer(choose(busy))
                self.check()
            if num_idle > 3:
                raise Violation(f"no progress, and {list(self.open)} are open")
            if self.num_steps > bound:
                raise Violation(f"the run did not end within {self.num_steps} steps")

    def can_finish(self) -> bool:
        """Every open request has a worker that admits sequences and could run it."""
        takers = [worker for worker in self.workers.values() if not worker.is_draining]
        return all(any(self._can_hold(worker, request) for worker in takers) for request in self.open.values())

    def check_end(self) -> None:
        """Every request ended exactly once, and nothing is left in the scheduler, on the workers or in the index."""
        if self.open or self.scheduler.has_work:
            raise Violation(f"{list(self.open)} never finished")
        stats = self.scheduler.stats()
        if stats.num_waiting or stats.num_running:
            raise Violation(f"idle, with {stats.num_waiting} waiting and {stats.num_running} running")
        for worker in stats.workers:
            total = self.workers[worker.worker_id].capacity.num_blocks
            if worker.blocks_used or worker.rows_used or worker.blocks_free + worker.blocks_cached != total:
                raise Violation(f"worker {worker.worker_id} leaks: {worker}")
        for worker in self.scheduler._workers.values():
            for part in worker.parts_of_all:
                if isinstance(part, WindowGroup) and part.pool.num_used:
                    raise Violation(f"worker {worker.capacity.worker_id} leaks {part.pool.num_used} blocks of a group")
        self._check_index()
        for name, fake in self.workers.items():
            self._check_worker_end(name, fake)

    def _check_index(self) -> None:
        held: dict[str, set[bytes]] = {name: set() for name in self.workers}
        for change in self.scheduler.cached_prefixes():
            held[change.holder.worker_id] |= {digest for digest, _ in change.blocks}
        if held != {name: self._published[name] for name in self.workers}:
            raise Violation("the prefix events do not add up to the cached prefixes")

    def _check_worker_end(self, name: str, worker: SymbolicWorker) -> None:
        if worker.is_open.any() or worker.refs.any():
            raise Violation(f"worker {name} was not asked to close rows {np.flatnonzero(worker.is_open).tolist()}")
        if not self._published[name] <= set(worker.committed.values()):
            raise Violation(f"worker {name}: published prefixes that it was not asked to commit")
        for group in worker.groups:
            group.check_end()
        for block in worker.list_blocks():
            if block.block_id >= worker.capacity.num_blocks:
                continue
            if worker.content[block.block_id] != block.digest:
                raise Violation(f"worker {name}: committed block {block.block_id} holds the wrong content")


def _is_new(opened: RowAssignment) -> bool:
    """Whether a row begins a sequence, and not another sample or beam of a request that runs on the worker."""
    return opened.fork_of_row is None and not (opened.num_candidates and opened.sample_index)
