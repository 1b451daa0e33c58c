"""LruQueue: cached blocks in the order in which they were put back, also when some are used again meanwhile."""

import random

import numpy as np

from scheduler_svc.core.block_manager import LruQueue

NUM_BLOCKS = 12


def test_blocks_are_taken_in_the_order_in_which_they_were_put_back() -> None:
    put_back_at, rng = np.zeros(NUM_BLOCKS, dtype=np.int64), random.Random(0)
    line, model = LruQueue(put_back_at), []
    for when in range(1, 1000):
        here = [block for block, _ in model]
        outside = [block for block in range(NUM_BLOCKS) if block not in here]
        together = rng.sample(outside, rng.randint(0, len(outside)))
        put_back_at[together] = when
        line.append(when, np.array(together, dtype=np.int64))
        model += [(block, when) for block in together]
        for entry in rng.sample(model, rng.randint(0, len(model))):  # hits
            put_back_at[entry[0]] = 0
            model.remove(entry)
        until = rng.randint(when - 3, when)
        expected = [block for block, at in model if at <= until][: rng.randint(1, 5)]
        taken = line.take(len(expected), until).tolist()
        assert taken == expected
        put_back_at[taken] = 0
        del model[: len(taken)]
        assert line.tolist() == [block for block, _ in model]


def test_many_stale_entries_are_skipped() -> None:
    put_back_at = np.zeros(1000, dtype=np.int64)
    line = LruQueue(put_back_at)
    line.append(1, np.arange(999))
    put_back_at[999] = 2
    line.append(2, np.array([999]))
    assert line.head == 1
    assert line.take(1, 1).tolist() == []
    assert (line.head, line.take(5, 2).tolist(), line.is_empty) == (2, [999], True)
