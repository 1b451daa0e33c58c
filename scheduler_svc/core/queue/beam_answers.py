"""Applies the answer to a step with beams: collects the candidates, then moves the beams or ends the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_svc.core.deltas import Deltas, Finished
from scheduler_svc.core.queue.fair_share import FairShare
from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.beam_rows import candidates_of
from scheduler_svc.core.steps.step_plan import InFlightStep
from scheduler_svc.core.steps.worker_state import WorkerState
from step_protocol.messages import RowError, StepOutput, concat_columns, no_logprobs


class BeamAnswers:
    """A search advances when all its beams have candidates. This may take several steps, because a beam skips a step if
    the pool has no block for it.

    `fail` retries or ends the sequence of a failed row.
    """

    def __init__(
        self, requests: Requests, share: FairShare, fail: Callable[[WorkerState, RowError], list[Finished]]
    ) -> None:
        self._requests = requests
        self._share = share
        self._fail = fail

    def update(self, worker: WorkerState, step: InFlightStep, output: StepOutput, deltas: Deltas) -> Deltas:
        """Apply the candidates of an answer. Returns `deltas` with the results of the searches that end."""
        r, ready = worker.rows, list[SequenceGroup]()
        for row in output.rows[r.is_beam[output.rows]].tolist():
            if row in step.closed:
                continue
            seq = r.sequence(row)
            problem = self._put(worker, seq, output)
            if problem is not None:
                deltas.finished.extend(self._fail(worker, problem))
            elif seq.group.search is not None and seq.group.search.is_ready:
                ready.append(seq.group)
        for group in ready:
            deltas = self._advance(worker, group, deltas)
        return deltas

    def _put(self, worker: WorkerState, seq: Sequence, output: StepOutput) -> RowError | None:
        """Store the candidates of a beam. Returns a failure if the worker did not return as many as requested."""
        search, row = seq.group.search, seq.row
        if search is None or row is None:
            raise RuntimeError(f"sequence {seq.seq_id} is not a running beam: a bug in the scheduler")
        candidates = candidates_of(output, row)
        expected = min(search.num_candidates, worker.capacity.vocab_size)
        if len(candidates.token_ids) != expected:
            found = f"{len(candidates.token_ids)} candidates for this beam, expected {expected}"
            return RowError(row, f"the worker returned {found}")
        search.put(seq.sample_index, candidates)
        self._share.charge_outputs(worker.rows.tenant, np.array([row]))
        return None

    def _advance(self, worker: WorkerState, group: SequenceGroup, deltas: Deltas) -> Deltas:
        search, r = group.search, worker.rows
        if search is None:
            raise RuntimeError(f"request {group.request_id} has no beam search: a bug in the scheduler")
        rows = [seq.row or 0 for seq in group.sequences]
        length = int(r.num_tokens[rows[0]] - r.prompt_len[rows[0]]) + 1
        moves = search.advance(length, lambda beam: r.output_tokens(rows[beam]))
        if moves is not None:
            worker.beams.move(group, moves)
            return deltas
        return _with_outputs(deltas, group, self._requests.end_search(group))


def _with_outputs(deltas: Deltas, group: SequenceGroup, ends: list[Finished]) -> Deltas:
    """`deltas`, with the sequences of an ended search as the samples of its request."""
    found = group.search.hypotheses[: group.n] if group.search is not None else []
    lengths = [len(best.token_ids) for best in found]
    count = sum(lengths)
    columns = {
        "owners": np.full(count, group.owner),
        "handles": np.full(count, group.handle),
        "sample_indices": np.repeat(np.arange(len(found)), lengths),
        "offsets": np.concatenate([np.arange(length) for length in (0, *lengths)]),
        "token_ids": np.concatenate([deltas.token_ids[:0], *(best.token_ids for best in found)]),
    }
    if deltas.logprobs is not None:
        deltas = replace(deltas, logprobs=concat_columns([deltas.logprobs, no_logprobs(count)]))
    joined: dict[str, Any] = {
        name: np.append(getattr(deltas, name), column).astype(np.uint32) for name, column in columns.items()
    }
    return replace(deltas, **joined, finished=deltas.finished + ends, owner=None)
