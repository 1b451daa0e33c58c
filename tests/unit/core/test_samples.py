"""Samples of one request: admitted as rows become free, and equal in everything but their first step."""

from __future__ import annotations

import pytest

from scheduler_svc.core.scheduler import Scheduler
from step_protocol.messages import StepBatch
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler
from tests.unit.core.test_scheduler import answer

STEP_S = 0.05


def first_steps(scheduler: Scheduler, arrivals: dict[int, list[str]]) -> dict[tuple[int, int], int]:
    """The step that sampled the first token of each (handle, sample). `arrivals`: requests to add before a step."""
    first: dict[tuple[int, int], int] = {}
    step = 0
    while scheduler.has_work:
        step += 1
        for i, name in enumerate(arrivals.get(step, [])):
            prompt = range(1000 + 10 * i, 1004 + 10 * i)
            scheduler.add_group(make_group(prompt, name, max_tokens=4, ignore_eos=True, handle=10 + i), step * STEP_S)
        for batch in scheduler.schedule(step * STEP_S):
            deltas = scheduler.update(answer(batch), step * STEP_S)
            for handle, sample in zip(deltas.handles.tolist(), deltas.sample_indices.tolist(), strict=True):
                first.setdefault((handle, sample), step)
        check_scheduler(scheduler)
    return first


def test_samples_are_admitted_as_rows_become_free_and_small_requests_run_beside_them() -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=1000, max_num_seqs=4, max_model_len=1000))
    scheduler.add_group(make_group(8, "long", max_tokens=400, ignore_eos=True, handle=0), 0.0)
    scheduler.add_group(make_group(range(100, 110), "group", n=4, max_tokens=100, ignore_eos=True, handle=1), 0.0)
    first = first_steps(scheduler, {120: [f"small{i}" for i in range(12)]})
    assert [first[1, sample] for sample in range(4)] == [1, 1, 1, 101]
    assert [first[handle, 0] for handle in range(10, 22)] == [120 + 4 * (i // 2) for i in range(12)]


@pytest.mark.parametrize("shape", [(4, 64, 1000), (16, 20, 300), (128, 1, 1000)], ids=lambda shape: f"{shape}")
def test_samples_of_one_tenant_leave_rows_for_the_first_requests_of_others(shape: tuple[int, int, int]) -> None:
    """128 rows and steps of 20 ms: every other tenant has its first token within a second."""
    num_requests, n, max_tokens = shape
    sizes = {"num_blocks": 40000, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    scheduler = make_scheduler(make_capacity(pipeline_depth=2, **sizes))
    scheduler.add_group(make_group(20, "before", max_tokens=4, tenant_id="t0"), 0.0)
    for i in range(num_requests):
        scheduler.add_group(make_group([i, *range(20)], f"big{i}", n=n, max_tokens=max_tokens, tenant_id="big"), 0.0)
    firsts: dict[str, float] = {}
    in_flight: list[StepBatch] = []
    for step in range(400):
        now = 0.02 * step
        if step >= 200 and step % 10 == 0 and step < 240:
            name = f"t{step}"
            scheduler.add_group(make_group([step, *range(30)], name, max_tokens=50, tenant_id=name), now)
        in_flight += scheduler.schedule(now)
        batch = in_flight.pop(0)
        scheduler.update(answer(batch), now)
        for group in scheduler._requests.groups.values():
            if any(seq.row is not None for seq in group.sequences):
                firsts.setdefault(group.request_id, now - group.arrival)
    others = {name: took for name, took in firsts.items() if name.startswith("t")}
    assert len(others) == 4
    assert max(others.values()) < 1.0
