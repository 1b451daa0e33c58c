"""Hundreds of seeds on the scheduler core, thousands with `-m deep`. --sim-seed N runs one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.sequence import FinishReason
from tests.sim.inputs import borders_of
from tests.sim.seeds import parametrize_seeds, read_regressions
from tests.sim.simulation import run_seed

NUM_COVERING = 60  # seeds of test_the_seeds_cover_every_kind_of_event
NUM_SEEDS, NUM_DEEP_SEEDS = 210, 20_000
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_seeds(metafunc, first_seed=NUM_COVERING, num_seeds=NUM_SEEDS, num_deep=NUM_DEEP_SEEDS)


def test_seeds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.parametrize("seed", read_regressions(REGRESSIONS))
def test_regression(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 4000, 40))])
def test_blocks_move(first: int) -> None:
    """From tiers and from other workers, ahead of a sequence that leaves, and while steps are in flight."""
    moves: list[BlockMove] = []
    num_moved = 0
    for seed in range(first, first + 20):
        cluster = run_seed(seed, has_moves=True).cluster
        moves += [event[1] for event in cluster.trace if event[0] == "move"]
        num_moved += cluster.num_moved_blocks
    assert num_moved > 20
    assert {move.source is None for move in moves} == {True, False}
    assert any(move.after_step_id for move in moves)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(10, 1000, 10))])
@pytest.mark.parametrize(
    ("kind", "are_tiers"), [("has_slow_links", {False}), ("has_fast_links", {False, True}), ("has_slow_disks", {True})]
)
def test_blocks_move_between_full_pools(kind: str, are_tiers: set[bool], first: int) -> None:
    """Over slow and fast links; and from slow disks, which are not read once their price is known."""
    sources = set()
    for seed in range(first, first + 10):
        cluster = run_seed(seed, has_moves=True, **{kind: True}).cluster
        sources |= {event[1].source is None for event in cluster.trace if event[0] == "moved" and event[2]}
    assert sources == are_tiers


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 2000, 20))])
@pytest.mark.parametrize("others", [{}, {"has_moves": True}, {"has_turns": True}], ids=["alone", "moves", "turns"])
def test_background_work(others: dict[str, bool], first: int) -> None:
    """Half of the requests get what others leave, lose their rows to them, and end with the same tokens."""
    num_preemptions = 0
    for seed in range(first, first + 20):
        num_preemptions += run_seed(seed, has_background=True, **others).cluster.num_preemptions
    assert num_preemptions > 5


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 2000, 20))])
@pytest.mark.parametrize("others", [{}, {"has_moves": True}, {"has_turns": True}], ids=["alone", "moves", "turns"])
def test_public_prefixes(others: dict[str, bool], first: int) -> None:
    """Requests with two salts share the blocks before a border, and no block after it."""
    num_shared = 0
    for seed in range(first, first + 20):
        requests = run_seed(seed, has_public=True, **others).cluster.requests.values()
        num_shared += sum(bool(borders_of(one.prompt, 1)) and any(one.num_cached.values()) for one in requests)
    assert num_shared > 5


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 2000, 20))])
def test_cache_groups(first: int) -> None:
    """One or two groups with windows beside the first one, whose pools hold one row or all rows."""
    num_cached = num_preemptions = num_groups = 0
    for seed in range(first, first + 20):
        simulation = run_seed(seed, has_groups=True)
        num_groups = max(num_groups, len(simulation.group_windows))
        num_cached += simulation.cluster.num_cached_tokens
        num_preemptions += simulation.cluster.num_preemptions
    assert num_groups == 2
    assert num_cached > 20
    assert num_preemptions


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 1000, 20))])
def test_blocks_of_models_with_windows_move(first: int) -> None:
    """Whole prefixes, also those whose first blocks the rows of the source have left behind."""
    sources = set()
    for seed in range(first, first + 20):
        simulation = run_seed(seed, has_moves=True, has_windows=True, has_fast_links=bool(seed % 2))
        ended = [event[1:] for event in simulation.cluster.trace if event[0] == "moved" and simulation.window]
        sources |= {move.source is None for move, count in ended if count == move.num_items}
    assert sources == {True, False}


def test_blocks_of_cache_groups_move() -> None:
    """With the windows of each group, from tiers and from other workers, also while rows have drafts."""
    whole: list[BlockMove] = []
    num_accepted = 0
    for seed in (1, 8, 68):
        cluster = run_seed(seed, has_groups=True, has_moves=True).cluster
        ended = [event[1:] for event in cluster.trace if event[0] == "moved"]
        whole += [move for move, count in ended if move.extras and count == move.num_items]
        num_accepted += sum(worker.num_accepted for worker in cluster.workers.values())
    assert {move.source is None for move in whole} == {True, False}
    assert num_accepted


@pytest.mark.deep
@pytest.mark.parametrize("first", range(100, 2100, 40))
def test_blocks_of_cache_groups_move_with_more_seeds(first: int) -> None:
    for seed in range(first, first + 40):
        run_seed(seed, has_groups=True, has_moves=True)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(10, 1000, 10))])
def test_turns_of_conversations(first: int) -> None:
    """Turns that continue or change earlier ones, with states and drafts, and with cache groups beside the states."""
    num_cached = num_accepted = num_of_both = 0
    for seed in range(first, first + 10):
        cluster = run_seed(seed, has_turns=True, has_groups=seed % 2 == 1).cluster
        num_cached += cluster.num_cached_tokens
        num_accepted += sum(worker.num_accepted for worker in cluster.workers.values())
        num_of_both += any(worker.snapshots and worker.capacity.groups for worker in cluster.workers.values())
    assert min(num_cached, num_accepted, num_of_both)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(20, 2000, 20))])
def test_operators(first: int) -> None:
    """Several holds of the barrier at once, with fetches, loans, drains, losses, drafts and swaps in between."""
    met = Counter[str]()
    for seed in range(first, first + 20):
        slow, grouped = {"has_slow_links": seed % 2 == 0}, {"has_groups": seed % 2 == 1}
        for systems in ({}, {"has_moves": True, **slow}, {"has_moves": True, **grouped}):
            simulation = run_seed(seed, has_operators=True, **systems)
            assert simulation.operators is not None
            met += simulation.operators.met
            met += Counter(event[0] for event in simulation.cluster.trace)
            met["snapshot"] += any(worker.snapshots for worker in simulation.cluster.workers.values())
            met["draft"] += sum(worker.num_accepted for worker in simulation.cluster.workers.values())
    wanted = ("pause", "sleep", "reset", "update", "loan", "drain", "moved", "swapped", "snapshot", "draft", "restart")
    assert [kind for kind in wanted if not met[kind]] == []


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = run_seed(5), run_seed(5)
    assert first.transcript(1000) == second.transcript(1000)


def test_the_seeds_cover_every_kind_of_event() -> None:
    """Preemption, cache hits, forks with copy-on-write, moves, failures, restarts: none may silently stop happening."""
    met = set()
    for seed in range(NUM_COVERING):
        cluster = run_seed(seed).cluster
        met |= {event[0] for event in cluster.trace}
        met |= {"preemption"} if cluster.num_preemptions else set()
        met |= {"hit"} if cluster.num_cached_tokens else set()
        met |= {"slot taken from rows" for event in cluster.trace if event[0] == "swap" and event[1].evicted}
        met |= {sample.reason for request in cluster.requests.values() for sample in request.expected}
        for _, batch in [event for event in cluster.trace if event[0] == "send"]:
            met |= {"copy"} if len(batch.copy_src) else set()
            met |= {"fork"} if len(batch.fork_rows) else set()
            met |= (
                {"mixed step"}
                if len(batch.rows) > 1 and 1 in batch.query_lens and batch.query_lens.max() > 1
                else set()
            )
        for _, output in [event for event in cluster.trace if event[0] == "answer"]:
            met |= {"failure"} if output.errors else set()
    wanted = {"submit", "refused", "abort", "stop", "join", "remove", "drain", "restart", "slot taken from rows"}
    assert wanted | {"preemption", "hit", "copy", "fork", "mixed step", "failure", FinishReason.REPETITION} <= met
