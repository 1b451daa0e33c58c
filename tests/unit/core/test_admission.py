"""Who needs no less than somebody who found no room finds none either."""

import random
from itertools import permutations

import numpy as np

from scheduler_svc.core.policy import projected_peak, reserved_blocks
from scheduler_svc.core.sequence import Sequence, SequenceData
from scheduler_svc.core.steps.admission import Need, fits_beside
from scheduler_svc.core.steps.rows import RowTable
from tests.builders import make_capacity, make_group, make_scheduler

BLOCK_SIZE = 4


def sequence(rng: random.Random) -> Sequence:
    num_output, stop = rng.choice([0, 0, 0, 3]), rng.random() < 0.5
    group = make_group(
        rng.randint(1, 40), max_tokens=num_output + rng.randint(1, 60), ignore_eos=stop, priority=rng.randint(0, 1)
    )
    return Sequence(group, 0, SequenceData(group.prompt, np.arange(num_output, dtype=np.uint32)), 1)


def running(rng: random.Random) -> RowTable:
    table = RowTable(make_capacity(num_blocks=1000))
    for _ in range(rng.randint(1, 6)):
        seq = sequence(rng)
        token_ids = seq.data.token_ids()
        blocks = np.arange(-(-len(token_ids) // BLOCK_SIZE), dtype=np.uint32)
        table.open(seq, token_ids, blocks, 0, len(seq.group.prompt) + seq.group.stop.max_tokens)
    return table


def test_who_covers_another_fits_nowhere_where_the_other_does_not() -> None:
    rng, num_refused = random.Random(0), 0
    for _ in range(100):
        table, max_blocks = running(rng), rng.randint(10, 150)
        needs = []
        for seq in (sequence(rng) for _ in range(8)):
            saved = rng.randint(0, seq.data.num_tokens // BLOCK_SIZE)
            fits = fits_beside(table, seq, seq.data.num_tokens, saved, 20.0, max_blocks)
            needs.append((Need.of(seq, seq.data.num_tokens - saved * BLOCK_SIZE), fits))
        for (less, less_fits), (more, more_fits) in permutations(needs, 2):
            if less.is_covered_by(more) and not less_fits:
                num_refused += 1
                assert not more_fits, f"{more} against {less}"
    assert num_refused > 20


def test_what_is_reserved_is_never_less_than_the_peak() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens, remaining = rng.integers(1, 60, (2, int(rng.integers(1, 9))))
        saved = rng.integers(0, tokens // BLOCK_SIZE + 1)
        reserved = reserved_blocks(tokens, remaining, saved, BLOCK_SIZE)
        assert reserved >= projected_peak(tokens, remaining, saved, BLOCK_SIZE)


def test_nobody_is_tried_who_needs_as_much_as_one_who_was_refused() -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=16))
    for i in range(8):
        scheduler.add_group(make_group(range(100 * i, 100 * i + 20), f"r{i}", max_tokens=20, ignore_eos=True), 0.0)
    scheduler.schedule(0.0)
    worker = scheduler._workers["w0"]
    waiting = list(scheduler._waiting)
    assert waiting
    assert all(worker.refuses(seq) for seq in waiting)
    small = sequence(random.Random(0))
    small.digests = [bytes(16)]
    assert not worker.refuses(small)
