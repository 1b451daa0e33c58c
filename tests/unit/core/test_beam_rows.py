"""Beam searches in the core: beams that fail, and beams that are computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from request_fields.beams import BeamParams
from scheduler_svc.core.messages import Deltas, Finished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from step_protocol.columns import EMPTY
from step_protocol.features import BeamCandidates
from step_protocol.messages import RowError, StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def answer_beams(scheduler: Scheduler, batch: StepBatch, *, fails: bool = False) -> Deltas:
    """Answers a step with candidates for each beam, or with the failure of each row that samples."""
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    if fails:
        errors = [RowError(row, "the logits are NaN") for row in rows.tolist()]
        return scheduler.update(StepOutput(batch.step_id, EMPTY, EMPTY, errors, worker_id=batch.worker_id), 0.0)
    spread = 0.1 if len(batch.fork_rows) else 50.0  # the beams part in the first step, and stay apart
    candidates = BeamCandidates(
        np.repeat(rows, 4), np.tile(u32(5, 6, 7, 8), len(rows)), np.tile(-1 - spread * np.arange(4), len(rows))
    )
    output = StepOutput(batch.step_id, rows, np.zeros_like(rows), parts=(candidates,), worker_id=batch.worker_id)
    return scheduler.update(output, 0.0)


def test_a_search_whose_logits_are_always_nan_ends_after_one_retry() -> None:
    scheduler = make_scheduler(make_capacity("a"), make_capacity("b"))
    scheduler.add_group(make_group(6, max_tokens=8, beam_params=BeamParams(4, 1)), 0.0)
    finished: list[Finished] = []
    for _ in range(10):
        for batch in scheduler.schedule(0.0):
            finished += answer_beams(scheduler, batch, fails=True).finished
            check_scheduler(scheduler)
    assert [(end.reason, end.message) for end in finished] == [(FinishReason.ERROR, "the logits are NaN")]


def test_beams_that_start_again_share_their_prompt_without_a_prefix_cache() -> None:
    """Admission counts the blocks of the prompt once, so the beams must share them whenever they open."""
    capacity = make_capacity("a", num_blocks=30, block_size=2, max_num_seqs=4)
    scheduler = make_scheduler(capacity, prefix_caching=False, eos_token_ids=())
    scheduler.add_group(make_group(6, max_tokens=13, beam_params=BeamParams(4, 1)), 0.0)
    for step in range(200):
        if step == 8:
            scheduler.add_worker(replace(capacity, worker_id="b"))
            scheduler.remove_worker("a")
        for batch in scheduler.schedule(0.0):
            answer_beams(scheduler, batch)
            check_scheduler(scheduler)
        if not scheduler.has_work:
            break
    assert not scheduler.has_work
    assert scheduler.stats().counts.num_preemptions == 0
