"""Where snapshots of recurrent states are taken, which are evicted, and which prefixes hit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features import snapshots
from scheduler_svc.core.features.snapshots import Snapshots
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.sequence import StopCondition
from scheduler_svc.core.speculation import Accepted
from tests.sim.cluster import ROOT_SALT, Cluster, Request

VOCAB = 1000
BLOCK = 16


class Server:
    """One symbolic worker, which checks every state that a row samples from."""

    def __init__(
        self,
        num_snapshots: int | None,
        *,
        num_blocks: int = 4000,
        snapshot_tokens: int = 100_000,
        draft_rate: float = 0,
    ) -> None:
        config = SchedulerConfig(root_salt=ROOT_SALT)
        self.cluster = Cluster(config, block_size=BLOCK, max_model_len=4096, vocab_size=VOCAB)
        capacity = WorkerCapacity(
            "w", 1, num_blocks, BLOCK, 8, 512, 4096, vocab_size=VOCAB,
            num_snapshots=num_snapshots, snapshot_tokens=snapshot_tokens,
        )  # fmt: skip
        self.worker = self.cluster.join(capacity)
        self.worker.draft_rate = draft_rate

    @property
    def part(self) -> Snapshots:
        return self.cluster.scheduler._workers["w"].parts_of_all[0]

    def positions(self) -> list[int]:
        """Positions of the snapshots that rows can start from."""
        return sorted(self.worker.snapshots[kept.slot][0] for kept in self.part.kept.values())

    def run(self, *prompts: list[int], max_tokens: int = 1) -> list[int]:
        """Run these prompts at the same time. Returns how many of their tokens were hits."""
        requests: list[Request] = []
        for prompt in prompts:
            requests.append(self.cluster.make_request(prompt, StopCondition(max_tokens, ignore_eos=True)))
            self.cluster.submit(requests[-1])
        while not all(request.is_done for request in requests):
            self.cluster.schedule()
            for worker in self.cluster.busy_workers():
                self.cluster.answer(worker)
        return [request.num_cached[0] for request in requests]


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize(("position", "has_passed"), [(47, False), (48, True), (51, True), (52, False)])
def test_an_answer_says_which_positions_a_speculating_row_has_passed(row, position, has_passed):
    accepted = Accepted(np.array([5]), np.array([48]), np.array([52]))  # 47 tokens were computed, now 51 are
    taken = snapshots.Taken(row, position, 0, 16, is_last=True, is_sure=False)
    assert snapshots._has_passed(accepted, taken) == (has_passed and row == 5)
    assert not snapshots._has_passed(None, taken)


@pytest.mark.parametrize(("snapshot_tokens", "expected"), [(100, [112, 224, 288]), (1000, [288])])
def test_long_prompts_have_snapshots_as_large_as_the_kv_between_them(snapshot_tokens, expected):
    server = Server(8, snapshot_tokens=snapshot_tokens)
    server.run(tokens(300))
    assert server.positions() == expected


def test_a_snapshot_that_saves_more_is_kept_longer():
    server = Server(2)
    long, short = tokens(1000), tokens(40, 1)
    server.run(long)
    server.run(short)
    for seed in range(2, 12):
        server.run(tokens(40, seed))
    assert server.run(long) == [992]
    assert server.run(short) == [0]
    assert server.part.counts.snapshots_evicted > 0


@pytest.mark.parametrize("prefix", [1000, 1100])
@pytest.mark.parametrize("width", [4, pytest.param(1, marks=pytest.mark.deep)])
def test_hits_survive_a_shift_of_the_prompt(prefix, width):
    """64 prompts share a prefix; in the same workload with 100 tokens more, peers that keep states at multiples of a
    large block lose all hits."""
    server = Server(16)
    shared, hits = tokens(prefix), []
    for first in range(0, 64, width):
        hits += server.run(*(shared + tokens(64, 1 + first + i) for i in range(width)))
    assert sum(hit == prefix // BLOCK * BLOCK for hit in hits) >= 64 - 2 * width
