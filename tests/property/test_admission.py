"""Admission is exact: if all lengths are known, no sequence is ever preempted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import make_capacity, make_group, make_scheduler, run_to_end

BLOCK_SIZE = 4
# Leading tokens of a common prefix, own tokens, max_tokens, samples, steps after which it arrives
REQUESTS = st.lists(
    st.tuples(st.integers(0, 16), st.integers(1, 8), st.integers(0, 24), st.integers(1, 3), st.integers(0, 20)),
    min_size=2,
    max_size=8,
)


@given(requests=REQUESTS, spare_blocks=st.integers(0, 8), prefix_caching=st.booleans())
@settings(max_examples=200)
def test_no_sequence_of_known_length_is_preempted(
    requests: list[tuple[int, int, int, int, int]], spare_blocks: int, prefix_caching: bool
) -> None:
    groups = {
        i: make_group(
            [*range(num_shared), *range(100 * (i + 1), 100 * (i + 1) + num_own)],
            f"r{i}",
            max_tokens=max_tokens,
            n=n,
            ignore_eos=True,
        )
        for i, (num_shared, num_own, max_tokens, n, _) in enumerate(requests)
    }
    alone = max(g.n * -(-(len(g.prompt) + g.stop.max_tokens) // BLOCK_SIZE) for g in groups.values())
    capacity = make_capacity(
        num_blocks=alone + spare_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=1000, max_num_seqs=30
    )
    scheduler = make_scheduler(capacity, prefix_caching=prefix_caching, watermark=0.0)
    arrivals: dict[int, list[int]] = {}
    for i, (*_, arrives_after) in enumerate(requests):
        arrivals.setdefault(arrives_after, []).append(i)

    def arrive(step: int) -> None:
        for i in arrivals.pop(step, []):
            scheduler.add_group(groups[i], 0.0)

    run_to_end(scheduler, before_step=arrive)
    while arrivals:
        arrive(min(arrivals))
        run_to_end(scheduler, before_step=arrive)
    assert scheduler.stats().counts.num_preemptions == 0
