"""Requests whose prompt begins with encoder positions: one chunk computes them, and they are shared as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.errors import NeverFitsError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.worker_state import StepPlan
from step_protocol.messages import StepBatch
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler
from tests.unit.core.test_scheduler import answer

ENCODER = range(100, 116)  # 4 blocks of 4 tokens
START = [7]


def encoder_group(request_id: str, decoder: list[int] = START, **fields: object) -> SequenceGroup:
    root_key = fields.pop("root_key", b"encoder")
    options = {"max_tokens": 4, "ignore_eos": True} | fields
    prompt = [*ENCODER, *decoder]
    return make_group(prompt, request_id, num_encoder_tokens=len(ENCODER), root_key=root_key, **options)


def step(scheduler: Scheduler) -> StepBatch:
    """The next step of the only worker, answered."""
    (batch,) = scheduler.schedule(0.0)
    scheduler.update(answer(batch), 0.0)
    check_scheduler(scheduler)
    return batch


def query_lens(batch: StepBatch) -> dict[int, int]:
    return dict(zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True))


def test_a_request_with_the_same_encoder_input_does_not_compute_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_group(encoder_group("a"), 0.0)
    step(scheduler)
    scheduler.add_group(encoder_group("b", [8, 9]), 0.0)
    scheduler.add_group(encoder_group("c", root_key=b"another"), 0.0)
    assert query_lens(step(scheduler)) == {0: 1, 1: 2, 2: 16}


def test_an_encoder_input_that_no_step_holds_is_refused() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=8, max_num_batched_tokens=20))
    with pytest.raises(NeverFitsError, match="takes 16 positions; must be at most 13, ") as found:
        scheduler.add_group(encoder_group("a"), 0.0)
    assert found.value.field == "prompt"


@pytest.mark.parametrize(("num_head_tokens", "fits"), [(0, True), (10, True), (11, False)])
def test_head_tokens_may_take_what_is_kept_for_a_long_prompt(num_head_tokens: int, fits: bool) -> None:
    plan = StepPlan(budget=1, now=0.0, kept=5, spare=4)
    assert plan.has_tokens_for(num_head_tokens) == fits
    assert not replace(plan, budget=0).has_tokens_for(0)
