"""The choice of a replica: a pure function."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway_svc.schedulers.dispatcher import TIE_TOKENS, Replica, choose_replica


def replica(name: str, load: int = 0, workers: int = 1, cached: int = 0) -> Replica:
    return Replica(name, load_tokens=load, ready_workers=workers, cached_tokens=cached)


def test_equal_prompts_go_to_one_replica_for_any_order_of_the_replicas() -> None:
    names = ["a:1", "b:1", "c:1"]
    for affinity in (b"x", b"y", b"z"):
        chosen = {order[choose_replica([replica(n) for n in order], 100, affinity)] for order in (names, names[::-1])}
        assert len(chosen) == 1


def test_prompts_spread_over_replicas() -> None:
    replicas = [replica("a:1"), replica("b:1")]
    counts = Counter(choose_replica(replicas, 100, b"%d" % i) for i in range(1000))
    assert min(counts.values()) > 400


def test_the_loss_of_a_replica_moves_only_its_prompts() -> None:
    all_three = [replica("a:1"), replica("b:1"), replica("c:1")]
    for i in range(200):
        before = choose_replica(all_three, 100, b"%d" % i)
        if before != 2:
            assert choose_replica(all_three[:2], 100, b"%d" % i) == before


def test_a_cached_prefix_decides_unless_the_load_outweighs_it() -> None:
    others = replica("b:1")
    for affinity in (b"x", b"y", b"z"):
        assert choose_replica([replica("a:1", load=2000, cached=1000), others], 1200, affinity) == 0
        assert choose_replica([replica("a:1", load=4000, cached=1000), others], 1200, affinity) == 1


def test_affinity_adds_at_most_tie_tokens_to_one_replica() -> None:
    loads = [0, 0]
    for _ in range(1000):
        loads[choose_replica([replica("a:1", loads[0]), replica("b:1", loads[1])], 100, b"same")] += 100
    assert abs(loads[0] - loads[1]) <= TIE_TOKENS + 100


def test_load_counts_per_worker() -> None:
    replicas = [replica("a:1", load=3000, workers=3), replica("b:1", load=2000, workers=1)]
    assert choose_replica(replicas, 100, b"x") == 0


@pytest.mark.parametrize("affinity", [b"x", b"y", b"z"])
def test_a_replica_without_workers_is_chosen_only_if_no_replica_has_workers(affinity: bytes) -> None:
    idle, busy = replica("a:1", workers=0, cached=90), replica("b:1", load=10**6)
    assert choose_replica([idle, busy], 100, affinity) == 1
    assert choose_replica([idle], 100, affinity) == 0


def test_an_empty_list_of_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose_replica([], 1, b"")
