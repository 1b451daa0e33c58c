"""Inputs besides tokens in the core: which rows carry them, how many fit one step, and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from request_fields.inputs import MAX_INPUT_BYTES
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from step_protocol.features import ImageSteps, ImageWork
from step_protocol.messages import StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler


@dataclass(frozen=True)
class Carried:
    start: int
    length: int
    digest: bytes = b"d" * 16


def image_work(batch: StepBatch) -> tuple[ImageWork, ...]:
    found = batch.part(ImageSteps)
    return () if found is None else found.work


def request(name: str, prompt: Any = 20, *spans: tuple[int, int], num_bytes: int = 100, **fields: Any) -> SequenceGroup:
    inputs = [Carried(*span) for span in spans]
    return make_group(prompt, name, inputs=inputs, num_input_bytes=num_bytes, **fields)


def answer(scheduler: Scheduler, batch: StepBatch) -> None:
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    scheduler.update(StepOutput(batch.step_id, rows, np.full_like(rows, 9), worker_id=batch.worker_id), 0.0)


def test_the_inputs_of_a_step_fit_one_message() -> None:
    """The first request of a step may have any size; requests without inputs are not delayed behind the others."""
    scheduler = make_scheduler(make_capacity(max_num_batched_tokens=256))
    sizes = [MAX_INPUT_BYTES, 1, MAX_INPUT_BYTES // 2, MAX_INPUT_BYTES // 2 + 1]
    for i, size in enumerate(sizes):
        scheduler.add_group(request(f"r{i}", range(100 * i, 100 * i + 8), (0, 8), num_bytes=size), 0.0)
    opened = []
    while sum(map(len, opened)) < len(sizes):
        (batch,) = scheduler.schedule(0.0)
        opened.append([item.group.request_id for item in batch.opens])
        answer(scheduler, batch)
    assert opened == [["r0"], ["r1", "r2"], ["r3"]]
    check_scheduler(scheduler)


def test_the_inputs_of_open_requests_are_limited() -> None:
    scheduler = make_scheduler(max_input_bytes=250)
    scheduler.add_group(request("a", 8, (0, 8)), 0.0)
    scheduler.add_group(request("b", 8, (0, 8)), 0.0)
    with pytest.raises(QueueFullError, match=r"have 200 bytes, this request adds 100, and the limit is 250"):
        scheduler.add_group(request("c", 8, (0, 8)), 0.0)
    scheduler.add_group(request("text", 8, num_bytes=0), 0.0)
    scheduler.add_group(request("c", 8, (0, 8), takes_over=True), 0.0)  # it was accepted before
    check_scheduler(scheduler)
    scheduler.abort_group("a", FinishReason.ABORTED)
    scheduler.abort_group("c", FinishReason.ABORTED)
    scheduler.add_group(request("d", 8, (0, 8)), 0.0)
    run_to_end(scheduler)
    check_scheduler(scheduler)
    scheduler.add_group(request("e", 8, (0, 8), num_bytes=250), 0.0)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_input_bytes"):
        SchedulerConfig(max_input_bytes=-1)


# -- images ------------------------------------------------------------------------------------------------------------


def test_the_work_on_an_image_takes_the_tokens_of_steps() -> None:
    """Positions of an image follow all of its work, and text rows beside it decode in every step."""
    scheduler = make_scheduler(make_capacity(max_num_batched_tokens=16))
    scheduler.add_group(make_group(4, "text", max_tokens=20), 0.0)
    (batch,) = scheduler.schedule(0.0)
    answer(scheduler, batch)
    scheduler.add_group(request("image", 24, (3, 12), (17, 4), image_work=((3, 40), (17, 5))), 0.0)
    steps = []
    for _ in range(7):
        (batch,) = scheduler.schedule(0.0)
        rows = dict(zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True))
        assert rows.pop(0) == 1
        steps.append((rows.get(1, 0), [(work.start, work.done) for work in image_work(batch)]))
        assert sum(rows.values()) + 1 <= 16
        answer(scheduler, batch)
    assert steps[:6] == [
        (3, []),
        (0, [(3, 15)]),
        (0, [(3, 30)]),
        (5, [(3, 40)]),
        (9, []),
        (7, [(17, 5)]),
    ]
    run_to_end(scheduler)


def test_a_row_with_an_image_alone_is_computed() -> None:
    """Steps without tokens are sent, and a preempted or cached row does no work on computed images."""
    scheduler = make_scheduler(make_capacity(max_num_batched_tokens=8, pipeline_depth=2))
    group = request("image", 20, (0, 12), image_work=((0, 30),), max_tokens=4)
    scheduler.add_group(group, 0.0)
    first = scheduler.schedule(0.0) + scheduler.schedule(0.0)
    assert [[work.done for work in image_work(batch)] for batch in first] == [[8], [16]]
    for batch in first:
        answer(scheduler, batch)
    run_to_end(scheduler)
    scheduler.add_group(request("again", 20, (0, 12), image_work=((0, 30),)), 0.0)
    for batch in scheduler.schedule(0.0):
        assert not image_work(batch)
        answer(scheduler, batch)
    run_to_end(scheduler)


@pytest.mark.parametrize(
    ("num_prompt", "span", "is_cached"), [(9, (5, 4), True), (9, (8, 1), True), (9, (8, 1), False)]
)
def test_the_last_token_of_a_prompt_waits_for_its_image(
    num_prompt: int, span: tuple[int, int], is_cached: bool
) -> None:
    """Only the newest token is left to compute, but it is not a decode: its image is not computed."""
    scheduler = make_scheduler(make_capacity(max_num_batched_tokens=8))
    if is_cached:
        scheduler.add_group(request("first", num_prompt, span, image_work=((span[0], 3),), max_tokens=1), 0.0)
        run_to_end(scheduler)
    scheduler.add_group(request("again", num_prompt, span, image_work=((span[0], 20),), max_tokens=2), 0.0)
    done = 0
    while not done or scheduler.has_work:
        (batch,) = scheduler.schedule(0.0)
        done = max([done, *(work.done for work in image_work(batch))])
        is_last = bool(len(batch.rows)) and batch.context_lens[0] + batch.query_lens[0] >= num_prompt
        assert done == 20 or not is_last, "the last token is computed before its image"
        check_scheduler(scheduler)
        answer(scheduler, batch)
