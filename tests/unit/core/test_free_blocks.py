"""FreeList: first in, first out, many at once, with wrap-around."""

import random
from collections import deque

from scheduler_svc.core.block_manager import FreeList


def test_numbers_are_taken_in_the_order_in_which_they_were_put() -> None:
    ring, model, rng = FreeList(7), deque(range(7)), random.Random(0)
    out: list[int] = []
    for _ in range(200):
        count = rng.randint(0, len(model))
        taken = ring.take(count).tolist()
        assert taken == [model.popleft() for _ in range(count)]
        out += taken
        rng.shuffle(out)
        back = [out.pop() for _ in range(rng.randint(0, len(out)))]
        ring.put(back)
        model.extend(back)
        assert (ring.tolist(), ring.size) == (list(model), len(model))


def test_numbers_are_removed_from_any_position() -> None:
    ring = FreeList(4)
    ring.put([*ring.take(2)])
    ring.remove([3, 0])
    assert ring.tolist() == [2, 1]
