"""Invariants across the data structures of the core, for tests: where each sequence is, which rows hold each block."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_svc.core.placement import Placement
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.worker_state import WorkerState


def check_worker(worker: WorkerState) -> None:
    """Raise AssertionError if rows, tables and blocks disagree."""
    worker.pool.check_invariants()
    rows, r = worker.rows.active(), worker.rows
    assert worker.num_messages <= worker.capacity.pipeline_depth, "more messages in flight than pipeline_depth"
    num_messages = sum(step.burst_len > 0 for step in worker.in_flight)
    assert worker.num_messages == num_messages, "the number of messages in flight is wrong"
    assert not worker.in_flight or worker.in_flight[-1].burst_len, "the newest step is not the last step of its message"
    assert worker.pending_prefill == r.pending_prefill(), "pending_prefill is wrong"
    in_flight = sum(int(step.query_lens[step.query_lens > 1].sum()) for step in worker.in_flight)
    assert worker.backlog == worker.pending_prefill + in_flight, "the prompt tokens in flight are wrong"
    in_run = set(r.in_run.nonzero()[0].tolist())
    assert in_run.isdisjoint(r.outside), "a row is both in the decode run and outside"
    assert in_run.union(r.outside) <= set(rows.tolist()), "a closed row is still planned"
    idle = np.array([row for row in rows.tolist() if row not in in_run and row not in r.outside], dtype=np.int64)
    assert (r.todo(idle) == 0).all(), "a row with tokens to compute is neither in the decode run nor outside"
    refs = np.zeros(worker.capacity.num_blocks, dtype=np.int64)
    for row in rows.tolist():
        _check_row(worker, row)
        np.add.at(refs, r.held_blocks(row), 1)
    for step in worker.in_flight:
        for blocks in step.releases:
            np.add.at(refs, blocks, 1)
    assert (refs == worker.pool.refs).all(), "ref counts disagree with tables and steps in flight"
    reserved = sum(len(r.sequence(row).forks) for row in rows.tolist())
    assert reserved == worker.num_reserved_rows, "reserved rows disagree with samples to fork"


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
    requests.waiting.check_invariants()
    requests.share.check_invariants(Counter(group.tenant_slot for group in groups))
    assert requests.priorities == Counter(group.priority for group in groups), "priorities are wrong"
    assert requests.num_bytes == sum(group.features.num_bytes for group in groups), "bytes of inputs are wrong"
    for entry in requests.waiting:
        assert placement.could_run(entry.seq.group, entry.seq.failed_on), (
            f"sequence {entry.seq.seq_id} is schedulable, but no worker could run it"
        )
    for seq in requests.waiting.unschedulable:
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
