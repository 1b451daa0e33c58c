"""The invariants of the scheduler's core: each check raises AssertionError if data structures disagree."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.features.block_moves import BlockMoves
from scheduler_svc.core.features.block_sources import OwnSource
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.features.loans import Loans
from scheduler_svc.core.features.snapshots import Snapshots
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.waiting_queue import FairShare, WaitingQueue
from scheduler_svc.core.worker_state import WorkerState


def check_scheduler(scheduler: Scheduler) -> None:
    """Where each sequence is, which rows hold each block, and all the others."""
    for worker in scheduler._workers.values():
        check_worker(worker, scheduler.moves, scheduler.loans)
    check_requests(scheduler._requests, scheduler._workers, scheduler._placement)
    ready = {name for name, worker in scheduler._workers.items() if worker.can_send}
    assert set(scheduler._ready) == ready, "the ready workers differ from the workers that can send"


def check_worker(worker: WorkerState, moves: BlockMoves | None = None, loans: Loans | None = None) -> None:
    """Raise AssertionError if rows, tables and blocks disagree."""
    check_pool(worker.pool)
    rows, r = worker.rows.active(), worker.rows
    assert worker.num_messages <= worker.capacity.pipeline_depth, "more messages in flight than pipeline_depth"
    num_messages = sum(step.burst_len > 0 for step in worker.in_flight)
    assert worker.num_messages == num_messages, "the number of messages in flight is wrong"
    assert not worker.in_flight or worker.in_flight[-1].burst_len, "the newest step is not the last step of its message"
    todo = r.todo(rows)
    assert worker.pending_prefill == int(np.maximum(todo - 1, 0).sum()), "pending_prefill is wrong"
    in_flight = sum(int(step.query_lens[step.query_lens > 1].sum()) for step in worker.in_flight)
    assert worker._prefill_in_flight == in_flight, "the prompt tokens in flight are wrong"
    planned = [*r.in_run.nonzero()[0].tolist(), *worker.speculation.rows.tolist(), *r.outside]
    assert len(set(planned)) == len(planned), "a row is in two of the decode run, the rows that speculate, and outside"
    assert set(planned) <= set(rows.tolist()), "a closed row is still planned"
    idle = np.setdiff1d(rows, planned)
    assert (r.todo(idle) == 0).all(), "a row with tokens to compute is in no part of the next step"
    refs = np.zeros(worker.capacity.num_blocks, dtype=np.int64)
    for row in rows.tolist():
        _check_row(worker, row)
        np.add.at(refs, r.held_blocks(row), 1)
    for step in worker.in_flight:
        for blocks in step.releases:
            np.add.at(refs, blocks, 1)
    for one in moves._open.values() if moves is not None else ():
        if one.target is worker:
            np.add.at(refs, np.concatenate((one.prefix, one.move.block_ids)), 1)
        if one.source == OwnSource(worker):
            np.add.at(refs, one.pinned, 1)
    for loan in loans.open if loans is not None else ():
        if loan.worker is worker:
            np.add.at(refs, loan.block_ids, 1)
    assert (refs == worker.pool.refs).all(), "ref counts disagree with tables, steps in flight and moves"
    for part in worker.parts_of_all:
        if isinstance(part, WindowGroup):
            check_group(worker, part, moves, loans)
        if isinstance(part, Snapshots):
            check_snapshots(part)
    reserved = sum(len(r.sequence(row).forks) for row in rows.tolist())
    assert reserved == worker.num_reserved_rows, "reserved rows disagree with samples to fork"


def check_snapshots(part: Snapshots) -> None:
    """Raise AssertionError unless each slot is free, kept, being taken or being fetched."""
    taken = [one.slot for step in part._in_flight.values() for one in step]
    slots = [*part._free, *(kept.slot for kept in part.kept.values()), *taken, *part._arriving, *part._forgotten]
    assert sorted(slots) == list(range(part.worker.capacity.num_snapshots or 0)), (
        "a snapshot is in two slots or in none"
    )


def check_group(worker: WorkerState, group: WindowGroup, moves: BlockMoves | None, loans: Loans | None) -> None:
    """Raise AssertionError if the tables and blocks of a cache group disagree, or may run out."""
    check_pool(group.pool)
    tables, r, refs = group.tables, worker.rows, np.zeros(group.pool.num_blocks, dtype=np.int64)
    for row in r.active().tolist():
        held, first, computed = tables.held_blocks(row), int(tables.first_block[row]), int(r.num_computed_tokens[row])
        assert len(set(held.tolist())) == len(held), f"row {row}: a block is in its table of a group twice"
        assert first <= tables.first_needed(computed), f"row {row}: freed a block of a group that it needs"
        assert computed <= tables.num_blocks[row] * tables.block_size, f"row {row}: computed beyond its group's blocks"
        np.add.at(refs, held, 1)
    steps = {step.step_id for step in worker.in_flight}
    assert group._releases.keys() <= steps, "blocks of a group wait for a step that is not in flight"
    pending = [blocks for parts in group._releases.values() for blocks in parts]
    assert group._num_pending == sum(map(len, pending)), "the pending blocks of a group are wrong"
    for blocks in pending:
        np.add.at(refs, blocks, 1)
    extras = [of_part for one in (moves._open.values() if moves is not None else ()) for of_part in one.extras]
    moving = [extra.block_id for one in extras if one.part is group for extra in one.extras]
    moving += [extra.source_id for one in extras if one.source is group for extra in one.extras]
    lent = [of_part for loan in (loans.open if loans is not None else ()) for of_part in loan.extras]
    moving += [block for one in lent if one.part is group for block in one.ids]
    assert group._num_moving == len(moving), "the moving blocks of a group are wrong"
    np.add.at(refs, np.array(moving, np.int64) - group._first_id, 1)
    assert (refs == group.pool.refs).all(), "ref counts of a group disagree with its tables, steps in flight and moves"
    assert not group._copies, "a copy of a group was not sent"


def _check_row(worker: WorkerState, row: int) -> None:
    r, seq = worker.rows, worker.rows.sequence(row)
    assert seq.status is SequenceStatus.RUNNING, f"row {row} holds a {seq.status.name} sequence"
    assert (seq.worker_id, seq.row) == (worker.capacity.worker_id, row), f"row {row}: its sequence is elsewhere"
    held, first = r.held_blocks(row), int(r.first_block[row])
    assert len(set(held.tolist())) == len(held), f"row {row}: a block is in its table twice"
    assert first <= r.first_needed(int(r.num_computed_tokens[row])), f"row {row}: freed a block that it needs"
    assert r.num_computed_tokens[row] <= r.num_blocks[row] * r.block_size, f"row {row}: computed beyond its blocks"
    assert r.num_computed_tokens[row] <= r.num_planned[row], f"row {row}: computed beyond its tokens"
    assert r.num_tokens[row] <= r.num_planned[row], f"row {row}: a token of no step"
    assert r.num_planned[row] <= max(r.limit[row], r.prompt_len[row]), f"row {row}: more tokens than its limit"
    write = int(r.num_computed_tokens[row]) // r.block_size
    shared = (worker.pool.refs[held] > 1).nonzero()[0] + first
    assert not len(shared) or shared.max() <= write, f"row {row}: shares a block that it will write to"


def check_requests(requests: Requests, workers: dict[str, WorkerState], placement: Placement) -> None:
    """Raise AssertionError if the queue, the shares and the places of the sequences disagree."""
    groups = requests.groups.values()
    check_queue(requests.waiting)
    check_share(requests.share, Counter(group.tenant_slot for group in groups))
    assert requests.priorities == Counter(group.priority for group in groups), "priorities are wrong"
    assert requests.num_bytes == sum(group.features.num_bytes for group in groups), "bytes of inputs are wrong"
    for entry in requests.waiting:
        assert placement.could_run(entry.seq.group, entry.seq.failed_on), (
            f"sequence {entry.seq.seq_id} is schedulable, but no worker could run it"
        )
    for seq in requests.waiting.unschedulable if requests.admits_new else ():
        assert not placement.could_run(seq.group, seq.failed_on), (
            f"sequence {seq.seq_id} is unschedulable, but a worker could run it"
        )
    for group in groups:
        for seq in group.sequences:
            _check_place(seq, requests, workers)


def _check_place(seq: Sequence, requests: Requests, workers: dict[str, WorkerState]) -> None:
    """A live sequence is in exactly one place: in the queue, in a row, or among the forks of another sample."""
    places = [seq in requests.waiting]
    places.append(seq.worker_id is not None and workers[seq.worker_id].rows.sequences[seq.row or 0] is seq)
    places.append(any(seq in other.forks for other in seq.group.sequences))
    assert sum(places) == (0 if seq.is_finished else 1), f"sequence {seq.seq_id} is in {sum(places)} places"
    if seq.status is SequenceStatus.WAITING:
        assert not places[1], f"sequence {seq.seq_id} is waiting but holds a row"


def check_queue(queue: WaitingQueue) -> None:
    """Raise AssertionError if counts, keys and order disagree."""
    waiting = [entry for tenant in queue._by_tenant.values() for entry in tenant.entries]
    assert {entry.seq: entry for entry in waiting} == queue._entries, "entries and the order disagree"
    assert len(waiting) == len(queue._entries), "a sequence waits twice"
    tokens_outside = queue._unschedulable_tokens
    assert tokens_outside.keys() == queue.unschedulable.keys(), "tokens of other sequences are counted"
    assert queue.unschedulable_tokens == sum(tokens_outside.values()), "unschedulable_tokens is wrong"
    assert queue.unschedulable.keys().isdisjoint(queue._entries), "an unschedulable sequence is also in the queue order"
    by_priority = Counter[int]()
    for entry in waiting:
        by_priority[entry.seq.group.priority] += entry.num_tokens
    assert queue._tokens == by_priority, "tokens per priority are wrong"
    assert queue.pending_tokens == sum(entry.seq.data.num_tokens for entry in waiting), "pending_tokens is wrong"
    assert queue.expected_tokens == sum(entry.num_expected_tokens for entry in waiting), "expected_tokens is wrong"
    for slot, tenant in queue._by_tenant.items():
        entries, tokens = tenant.entries, Counter[int]()
        for entry in entries:
            tokens[entry.seq.group.priority] += entry.num_tokens
        assert entries, "a tenant has no entries but is listed"
        assert tenant.tokens == tokens, "tokens per tenant are wrong"
        assert tenant.expected_tokens == sum(entry.num_expected_tokens for entry in entries), (
            "expected tokens per tenant are wrong"
        )
        assert entries == sorted(entries, key=lambda entry: entry.key), "the queue is out of order"
        assert all(entry.seq.group.tenant_slot == slot for entry in entries), "an entry is listed under another tenant"
        assert all(entry.key[:2] == entry.seq.order[:2] for entry in entries), "an entry has an outdated key"


def check_share(share: FairShare, live: dict[int, int]) -> None:
    """Raise AssertionError unless the live requests per slot are `live`."""
    assert {slot: n for slot, n in enumerate(share._num_live) if n} == live, "tenants and live requests disagree"
    assert share._active == live.keys(), "the active tenants are wrong"


def check_pool(pool: BlockManager) -> None:
    """Raise AssertionError if counts, queues and digests disagree."""
    never_hit, hit, empties = queues(pool)
    empty, cached = set(empties), set(np.flatnonzero(pool._put_back_at).tolist())
    assert sorted(never_hit + hit) == sorted(cached), "a cached block is in no LRU queue, or in two"
    assert len(cached) == pool._num_cached, "the number of cached blocks is wrong"
    used = set(np.flatnonzero(pool.refs).tolist())
    assert len(empty) == pool._empty.size, "a block is in the empty list twice"
    assert len(empty) + len(cached) + len(used) == pool.num_blocks, "a block is in two places or in none"
    assert empty | cached | used == set(range(pool.num_blocks)), "a block number is outside the pool"
    assert (pool.refs >= 0).all(), "negative ref count"
    digests = {block: digest for block, digest in enumerate(pool._digest_of) if digest is not None}
    assert {digest: block for block, digest in digests.items()} == pool.held, "digest maps disagree"
    committed = set(np.flatnonzero(pool._is_committed).tolist())
    assert cached <= committed <= set(digests), "a cached block must be committed, a committed block needs a digest"
    assert not empty & set(digests), "an empty block has a digest"


def queues(pool: BlockManager) -> tuple[list[int], list[int], list[int]]:
    """Cached blocks never hit, cached blocks hit before, and empty blocks, each in the order of allocation."""
    return pool._cached.tolist(), pool._reused.tolist(), pool._empty.tolist()
