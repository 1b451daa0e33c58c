"""Inputs besides tokens in the core: which rows carry them, how many fit one step, and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from request_fields.sizes import MAX_INPUT_BYTES
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.core.features.draft_bytes import DraftBytes
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from step_protocol.features import ImageSteps, ImageWork
from step_protocol.messages import StepBatch
from tests.builders import answer, make_capacity, make_group, make_scheduler, run_to_end
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


def test_old_answers_of_a_step_fit_one_message_with_inputs() -> None:
    """A larger message fails, and the worker with it. Forks carry nothing."""
    scheduler = make_scheduler(make_capacity(max_num_batched_tokens=256), max_input_bytes=3 * MAX_INPUT_BYTES)
    drafts = DraftBytes(MAX_INPUT_BYTES // 2)
    for name, n in (("a", 3), ("b", 1), ("c", 1)):
        scheduler.add_group(make_group(8, name, n=n, others=[drafts]), 0.0)
    scheduler.add_group(request("d", range(8), (0, 8), num_bytes=1), 0.0)
    opened = []
    for _ in range(2):
        (batch,) = scheduler.schedule(0.0)
        opened.append({item.group.request_id for item in batch.opens})
        answer(scheduler, batch)
    assert opened[0] == {"a", "b"}
    with pytest.raises(QueueFullError, match="inputs and drafts of open requests have"):
        scheduler.add_group(make_group(8, "e", others=[DraftBytes(2 * MAX_INPUT_BYTES)]), 0.0)
    run_to_end(scheduler)
    check_scheduler(scheduler)


def test_the_inputs_of_open_requests_are_limited() -> None:
    scheduler = make_scheduler(max_input_bytes=250)
    scheduler.add_group(request("a", 8, (0, 8)), 0.0)
    scheduler.add_group(request("b", 8, (0, 8)), 0.0)
    with pytest.raises(QueueFullError, match=r"have 200 bytes, this request adds 100, the limit is 250"):
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
