"""Who needs no less than somebody who found no room finds none either."""

import random
from itertools import permutations

import numpy as np

from scheduler_svc.core.admission import Need, peak_with
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceData
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


def test_a_need_that_covers_another_has_no_lower_peak() -> None:
    rng, num_covered = random.Random(0), 0
    for _ in range(100):
        table = running(rng)
        needs = []
        for seq in (sequence(rng) for _ in range(8)):
            saved = rng.randint(0, seq.data.num_tokens // BLOCK_SIZE)
            peak = peak_with(table, seq, seq.data.num_tokens, saved, mean_output=20.0)
            needs.append((Need.of(seq, seq.data.num_tokens - saved * BLOCK_SIZE), peak))
        for (less, its_peak), (more, their_peak) in permutations(needs, 2):
            if less.is_covered_by(more) and its_peak is not None:
                num_covered += 1
                assert their_peak is not None
                assert their_peak >= its_peak, f"{more} against {less}"
    assert num_covered > 100


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
