"""Line: cached blocks in the order in which they were put back, whoever leaves meanwhile."""

import random

import numpy as np

from scheduler_svc.core.line import Line

NUM_BLOCKS = 12


def test_blocks_come_out_in_the_order_in_which_they_were_put_back() -> None:
    put_back_at, rng = np.zeros(NUM_BLOCKS, dtype=np.int64), random.Random(0)
    line, model = Line(put_back_at), []
    for when in range(1, 400):
        outside = [block for block in range(NUM_BLOCKS) if block not in model]
        together = rng.sample(outside, rng.randint(0, len(outside)))
        put_back_at[together] = when
        line.append(when, np.array(together, dtype=np.int64))
        model += together
        for block in rng.sample(model, rng.randint(0, len(model))):  # a hit
            put_back_at[block] = 0
            model.remove(block)
        if not line.is_empty:
            taken = line.take(rng.randint(1, 5)).tolist()
            assert taken == model[: len(taken)]
            put_back_at[taken] = 0
            del model[: len(taken)]
        if rng.random() < 0.1:
            line.forget_who_left()
            assert line.size == len(model)
        assert line.tolist() == model
        assert line.size >= len(model)


def test_a_part_of_which_all_have_left_gives_nothing_and_is_gone() -> None:
    put_back_at = np.array([0, 0, 2])
    line = Line(put_back_at)
    line.append(1, np.array([0, 1]))
    line.append(2, np.array([2]))
    assert (line.head, line.take(1).tolist()) == (1, [])
    assert (line.head, line.take(1).tolist(), line.is_empty) == (2, [2], True)
