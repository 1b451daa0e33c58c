"""Workers spread over schedulers: at most one more than any other has, in few moves, and then none moves again."""

from __future__ import annotations

from random import Random

import pytest

from worker_svc.schedulers import Share


def moving(counts: list[int], here: int, there: int) -> list[int]:
    """Which of the workers of scheduler `here` should move to `there`."""
    return [i for i in range(counts[here]) if Share(counts[here], i).should_move(counts[there])]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [(4, 0, [2, 3]), (3, 1, [2]), (2, 1, []), (1, 0, []), (2, 0, [1]), (0, 0, []), (1, 3, [])],
)
def test_half_of_the_difference_moves_and_the_last_workers_first(here: int, there: int, expected: list[int]) -> None:
    assert moving([here, there], 0, 1) == expected


def test_a_scheduler_that_reports_no_number_keeps_its_workers() -> None:
    assert not Share().should_move(0)


@pytest.mark.parametrize("seed", range(20))
def test_workers_that_decide_by_old_numbers_settle_evenly(seed: int) -> None:
    """Each worker decides at a random time by numbers that are up to one round old, as heartbeats are."""
    rng = Random(seed)
    num_schedulers, num_workers = rng.randint(2, 4), rng.randint(2, 12)
    at = [rng.choice((0, rng.randrange(num_schedulers))) for _ in range(num_workers)]
    order = list(range(num_workers))  # in which workers came to their scheduler
    num_moves, last_move = 0, 0
    for turn in range(40):
        seen_at, seen_order = list(at), list(order)
        counts = [seen_at.count(scheduler) for scheduler in range(num_schedulers)]
        for worker in rng.sample(range(num_workers), num_workers // 2):
            here = seen_at[worker]
            others = sorted((counts[i], i) for i in range(num_schedulers) if i != here)
            earlier = [w for w in seen_order[: seen_order.index(worker)] if seen_at[w] == here]
            if Share(counts[here], len(earlier)).should_move(others[0][0]):
                at[worker], num_moves, last_move = others[0][1], num_moves + 1, turn
                order.append(order.pop(order.index(worker)))
    counts = [at.count(scheduler) for scheduler in range(num_schedulers)]
    assert max(counts) - min(counts) <= 1
    assert num_moves <= 2 * num_workers
    assert last_move < 20
