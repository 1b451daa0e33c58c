"""The time of every answered step is divided among requests, whatever ends, moves or is preempted meanwhile."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from scheduler_svc.core.messages import Finished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from step_protocol.messages import StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler

EOS = 2


def answer_of(batch: StepBatch, rng: random.Random) -> StepOutput:
    """Random tokens, some of them EOS, computed in a random time."""
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    tokens = np.array([EOS if rng.random() < 0.05 else 7 for _ in rows], np.uint32)
    return StepOutput(batch.step_id, rows, tokens, worker_id=batch.worker_id, forward_us=rng.randrange(1, 5000))


@pytest.mark.parametrize("seed", range(6))
def test_shares_add_up_to_the_time_of_all_steps(seed: int) -> None:
    rng = random.Random(seed)
    capacities = [
        make_capacity(name, num_blocks=24, max_num_seqs=5, pipeline_depth=2, max_num_batched_tokens=16)
        for name in ("w0", "w1")
    ]
    scheduler = make_scheduler(*capacities, eos_token_ids=(EOS,))
    in_flight: dict[str, list[StepBatch]] = {"w0": [], "w1": []}
    ended, total, num_added = list[Finished](), 0, 0
    for turn in range(400):
        now = turn * 0.01
        if num_added < 40 and rng.random() < 0.3:
            group = make_group(
                rng.randrange(1, 30), f"r{num_added}", n=rng.choice((1, 1, 3)), max_tokens=rng.randrange(1, 30),
                tenant_id=rng.choice(("a", "b")),
            )  # fmt: skip
            ended += scheduler.add_group(group, now).finished
            num_added += 1
        if rng.random() < 0.02 and num_added:
            ended += scheduler.abort_group(f"r{rng.randrange(num_added)}", FinishReason.ABORTED).finished
        if turn == 150:
            scheduler.remove_worker("w1")
            in_flight["w1"].clear()
        for batch in scheduler.schedule(now):
            in_flight[batch.worker_id] += [batch, *batch.then]
        for batches in in_flight.values():
            if batches and rng.random() < 0.8:
                output = answer_of(batches.pop(0), rng)
                total += output.forward_us
                ended += scheduler.update(output, now).finished
    assert num_added == 40
    assert not scheduler.has_work
    costs = scheduler.stats().costs
    assert costs.processor_us == total
    paid = sum(end.processor_us for end in ended)
    assert paid + costs.unattributed_us == pytest.approx(total, rel=1e-9)
    assert paid > 0.9 * total
    by_tenant = Counter[str]()
    for end in ended:
        by_tenant[end.group.tenant_id] += end.processor_us  # type: ignore[assignment]
    assert {name: cost.processor_us for name, cost in costs.tenants.items()} == pytest.approx(dict(by_tenant))


def run(scheduler: Scheduler, step_s: float) -> dict[str, Finished]:
    """Answers one step after the other; each takes `step_s`. Returns the ends by request."""
    ended, now = dict[str, Finished](), 0.0
    while scheduler.has_work:
        for batch in scheduler.schedule(now):
            now += step_s
            rows = batch.rows[batch.sample_mask]
            tokens = np.full(len(rows), 7, np.uint32)
            output = StepOutput(batch.step_id, rows, tokens, worker_id=batch.worker_id, forward_us=int(step_s * 1e6))
            ended |= {end.group.request_id: end for end in scheduler.update(output, now).finished}
    return ended


def test_a_row_pays_for_its_tokens_and_its_blocks() -> None:
    scheduler = make_scheduler(make_capacity(block_size=4, num_blocks=64))
    scheduler.add_group(make_group(12, "long", max_tokens=5, ignore_eos=True), 0.0)
    scheduler.add_group(make_group(range(100, 104), "short", max_tokens=1, ignore_eos=True), 0.0)
    ended = run(scheduler, 0.5)
    assert ended["short"].processor_us == pytest.approx(0.5e6 * 4 / 16)
    assert ended["long"].processor_us == pytest.approx(0.5e6 * 12 / 16 + 4 * 0.5e6)
    assert ended["short"].block_s == pytest.approx(0.5)
    assert ended["long"].block_s == pytest.approx(5 * 0.5 * (3 + 4) / 2)


def test_an_idle_worker_costs_nothing() -> None:
    scheduler = make_scheduler(make_capacity())
    scheduler.add_group(make_group(4, "first", max_tokens=1, ignore_eos=True), 0.0)
    run(scheduler, 0.5)
    scheduler.add_group(make_group(range(50, 54), "second", max_tokens=1, ignore_eos=True), 100.0)
    (batch,) = scheduler.schedule(100.0)
    rows = batch.rows[batch.sample_mask]
    output = StepOutput(batch.step_id, rows, np.full(1, 7, np.uint32), worker_id=batch.worker_id, forward_us=1000)
    (end,) = scheduler.update(output, 100.25).finished
    assert end.block_s == pytest.approx(0.25)
